"""Dr. MAS: a mean and a deviation for each agent, not one for all.

Paper: Feng et al., Dr. MAS: Stable Reinforcement Learning for Multi-Agent LLM Systems, 2602.08847.

    A = (score - mean_k) / (std_k + eps)           score: a call's own; mean_k, std_k over agent k's calls on the task

Where agents have different distributions of rewards, one baseline for all inflates the second moment of the gradient.

    statistics="agent"    per agent: the paper
    statistics="task"     one for all agents: the GRPO that the paper argues against
    statistics="step"     one for all agents of the same turn: an ablation

    each="call"           every call counts: the paper. One success in 1 call against a failure in 3 calls gives
                          +1.5 and three times -0.5
    each="trajectory"     every trajectory counts once: +0.707 and three times -0.707

How published code deviates: in a group of one, A is its raw score (here 0). A batch is made even by duplicating random
rows *before* the statistics (here nothing is duplicated). A malformed verdict counts as approval (here it never does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config.choices import Aggregation
from ..controller.statistics.comparison import Groups, ScoreKind, partition
from ..controller.statistics.table import Table
from .algorithm import GroupRelative


@dataclass(frozen=True, kw_only=True)
class DrMAS(GroupRelative):
    name = "dr_mas"

    statistics: Literal["agent", "task", "step"] = "agent"
    """Calls that share a mean and a deviation."""
    each: Literal["", "trajectory", "call"] = "call"
    """Unit that counts once in the mean and the deviation."""
    score: ScoreKind = "act"
    """Score of a call: its own reward. In the paper this is the team's reward on every call, less a call's
    own format penalty: let the environment's rules pay so, or `spread` it. "mean": the agent's average in the
    trajectory.
    """
    aggregation: Aggregation = "token-mean"

    def groups(self, table: Table) -> Groups:
        return partition(table, self.statistics, self.each)
