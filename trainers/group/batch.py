"""What a loss sees: the trained tokens of one micro-batch, flat.

Shapes, used in all of `trainers/`:  T trained tokens of the micro-batch, S decisions (sequences) in it.
There is no padding and no mask: prompts, other roles' words and tool output were context in the forward pass and
are gone by the time a loss looks. A decision is never split over micro-batches, so anything *per decision* can be
computed from one `Batch`. Anything per unit, per mini-batch or per step can not: it comes as `denominators`, made
once by `Algorithm.denominators` from the thin rows of the **whole** mini-batch. That is what makes a loss
independent of how its mini-batch was cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Thin:
    """One decision of a mini-batch, as `Algorithm.denominators` sees it."""

    id: str
    n_tokens: int
    unit: str = ""
    """Decisions of one unit (an episode, a chain …) are never split over mini-batches. Empty: its own unit."""
    weight: float = 1.0


@dataclass(slots=True)
class Batch:
    """The trained tokens of one micro-batch. Tensors are 1-D of length T, in the order of `sequence`; `after` alone is of length S."""

    logp: Tensor
    """Log-probability of the sampled token under the parameters being trained. Carries the gradient."""
    behaviour: Tensor
    """… under what sampled it: the engine's own number, at the sample's temperature and support."""
    proximal: Tensor
    """… under the parameters at the start of this update: what the clip is measured from."""
    advantage: Tensor
    """Already shifted and scaled as the signal said."""
    weight: Tensor
    """The signal's weight, repeated over the decision's tokens."""
    sequence: Tensor
    """Which decision a token belongs to: int64, 0 … n_sequences-1, ascending."""
    n_sequences: int
    unit_tokens: Tensor
    """How many tokens the token's unit has in the whole mini-batch (not only here)."""
    entropy: Tensor | None = None
    """Entropy of the distribution the token was drawn from, over its support. Carries the gradient."""
    reference: Tensor | None = None
    """Log-probability under the frozen reference."""
    values: Tensor | None = None
    """The critic's value before the token. Carries the gradient."""
    old_values: Tensor | None = None
    """The same at the start of the update."""
    returns: Tensor | None = None
    """What the critic should have said."""
    after: Tensor | None = None
    """The critic's value once each decision is said: (S,). Carries the gradient."""
    after_returns: Tensor | None = None
    """What the critic should have said there: (S,), NaN where nobody knows."""
    ids: tuple[str, ...] = ()
    """Decision ids, indexed by `sequence`."""

    @property
    def lengths(self) -> Tensor:
        """Tokens per decision: (S,)."""
        return torch.bincount(self.sequence, minlength=self.n_sequences)

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """The mean over a decision's tokens, given back to each of them: (T,)."""
        sums = per_token.new_zeros(self.n_sequences).index_add(0, self.sequence, per_token)
        return (sums / self.lengths.clamp(min=1))[self.sequence]


def count(rows: Iterable[Thin]) -> dict[str, float]:
    """The global denominators every aggregation of `losses.aggregate` can need, over one whole mini-batch.

    Weights do not enter: a decision of weight 0 still counts, so down-weighting it does not up-weight the others.
    """
    rows = list(rows)
    return {
        "tokens": float(sum(row.n_tokens for row in rows)),
        "sequences": float(len(rows)),
        "units": float(len({row.unit or row.id for row in rows})),
    }


def tokens_per_unit(rows: Iterable[Thin]) -> dict[str, int]:
    """Unit name -> trained tokens it has in the mini-batch: what `Batch.unit_tokens` repeats per token."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.unit or row.id] += row.n_tokens
    return dict(totals)
