"""Vocabulary parallelism: each rank holds some rows of the embedding and of the head, and ranks exchange tokens.

With a large vocabulary, these two are the largest matrices of a model. A rank that gathered them, with their gradients,
would need more memory than for its share of the model. So no rank gathers them:

    lookup       each rank gets the ids of all ranks, looks up those that belong to its rows, and returns the embeddings
    log-probs    each rank gets the hidden states of all ranks, some at a time, and computes the scores of its words;
                 ranks exchange maxima and sums; the backward pass works in the same way

Results equal those of one process up to the order of sums. Every rank takes part in every pass, even without tokens.

Shapes: N ranks, T tokens of this rank, t tokens of each rank in one step, d width, R words of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .logprobs import Support, p_log_p, warmth

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

AT_ONCE, AT_ONCE_GPU = 1 << 22, 1 << 27
"""Largest number of values in one step: hidden states of all ranks' tokens, or their scores."""


@dataclass(frozen=True)
class VocabularyRanks:
    """Ranks that share a vocabulary: their number, and the index of this rank."""

    size: int
    index: int
    words: int
    """Number of words of each rank. The last rank may have fewer."""

    @property
    def first(self) -> int:
        """Id of this rank's first word."""
        return self.index * self.words

    def places(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return which ids are among this rank's `count` words, as indices, and the rows of these words."""
        rows = ids - self.first
        mine = ((rows >= 0) & (rows < count)).nonzero().squeeze(1)
        return mine, rows[mine]

    def gather(self, own: T) -> list[T]:
        """Return the data of all ranks, which are exchanged through the CPU."""
        everyone: list[T | None] = [None] * self.size
        dist.all_gather_object(everyone, own)
        return cast(list[T], everyone)

    def joined(self, own: Tensor, most: int) -> Tensor:
        """Return the tensors [up to t, …] of all ranks, each padded with 0, as [N * t, …]. `most` is t."""
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        every = own.new_empty(self.size * most, *own.shape[1:])
        dist.all_gather(list(every.chunk(self.size)), padded)
        return every

    def summed(self, whole: Tensor) -> Tensor:
        """Sum [N * t, d] over all ranks, and return the part of this rank: [t, d]."""
        own = whole.new_empty(len(whole) // self.size, *whole.shape[1:])
        dist.reduce_scatter(own, list(whole.chunk(self.size)))
        return own

    def steps(self, longest: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """Yield the start and the size t of each step. The limit counts `width` values for each token of each rank."""
        most = AT_ONCE_GPU if device.type == "cuda" else AT_ONCE
        step = max(1, min(longest, most // max(1, width * self.size)))
        for start in range(0, longest, step):
            yield start, min(step, longest - start)


def own_rows(matrix: Tensor) -> Tensor:
    """Return this rank's rows of a matrix. Gradients flow back to the matrix."""
    rows: Tensor = cast("DTensor", matrix).to_local()
    return rows


def split_embedding(ids: Tensor, matrix: Tensor, dtype: torch.dtype, ranks: VocabularyRanks) -> Tensor:
    """Return the embeddings [T, d] of ids [T], in `dtype`."""
    return _Lookup.apply(own_rows(matrix), ids, dtype, ranks)  # type: ignore[no-any-return]


def split_logprobs(
    hidden: Tensor,
    matrix: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    support: Support | None,
    ranks: VocabularyRanks,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [T] and entropies [T] from hidden [T, d] and targets [T], as `logprobs_entropy` does."""
    asked = _Asked(
        targets.cpu(), warmth(temperature, hidden).cpu(), None if support is None else support.to("cpu")
    )
    return _Scores.apply(hidden, own_rows(matrix), ranks.gather(asked), ranks)  # type: ignore[no-any-return]


class _VocabularyContext(Protocol):
    """Values that a forward pass stores for its backward pass."""

    ranks: VocabularyRanks
    everyone: list[Tensor]
    asked: list[_Asked]
    words: int
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _VocabularyContext, own: Tensor, ids: Tensor, dtype: torch.dtype, ranks: VocabularyRanks
    ) -> Tensor:
        ctx.ranks, ctx.everyone = ranks, [theirs.to(own.device) for theirs in ranks.gather(ids.cpu())]
        ctx.words, ctx.dtype = len(own), own.dtype
        embedded = own.new_empty(len(ids), own.shape[1], dtype=dtype)
        for start, most in ranks.steps(_longest(ctx.everyone), own.shape[1], own.device):
            answers = own.new_zeros(ranks.size, most, own.shape[1], dtype=torch.float32)
            for answer, theirs in zip(answers, ctx.everyone, strict=True):
                mine, rows = ranks.places(theirs[start : start + most], len(own))
                answer[mine] = own[rows].to(dtype).float()
            part = embedded[start : start + most]
            part.copy_(ranks.summed(answers.flatten(0, 1))[: len(part)])
        return embedded

    @staticmethod
    def backward(ctx: _VocabularyContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        change = gradient.new_zeros(ctx.words, gradient.shape[1], dtype=torch.float32)
        for start, most in ranks.steps(_longest(ctx.everyone), gradient.shape[1], gradient.device):
            every = ranks.joined(gradient[start : start + most], most).chunk(ranks.size)
            for change_of, theirs in zip(every, ctx.everyone, strict=True):
                mine, rows = ranks.places(theirs[start : start + most], ctx.words)
                change.index_add_(0, rows, change_of[mine].float())
        return change.to(ctx.dtype), None, None, None


@dataclass(frozen=True)
class _Asked:
    """Inputs of one rank: targets [T], temperatures [T], and the allowed words."""

    targets: Tensor
    heat: Tensor
    support: Support | None


class _Part:
    """Inputs of one step, with t tokens of every rank. From these, scores [N * t, R] of this rank's words are computed."""

    def __init__(
        self, asked: list[_Asked], start: int, most: int, ranks: VocabularyRanks, own: Tensor
    ) -> None:
        self.own = own
        size, device = ranks.size * most, own.device
        targets, self.heat = torch.full((size,), -1), torch.ones(size)
        self.limited = torch.zeros(size, dtype=torch.bool)
        allowed: list[tuple[Tensor, Tensor]] = []
        for i, theirs in enumerate(asked):
            part, at = slice(start, start + most), i * most
            own_targets = theirs.targets[part]
            targets[at : at + len(own_targets)] = own_targets
            self.heat[at : at + len(own_targets)] = theirs.heat[part]
            if theirs.support is not None and len(own_targets):
                offsets = theirs.support.offsets[start : start + len(own_targets) + 1]
                self.limited[at : at + len(own_targets)] = offsets.diff() > 0
                rows = torch.repeat_interleave(torch.arange(len(own_targets)), offsets.diff()) + at
                mine, words = ranks.places(theirs.support.ids[offsets[0] : offsets[-1]], len(own))
                allowed.append((rows[mine], words))
        self.allowed = tuple(torch.cat(parts).to(device) for parts in zip(*allowed, strict=True))
        self.rows, self.words = (t.to(device) for t in ranks.places(targets, len(own)))
        self.heat, self.limited = self.heat.to(device), self.limited.to(device)

    def scores(self, hidden: Tensor, cast_head: Tensor) -> Tensor:
        """Compute scores [N * t, R] from hidden states [N * t, d]. Words that are not allowed get -inf."""
        scores = F.linear(hidden, cast_head).float() / self.heat[:, None]
        if not self.allowed:
            return scores
        result = scores.masked_fill(self.limited[:, None], float("-inf"))
        result[self.allowed] = scores[self.allowed]
        return result


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _VocabularyContext, hidden: Tensor, own: Tensor, asked: list[_Asked], ranks: VocabularyRanks
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.asked = ranks, asked
        head = own.to(hidden.dtype)
        results = torch.empty(2, len(hidden), device=hidden.device)
        sums, entropies = [], []
        for start, most in ranks.steps(_longest([a.targets for a in asked]), ranks.words, own.device):
            part = _Part(asked, start, most, ranks, own)
            scores = part.scores(ranks.joined(hidden[start : start + most], most), head)
            highest = scores.amax(1)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            scores -= highest[:, None]
            total = scores.exp().sum(1)
            dist.all_reduce(total)
            sums.append(highest + total.log())
            logprobs = scores - total.log()[:, None]
            both = torch.zeros(2, len(scores), device=own.device)
            both[0, part.rows] = logprobs[part.rows, part.words]
            both[1] = -p_log_p(logprobs).sum(1)
            dist.all_reduce(both)
            entropies.append(both[1])
            mine = results[:, start : start + most]
            mine.copy_(both.unflatten(1, (ranks.size, most))[:, ranks.index, : mine.shape[1]])
        ctx.save_for_backward(hidden, own, torch.cat(sums), torch.cat(entropies))
        return results[0], results[1]

    @staticmethod
    def backward(ctx: _VocabularyContext, g_logprobs: Tensor, g_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, own, sums, entropies = ctx.saved_tensors
        ranks, head, at = ctx.ranks, own.to(hidden.dtype), 0
        d_hidden = torch.empty_like(hidden)
        # with adapters the head is frozen, and needs no gradient
        d_own = torch.zeros_like(own, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        gradients = torch.stack((g_logprobs, g_entropy), 1).float()
        for start, most in ranks.steps(_longest([a.targets for a in ctx.asked]), ranks.words, own.device):
            part = _Part(ctx.asked, start, most, ranks, own)
            states = ranks.joined(hidden[start : start + most], most)
            g_logp, g_spread = ranks.joined(gradients[start : start + most], most).unbind(1)
            here = slice(at, at + len(states))
            at += len(states)
            logprobs = part.scores(states, head) - sums[here, None]
            share = logprobs.exp()
            grad = -share * g_logp[:, None]  # d logp(target) / d score = [target] - p
            grad[part.rows, part.words] += g_logp[part.rows]
            # d H / d score = -p (log p + H)
            grad -= (p_log_p(logprobs) + share * entropies[here, None]) * g_spread[:, None]
            grad = (grad / part.heat[:, None]).to(hidden.dtype)
            mine = d_hidden[start : start + most]
            mine.copy_(ranks.summed((grad @ head).float())[: len(mine)])
            if d_own is not None:
                d_own += grad.T @ states
        return d_hidden, None if d_own is None else d_own.to(own.dtype), None, None


def _longest(parts: list[Tensor]) -> int:
    return max(len(part) for part in parts)
