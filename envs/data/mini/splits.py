"""Which split what belongs to, and a check that the splits share nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from .words import SPLITS


def split_of_combination(template: str, numbers: Sequence[int]) -> str:
    """The split of a (template, numbers) combination: one in eight is for validation, one in eight for test."""
    digest = hashlib.sha256(f"{template}:{','.join(map(str, numbers))}".encode()).digest()
    return {0: "validation", 1: "test"}.get(digest[0] % 8, "train")


def check_disjoint(seeds: Iterable[int] = (0,), size: int = 512) -> None:
    """Raise if any name, program or sum of one split turns up in another, under any of these seeds."""
    from . import passages, programs, sums  # these modules need `split_of_combination`

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
