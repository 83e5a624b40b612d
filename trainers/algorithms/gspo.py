"""GSPO: ratios and clips of whole decisions.

Paper: Zheng et al., Group Sequence Policy Optimization, 2507.18071.

    s = exp(mean over a decision's tokens of (logp - proximal))            its geometric-mean ratio
    loss: mean over decisions of max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

Rewards are given to replies, so the correction is made per reply too; token ratios only add noise. The clip range is
a hundred times narrower, because a mean moves less than its parts. A decision is never split over micro-batches, so
s is exact. The loss is written as GSPO-token: with one advantage per decision the gradient is the same.

Samples of an older version are corrected by sequence too (`importance`). A correction by token would bring back the
noise that the sequence's ratio removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.choices import AboveOne, Aggregation, Amount, Importance, Share
from .algorithm import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.learning.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GSPO(GroupRelative):
    name = "gspo"

    clip_low: Share = 3e-4
    """Lower clip: the paper's value. Short replies, whose means move more, need 1e-3–1e-2."""
    clip_high: Amount = 4e-4
    """Upper clip: the paper's value."""
    dual_clip: AboveOne | None = None
    """Bound on exploded ratios. Off: a narrow clip on a mean needs no second one."""
    importance: Importance = "sequence-truncate"
    aggregation: Aggregation = "sequence-mean"

    def log_ratio(self, batch: Batch) -> Tensor:
        from ..group.learning import losses

        return losses.sequence_log_ratio(batch)
