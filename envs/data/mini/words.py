"""Word lists of the names in the mini world.

The lists are short, so a tokenizer of two thousand words covers the whole world, and a name is two tokens for the tiny
model. A name consists of a *first* and a *second* word. These two words alone decide its split (`split_of`), without the
seed. So a name of the test split is never in a train split. Some second words occur only in validation or test: a model
sees them for the first time in an evaluation, and has to copy them.
"""

# ruff: noqa: SIM905  (word lists are easier to read and edit as prose)

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


def split_of_combination(template: str, numbers: Sequence[int]) -> str:
    """Return the split of a template with its numbers. One in eight belongs to validation, one in eight to test."""
    digest = hashlib.sha256(f"{template}:{','.join(map(str, numbers))}".encode()).digest()
    return {0: "validation", 1: "test"}.get(digest[0] % 8, "train")


@dataclass(frozen=True, slots=True)
class NameWords:
    """Two word lists of one kind of entity. The last words of `second` are held out."""

    first: tuple[str, ...]
    second: tuple[str, ...]

    @property
    def held_out(self) -> int:
        """Number of second words that only validation uses. Test has as many."""
        return max(2, len(self.second) // 8)

    def split_of(self, first: int, second: int) -> str:
        """Return the split of the name with these two words, named by index."""
        train_words = len(self.second) - 2 * self.held_out
        if second >= train_words + self.held_out:
            return "test"
        if second >= train_words:
            return "validation"
        return {0: "validation", 1: "test"}.get((first * 7 + second * 3) % 8, "train")


PEOPLE = NameWords(
    first=tuple(
        "Ada Amos Anna Arlo Bela Bruno Cara Cyrus Dora Edgar Elsa Emil Esther Felix Flora Gideon Greta Hugo "
        "Ida Igor Ines Ivan Jonas Julia Kira Lars Lena Leo Lydia Magda Marco Maya Milo Nadia Nils Nora Olga "
        "Oscar Otto Paula Petra Quinn Rosa Ruben Sana Silas Sofia Tara Theo Uma Vera Victor Wanda Yara Zeno".split()
    ),
    second=tuple(
        "Abbott Acker Barlow Becker Bishop Boyle Brandt Calder Carver Conrad Cooper Cross Dalton Drake Dunn "
        "Eaton Ellis Falk Farrow Finch Fisher Frost Gallo Garner Grant Greer Haines Hale Harper Hobbs Holt "
        "Hurst Jansen Keller Kemp Klein Knox Lang Larkin Lowe Mercer Meyer Moss Nash Novak Nye Osborn Page "
        "Parrish Pike Porter Quist Ramsey Reyes Rhodes Rowe Sato Sawyer Shaw Sloan Stark Sutton Tanner Thorne "
        "Tucker Vance Vogel Walsh Webb Wilder Winter Yates York Zeller Adler Bauer Cobb Dorsey Fenn Hollis "
        "Ives Judd Kirby Lund Marsh Norris Orr Platt Royce Strand".split()
    ),
)

TOWNS = NameWords(
    first=tuple("North South East West Port Lake Fort Upper Lower New Old Great Little Saint".split()),
    second=tuple(
        "Alder Ashby Barton Birch Bremen Carlow Corfu Dover Dunmore Elgin Fargo Galway Hanley Harwich Ilford "
        "Jarrow Kelso Lanark Lisburn Malden Morley Nairn Newton Oakham Paisley Penrith Ripon Rugby Salem "
        "Selby Stowe Tarbet Thirsk Ulster Verden Wells Whitby Wigan Yeovil Arden Bodmin Cromer Denby Ely "
        "Filey Goole Hythe Leigh".split()
    ),
)

WORKS = NameWords(
    first=tuple(
        "Silent Golden Broken Hidden Distant Frozen Burning Gentle Hollow Restless Scarlet Secret Sleeping "
        "Velvet Wandering Wooden Ancient Bitter Crimson Empty Endless Faithful Forgotten Glass Iron Lonely "
        "Lost Narrow Painted Paper Quiet Rising Stolen Winding Wild Yellow".split()
    ),
    second=tuple(
        "Anchor Arrow Bell Bridge Candle Castle Circle Compass Crown Door Dream Feather Fire Forest Garden "
        "Gate Harbor Harvest Horizon House Island Journey Key Lantern Letter Meadow Mirror Moon Mountain "
        "Orchard Promise Rain River Road Rose Sea Shadow Ship Song Sparrow Star Storm Summer Sword Tower "
        "Valley Voice Voyage Wall Window Wolf Acorn Canyon Falcon Glacier Jungle Kite Lagoon Meteor Nest "
        "Oracle Prairie Raven Spiral Temple".split()
    ),
)

COMPANIES = NameWords(
    first=tuple(
        "Acme Apex Argo Astra Atlas Aurora Beacon Borealis Cobalt Comet Delta Echo Ember Epsilon Fulcrum "
        "Helix Indigo Juno Kappa Lumen Magnet Nimbus Nova Omega Onyx Orbit Pinnacle Polaris Prism Quantum "
        "Rocket Sigma Solar Summit Titan Triton Vector Vertex Zenith Zephyr".split()
    ),
    second=tuple(
        "Works Mills Brothers Partners Foundry Press Motors Systems Trading Group Labs Industries Supply "
        "Studios Union Guild Depot Forge".split()
    ),
)

COUNTRIES = tuple(
    "Albia Borland Cestria Dorvia Elmaria Fenland Galdova Harmonia Istria Jorvik Kelmark Lorraine Merovia "
    "Norland Ostrava Pelagia Quilon Ruritania Sardonia Tirania".split()
)
RIVERS = tuple(
    "Arno Bann Cale Dart Eske Fal Gaur Hull Isar Kenn Lune Maas Nith Oder Plym Roding Severn Tay Ure Vey".split()
)
JOBS = tuple(
    "painter poet doctor lawyer teacher chemist sailor baker singer judge farmer pilot dancer engineer "
    "gardener surgeon tailor jeweller".split()
)
PRODUCTS = tuple(
    "clocks boots kettles lamps bicycles pianos carpets radios ropes bottles knives mirrors paints tractors "
    "violins candles saddles umbrellas".split()
)
WORK_KINDS = tuple("novel film opera play ballet poem song painting".split())
TOPICS = tuple(
    "love war friendship justice exile memory winter travel revenge family money faith music hunger".split()
)
YEARS = range(1850, 2000)
