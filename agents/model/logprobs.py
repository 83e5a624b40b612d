"""Log-probs and entropies of sampled tokens, without a tensor of [tokens x vocabulary].

Rows are computed in chunks. A chunk has about a fixed number of scores, so memory does not grow with the vocabulary. The
backward pass computes each chunk's scores again, and uses them at once for the gradients of the hidden states and of the
head. Scores are always float32.

The distribution is the one that the engine sampled from: scores divided by the temperature, over the allowed tokens
(`Support`: choices, and top-k or top-p truncation). All other tokens have probability zero.

Shapes: N scored tokens, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 22  # scores of one chunk: 16 MB
# 512 MB: each chunk reads the head once, and on a GPU this read is slower than the product
CHUNK_GPU = 1 << 27


@dataclass(frozen=True, slots=True)
class Support:
    """Tokens that are allowed at each of N places: `ids[offsets[i]:offsets[i + 1]]`. An empty list allows all tokens."""

    offsets: Tensor
    ids: Tensor

    @classmethod
    def of(cls, allowed: Sequence[Sequence[int] | None]) -> Support | None:
        """Build the support from one list for each place (None: all tokens). Return None if no place is restricted."""
        lists = [tuple(a) if a is not None else () for a in allowed]
        if not any(lists):
            return None
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        return cls(offsets, torch.tensor([i for ids in lists for i in ids], dtype=torch.long))

    def to(self, device: torch.device | str) -> Support:
        """Return a copy on a device."""
        return Support(self.offsets.to(device), self.ids.to(device))

    def at(self, places: Tensor) -> Support:
        """Return the support of some of the places."""
        lists = [self.ids[self.offsets[i] : self.offsets[i + 1]] for i in places.tolist()]
        counts = self.offsets.diff()[places]
        return Support(F.pad(counts.cumsum(0), (1, 0)), torch.cat(lists) if lists else self.ids[:0])

    def forbid(self, scores: Tensor, start: int) -> Tensor:
        """Return scores [n, V] of the places from `start` on, with -inf at the tokens that are not allowed."""
        offsets = self.offsets[start : start + len(scores) + 1]
        counts = offsets.diff()
        row = torch.repeat_interleave(torch.arange(len(scores), device=scores.device), counts)
        ids = self.ids[offsets[0] : offsets[-1]]
        result = torch.full_like(scores, float("-inf"))
        result[counts == 0] = scores[counts == 0]
        result[row, ids] = scores[row, ids]
        return result


def logprobs_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [N] and entropies [N] from hidden [N, d], head [V, d] and targets [N].

    Both results are float32 and differentiable. `temperature` is one number, or one for each token. A temperature of 0
    (greedy decoding) counts as 1, as in the engine.
    """
    heat = warmth(temperature, hidden)
    return _Chunked.apply(hidden, head, targets, heat, support)  # type: ignore[no-any-return]


def warmth(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """Return the temperature [N] of each hidden state. A temperature of 0 (greedy decoding) counts as 1."""
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(hidden))
    return torch.where(heat == 0, 1.0, heat)


def _scores(hidden: Tensor, head: Tensor, heat: Tensor, support: Support | None, start: int) -> Tensor:
    """Compute the log-probs [n, V] of one chunk."""
    scores = F.linear(hidden, head).float() / heat[:, None]
    if support is not None:
        scores = support.forbid(scores, start)
    return scores.log_softmax(-1)


def rows_of_chunk(head: Tensor) -> int:
    """Return the number of rows in a chunk."""
    return max(1, (CHUNK_GPU if head.device.type == "cuda" else CHUNK) // len(head))


def plain_logprobs_entropy(
    scores: Tensor, targets: Tensor, support: Support | None = None, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [n] and entropies [n] from the scores [n, V] of the places from `start` on, without chunks."""
    if support is not None:
        scores = support.forbid(scores, start)
    logprobs = scores.log_softmax(-1)
    allowed = logprobs.masked_fill(
        logprobs == float("-inf"), 0.0
    )  # where p is 0, p log p is 0 and has no gradient
    p_log_p = (allowed.exp() * allowed).masked_fill(logprobs == float("-inf"), 0.0)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -p_log_p.sum(-1)


class _ChunkedContext(Protocol):
    """Values that a forward pass stores for its backward pass."""

    support: Support | None
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def set_materialize_grads(self, value: bool) -> None: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ChunkedContext,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        heat: Tensor,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.support = support
        cast = head.to(hidden.dtype)
        step = rows_of_chunk(head)
        logprobs, entropy = torch.empty_like(heat), torch.empty_like(heat)
        for i in range(0, len(hidden), step):
            part = slice(i, i + step)
            scores = _scores(hidden[part], cast, heat[part], support, i)
            logprobs[part] = scores.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -p_log_p(scores).sum(-1)
        ctx.save_for_backward(hidden, head, targets, heat, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: _ChunkedContext, g_logprobs: Tensor | None, g_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, head, targets, heat, entropy = ctx.saved_tensors
        if g_logprobs is None and g_entropy is None:
            return (None,) * 5
        cast = head.to(hidden.dtype)
        step = rows_of_chunk(head)
        d_hidden = torch.empty_like(hidden)
        # with adapters the head is frozen, and needs no gradient; chunks add up in float32, whatever the head is
        d_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for i in range(0, len(hidden), step):
            part = slice(i, i + step)
            scores = _scores(hidden[part], cast, heat[part], ctx.support, i)
            grad = torch.zeros_like(scores)
            if g_logprobs is not None:  # d logp(target) / d score = [target] - p
                grad -= scores.exp() * g_logprobs[part, None]
                grad.scatter_add_(1, targets[part, None], g_logprobs[part, None])
            if g_entropy is not None:  # d H / d score = -p (log p + H)
                grad -= (p_log_p(scores) + scores.exp() * entropy[part, None]) * g_entropy[part, None]
            grad = (grad / heat[part, None]).to(hidden.dtype)
            d_hidden[part] = grad @ cast
            if d_head is not None:
                d_head += grad.T @ hidden[part]
        return d_hidden, None if d_head is None else d_head.to(head.dtype), None, None, None


def p_log_p(logprobs: Tensor) -> Tensor:
    """Compute p log p, with 0 where p is 0."""
    return torch.where(logprobs == float("-inf"), 0.0, logprobs.exp() * logprobs)
