"""Dr. GRPO: GRPO without its two biases.

Paper: Liu et al., Understanding R1-Zero-Like Training, 2503.20783.

    A = score - mean                    dividing by the deviation favours tasks nearly always or nearly never solved
    loss: sum over a decision's tokens / `length`, a constant: dividing by the reply's own length lets wrong replies
          grow, since a long one is pushed down less per token

How published code deviates: MARTI's `dr_grpo` means the first change alone; the loss is another option there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.choices import Aggregation, Positive
from .algorithm import GroupRelative


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GroupRelative):
    name = "dr_grpo"

    std: bool = False
    aggregation: Aggregation = "sequence-sum"
    length: Positive = 128.0
    """Constant by which the sum over a decision's tokens is divided. Usual: the token limit. It only scales
    the learning rate.
    """
