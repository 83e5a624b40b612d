"""MATPO: one model plays planner and workers; all are credited from the planner's group.

Paper: Mo et al., Multi-Agent Tool-Integrated Policy Optimization, 2510.04678.

    score = what the main role earned in the trajectory, for *every* decision in it, the workers' too
    A     = (score - mean) / (std + eps)           over the trajectories of a task

A worker has no reward of its own and no group: it is credited by how well the planner did.

A worker called ten times weighs ten times as much in the loss. `aggregation="unit-mean"` with `unit="episode"` makes
trajectories count the same. The authors' code was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..controller.statistics.table import Floats, Ints, Signal, Table, total
from .algorithm import AlgorithmState, GroupRelative, Needs


@dataclass(frozen=True, kw_only=True)
class MATPO(GroupRelative):
    name = "matpo"

    main: str = "planner"
    """Role whose earnings are the score of the whole trajectory."""
    group: str = "task"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, roles={"main": self.main})

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        roles = sorted({row.role for row in table.rows})
        if roles and self.main not in roles:
            raise ValueError(f"matpo: no decision was made by main role {self.main!r}; the roles are {roles}")
        return super().advantages(table, mine, state)

    def scores(self, table: Table) -> Floats:
        episode = table.codes("task", "episode")
        is_main = np.array([row.role == self.main for row in table.rows], np.float64)
        return total(episode, table.reward * is_main)
