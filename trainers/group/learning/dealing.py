"""Distribution of a learner's micro-batches to its ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..sample_store import Sample
from .packing import micro_batches, tokens

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """A learner that works alone."""

    size: int = 1
    index: int = 0
    """Number of this rank among `size`."""

    def gather(self, own: T) -> list[T]:
        """Exchange plain data between ranks. Return the data of each rank, in order."""
        return [own]


ALONE = Peers()


def deal(
    samples: Sequence[Sample], budget: int, ranks: int, critic: bool = False, apart: Collection[str] = ()
) -> list[list[list[int]]]:
    """Deal micro-batches to ranks, in rounds: `[round][rank]` is a list of indices, empty where a rank has none left.

    A pass of one rank is a pass of all of them, so the micro-batches of a round are about equally long, and of the same
    role in `apart`: ranks add up gradients of the same parameters. Where there are fewer than ranks, they are cut smaller.
    For one rank they are those of `micro_batches`, in their order.
    """
    if ranks == 1 or not samples:
        return [[micro] for micro in micro_batches(samples, budget, critic, apart)]
    rounds: list[list[list[int]]] = []
    by_role: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        by_role.setdefault(sample.role if sample.role in apart else "", []).append(index)
    for _, own in sorted(by_role.items()):
        parts = _rounds([samples[i] for i in own], budget, ranks, critic)
        rounds += [[[own[i] for i in micro] for micro in round] for round in parts]
    return rounds


def _rounds(samples: Sequence[Sample], budget: int, ranks: int, critic: bool) -> list[list[list[int]]]:
    """Deal micro-batches of one role."""
    whole = [len(tokens(sample, critic)) for sample in samples]
    rounds = -(-sum(whole) // (budget * ranks))
    cut = micro_batches(samples, min(budget, -(-sum(whole) // (rounds * ranks))), critic)
    cut.sort(key=lambda micro: -sum(whole[i] for i in micro))  # a stable sort: the same on every rank
    return [
        [*cut[i : i + ranks], *([[]] * (ranks - len(cut[i : i + ranks])))] for i in range(0, len(cut), ranks)
    ]
