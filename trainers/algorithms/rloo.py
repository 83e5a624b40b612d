"""RLOO: the baseline of a sample is the mean of the *other* samples.

Paper: Ahmadian et al., Back to Basics, 2402.14740; Kool et al. 2019.

    A = score - mean of the others' scores in the group

The baseline is unbiased, since a sample's own score is not in it. A trajectory in which the agent spoke several times
is one sample: its own calls are never in each other's baseline.

How published code deviates: MARTI takes its groups from reshaping a list of calls, so that in a debate an agent's
two turns of one trajectory are each other's baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..controller.statistics.comparison import Groups
from ..controller.statistics.table import Floats
from .algorithm import GroupRelative


@dataclass(frozen=True, kw_only=True)
class RLOO(GroupRelative):
    name = "rloo"

    std: bool = False
    """Division by the group's deviation: off, because leave-one-out never divides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std:
            raise ValueError(
                "rloo: std is true, but leave-one-out does not divide by a deviation: set std=false, or choose grpo"
            )

    def compare(self, within: Groups, x: Floats) -> Floats:
        return within.leave_one_out(x)
