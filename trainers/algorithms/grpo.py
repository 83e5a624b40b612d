"""GRPO: a sample's advantage is how many deviations its score lies above its group's mean.

Paper: Shao et al., DeepSeekMath, 2402.03300.

    A = (score - mean) / (std + eps)          over the samples of a group; std with n - 1
    loss: mean over a decision's tokens of the clipped surrogate + kl_loss * KL, then mean over decisions

The group is (task, agent), each trajectory counting once, so agents called a varying number of times are compared
correctly; a group of one sample, or of equal samples, teaches nothing and gets 0.

How published code deviates: PettingLLMs' singletons keep their raw score as advantage when all groups are singletons,
Dr. MAS's always do; PettingLLMs' groups mix tasks, and MARTI's come from reshaping; Dr. MAS counts every call, so that
long trajectories dominate the mean. The k3 estimate of the KL is differentiated as it stands, which is not the KL's
gradient (`kl_own_gradient=true` does the same).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.choices import Aggregation
from .algorithm import GroupRelative


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupRelative):
    name = "grpo"

    aggregation: Aggregation = "sequence-mean"
    """Every decision counts the same, however long."""
