"""Check that the splits of the mini world are disjoint."""

from __future__ import annotations

from collections.abc import Iterable

from .passages import passages
from .programs import programs
from .sums import sums
from .words import SPLITS


def check_disjoint(seeds: Iterable[int] = (0,), size: int = 512) -> None:
    """Raise an error if a name, program or sum of one split occurs in another, under any of these seeds."""
    owner: dict[str, str] = {}
    for seed in seeds:
        for split in SPLITS:
            things = [passage["title"] for passage in passages(split, size, seed)]
            things += [row["solution"] for row in programs(split, size, seed)]
            things += [f"{row['problem'].split()[-3:]} {row['solution']}" for row in sums(split, size, seed)]
            for thing in things:
                if owner.setdefault(thing, split) != split:
                    raise ValueError(
                        f"{thing!r} is in the splits {owner[thing]} and {split} of the mini world"
                    )
