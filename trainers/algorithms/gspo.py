"""GSPO: the ratio, and the clip, of whole decisions.

Paper: Zheng et al., Group Sequence Policy Optimization, 2507.18071.

    s = exp(mean over a decision's tokens of (logp - proximal))            its geometric-mean ratio
    loss: mean over decisions of max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

Rewards are given to replies, so the correction is made per reply too; token ratios only add noise. The clip range is
a hundred times narrower, because a mean moves less than its parts. A decision is never split over micro-batches, so
s is exact. Written as GSPO-token: with one advantage per decision the gradient is the same.

Where samples come from an older version, their correction is by sequence too (`importance`): a token-wise one would
put back the noise that the sequence's ratio took out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.choices import Aggregation, Importance
from .algorithm import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GSPO(GroupRelative):
    name = "gspo"

    clip_low: float = 3e-4
    """The paper's value. On short replies, whose means move more, 1e-3–1e-2."""
    clip_high: float = 4e-4
    """The paper's value."""
    dual_clip: float | None = None
    """A narrow clip on a mean needs no second one."""
    importance: Importance = "sequence-truncate"
    aggregation: Aggregation = "sequence-mean"

    def log_ratio(self, batch: Batch) -> Tensor:
        from ..group import losses

        return losses.sequence_log_ratio(batch)
