"""Passages in the style of an encyclopaedia: one for each entity, with one to three short sentences.

Every passage contains a value that looks like the answer: the home beside the birthplace, the person to whom a work is
dedicated beside its creator, the head beside the founder. Names also occur in passages of other entities. So a word match
finds candidates, and only reading decides between them.
"""

from __future__ import annotations

from collections.abc import Iterator

from .world import ENTITIES_PER_BLOCK, Dice, Entity, Person, Town, Work, World

TOWN = (
    "{name} is a town in {country}. It lies on the river {river} and was founded in {founded}.",
    "Founded in {founded}, {name} stands on the river {river} in {country}.",
    "The river {river} flows through {name}, a town of {country} that dates from {founded}.",
    "{name} dates from {founded}. The town belongs to {country} and lies on the river {river}.",
)
PERSON = (
    "{name} is {a_job} who was born in {birthplace} in {born} and lives in {home}.",
    "Born in {birthplace} in {born}, {name} moved to {home} to work as {a_job}.",
    "{name} lives in {home} and works as {a_job}. The year of birth is {born}, the birthplace {birthplace}.",
    "The {job} {name} has a house in {home}, but was born in {birthplace} in {born}.",
)
WORK = (
    "{name} is {a_kind} about {topic} by {creator}. It was made in {year} and is dedicated to {sponsor}.",
    "Dedicated to {sponsor}, {name} was made by {creator} in {year}. The {kind} is about {topic}.",
    "{creator} made {name} in {year}. The {kind} tells of {topic} and honours {sponsor}.",
    "In {year} {sponsor} was honoured with {name}, {a_kind} about {topic} whose creator is {creator}.",
)
COMPANY = (
    "{name} makes {product}. It was founded in {founded} by {founder}, is led by {head} and based in {seat}.",
    "{founder} founded {name} in {founded}. Today {head} leads it from {seat}, and it sells {product}.",
    "Led by {head}, {name} of {seat} sells {product}. Its founder is {founder}, who began in {founded}.",
    "The head of {name} is {head}. The company makes {product} in {seat}; {founder} founded it in {founded}.",
)


def article(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def tell(entity: Entity, dice: Dice) -> str:
    """Return a text about an entity, in one of several wordings."""
    if isinstance(entity, Town):
        return dice.pick(TOWN).format(
            name=entity.name, country=entity.country, river=entity.river, founded=entity.founded
        )
    if isinstance(entity, Person):
        return dice.pick(PERSON).format(
            name=entity.name, birthplace=entity.birthplace.name, home=entity.home.name,
            born=entity.born, job=entity.job, a_job=article(entity.job),
        )  # fmt: skip
    if isinstance(entity, Work):
        return dice.pick(WORK).format(
            name=entity.name, kind=entity.kind, a_kind=article(entity.kind), creator=entity.creator.name,
            sponsor=entity.sponsor.name, year=entity.year, topic=entity.topic,
        )  # fmt: skip
    return dice.pick(COMPANY).format(
        name=entity.name, founder=entity.founder.name, head=entity.head.name, seat=entity.seat.name,
        founded=entity.founded, product=entity.product,
    )  # fmt: skip


def block_passages(world: World, number: int) -> list[dict[str, str]]:
    """Return the eight passages of one block."""
    dice = Dice("passages", world.split, world.seed, number)
    return [
        {
            "id": f"mini-{world.split}-{number * ENTITIES_PER_BLOCK + i}",
            "title": entity.name,
            "text": tell(entity, dice),
        }
        for i, entity in enumerate(world.block(number).entities)
    ]


def passages(split: str, count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield the first `count` passages of a split's world. Only one block is in memory at a time."""
    world = World(split, seed)
    made = 0
    for number in range(-(-count // ENTITIES_PER_BLOCK)):
        for passage in block_passages(world, number):
            if made == count:
                return
            made += 1
            yield passage
