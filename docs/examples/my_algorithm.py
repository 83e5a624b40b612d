"""An algorithm of one's own in one file: ranks instead of scores.

Within a group, a sample's advantage is its rank, spread evenly over -1 … 1; ties share their mean rank. Rewards then
need no scale: a role that earns 0.01 learns as fast as one that earns 100.

    import my_algorithm, unitymas                          # the import registers it
    unitymas.train("rag-nq", preset="shared", steps=8, overrides=["policies.team.algorithm.name=rank"])
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unitymas.trainers.algorithms import GroupRelative, register_algorithm
from unitymas.trainers.controller.statistics.comparison import Groups
from unitymas.trainers.controller.statistics.table import Floats, Ints, Signal, Table


@dataclass(frozen=True, kw_only=True)
class Rank(GroupRelative):
    name = "rank"

    temperature: float = 1.0
    """Bends the ranks: above 1 only the best and the worst count much. Usual 1–3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ValueError(f"rank: temperature is {self.temperature}: it must be greater than 0")

    def advantages(self, table: Table, mine: Ints, state: MutableMapping[str, Any]) -> list[Signal]:
        groups, score = self.groups(table), self.scores(table)
        rank = ranks(groups, score)
        advantage = np.sign(rank) * np.abs(rank) ** self.temperature
        return self.compared(table, mine, np.where(groups.still(score), 0.0, advantage), groups.still(score))


def ranks(groups: Groups, score: Floats) -> Floats:
    """Each row's mean rank within its group, from -1 (lowest) to 1 (highest)."""
    found = np.zeros(len(score))
    for rows in np.split(np.argsort(groups.code, kind="stable"), np.cumsum(np.bincount(groups.code))[:-1]):
        if len(rows) > 1:
            ordered = np.sort(score[rows])
            below = np.searchsorted(ordered, score[rows], "left")
            not_above = np.searchsorted(ordered, score[rows], "right")
            found[rows] = (below + not_above - len(rows)) / (len(rows) - 1)
    return found


register_algorithm("rank", Rank)
