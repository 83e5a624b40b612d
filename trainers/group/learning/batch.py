"""The input of a loss: the trained tokens of one micro-batch, in flat tensors.

Shapes, used in all of `trainers/`: `T` is the number of trained tokens in the micro-batch, `S` the number of
decisions (sequences) in it.

There is no padding and no mask. Prompts, words of other roles and tool output are context: the forward pass reads
them, the loss does not see them. A decision is never split over micro-batches, so one `Batch` is enough to compute
anything *per decision*. It is not enough for anything per unit, per mini-batch or per step. Such numbers come as
`denominators`, which `Algorithm.denominators` computes once from the thin rows of the **whole** mini-batch. The loss
therefore does not depend on how its mini-batch is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...controller.statistics.table import Signal
    from ..sample_store import Sample


@dataclass(frozen=True, slots=True)
class Thin:
    """One decision of a mini-batch, as `Algorithm.denominators` sees it."""

    id: str
    n_tokens: int
    unit: str = ""
    """Name of the decision's unit (an episode, a chain …), which is never split over mini-batches. Empty: the
    decision alone.
    """
    weight: float = 1.0


@dataclass(slots=True)
class Batch:
    """The trained tokens of one micro-batch. Tensors have shape (T,), in the order of `sequence`; `after` and
    `after_returns` have shape (S,).
    """

    logp: Tensor
    """Log-probability of the sampled token under the parameters in training. Carries the gradient."""
    behaviour: Tensor
    """Log-probability of the sampled token as the engine reported it, at the sample's temperature and
    support.
    """
    proximal: Tensor
    """Log-probability of the sampled token under the parameters at the start of this update. The clip is
    measured from it.
    """
    advantage: Tensor
    """Advantage of the token, already shifted and scaled by its signal."""
    weight: Tensor
    """Weight of the decision's signal, repeated for each of its tokens."""
    sequence: Tensor
    """Index of the token's decision: int64, 0 … n_sequences-1, ascending."""
    n_sequences: int
    unit_tokens: Tensor
    """Number of tokens that the token's unit has in the whole mini-batch, not only in this micro-batch."""
    entropy: Tensor | None = None
    """Entropy of the distribution that the token was drawn from, over its support. Carries the gradient."""
    reference: Tensor | None = None
    """Log-probability of the sampled token under the frozen reference."""
    values: Tensor | None = None
    """The critic's value before the token. Carries the gradient."""
    old_values: Tensor | None = None
    """The critic's value before the token, as it was at the start of the update."""
    returns: Tensor | None = None
    """Return of the token: the target of the critic's value before it."""
    after: Tensor | None = None
    """The critic's value after each decision's last token: (S,). Carries the gradient."""
    after_returns: Tensor | None = None
    """Target of the critic's value after each decision: (S,), NaN where there is none."""
    ids: tuple[str, ...] = ()
    """Decision ids, indexed by `sequence`."""

    @property
    def lengths(self) -> Tensor:
        """Number of trained tokens of each decision: (S,)."""
        return torch.bincount(self.sequence, minlength=self.n_sequences)

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """Mean over the tokens of each decision, repeated for each token: (T,)."""
        sums = per_token.new_zeros(self.n_sequences).index_add(0, self.sequence, per_token)
        return (sums / self.lengths.clamp(min=1))[self.sequence]


def count(rows: Iterable[Thin]) -> dict[str, float]:
    """Compute the global denominators that `losses.aggregate` can need, over one whole mini-batch.

    Weights do not enter: a decision of weight 0 still counts. So a smaller weight for one decision does not give the
    others a larger one.
    """
    rows = list(rows)
    return {
        "tokens": float(sum(row.n_tokens for row in rows)),
        "sequences": float(len(rows)),
        "units": float(len({row.unit or row.id for row in rows})),
    }


def tokens_per_unit(rows: Iterable[Thin]) -> dict[str, int]:
    """Count the trained tokens of each unit in the mini-batch; `Batch.unit_tokens` repeats the count for each
    token.
    """
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.unit or row.id] += row.n_tokens
    return dict(totals)


def weights_of(samples: Sequence[Sample], thin: Sequence[Thin], sequence: Tensor) -> Tensor:
    """Weights of the signals per token (T,); 0 on thinking that is not trained."""
    weights, begin = torch.tensor([row.weight for row in thin])[sequence], 0
    for sample, row in zip(samples, thin, strict=True):
        weights[begin : begin + sample.n_tokens - row.n_tokens] = 0.0
        begin += sample.n_tokens
    return weights


def thin_of(sample: Sample, signal: Signal, context: int = 0) -> Thin:
    """Return the thin row of a decision whose first `context` tokens are not trained."""
    return Thin(sample.id, sample.n_tokens - context, signal.unit, signal.weight)
