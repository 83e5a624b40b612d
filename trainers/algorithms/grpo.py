"""GRPO: the advantage of a sample is the number of deviations by which its score exceeds its group's mean.

Paper: Shao et al., DeepSeekMath, 2402.03300.

    A = (score - mean) / (std + eps)          over the samples of a group; std with n - 1
    loss: mean over a decision's tokens of the clipped surrogate + kl_loss * KL, then mean over decisions

The group is (task, agent). Each trajectory counts once, so agents that are called a varying number of times are
compared correctly. A group of one sample, or of equal samples, teaches nothing and gets 0.

How published code deviates: in PettingLLMs, singletons keep their raw score as advantage when all groups are
singletons; in Dr. MAS they always do. The groups of PettingLLMs mix tasks, and those of MARTI come from reshaping.
Dr. MAS counts every call, so long trajectories dominate the mean. The k3 estimate of the KL is differentiated as it
stands, which does not give the gradient of the KL (`kl_own_gradient=true` does the same).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.choices import Aggregation
from .algorithm import GroupRelative


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupRelative):
    name = "grpo"

    aggregation: Aggregation = "sequence-mean"
    """Aggregation in which every decision counts the same, however long it is."""
