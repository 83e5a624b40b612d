"""Context parallelism: several ranks share one packed row, and each computes a part of its tokens.

Only attention needs tokens of other ranks. Each layer gathers the keys and values of the whole row. Its backward pass
sums their gradients over the ranks. So results are exact, and each rank holds 1/N of the activations (N ranks).

The row is cut into 2N pieces. Rank i has the pieces i and 2N - 1 - i. Late tokens attend to many keys and early tokens to
few, so this divides the work evenly. Shared prefixes stay shared: a piece of a segment attends to the segment's earlier
tokens and to its ancestors, as in `PackedAttention`.

Torch's own `context_parallel` cannot do this, because it needs CUDA and sequences of one length without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .attention import PLAIN, Packed, PackedAttention, Segment, Span, Weighing, rows_seen


@dataclass(frozen=True)
class ContextRanks:
    """Ranks that share each row: their group and number, and the index of this rank."""

    group: dist.ProcessGroup | None
    size: int
    index: int

    def share(self, length: int) -> list[Tensor]:
        """Return the tokens of each rank in a packed row of this length, as indices."""
        edges = [i * length // (2 * self.size) for i in range(2 * self.size + 1)]
        pieces = [torch.arange(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
        return [torch.cat((pieces[i], pieces[-1 - i])) for i in range(self.size)]


class SplitRow:
    """Packed row, with the part of this rank. "Rows" are the tokens of the packed row, by index."""

    def __init__(self, packed: Packed, ranks: ContextRanks) -> None:
        if len(packed) < ranks.size:
            raise ValueError(
                f"a row of {len(packed)} tokens cannot be split among {ranks.size} ranks: lower groups.*.context_ranks"
            )
        self.packed, self.ranks = packed, ranks
        self.shares = ranks.share(len(packed))
        self.mine = self.shares[ranks.index]
        """Rows of this rank, in the order of its computation."""
        self.longest = max(len(rows) for rows in self.shares)
        self.place = torch.empty(len(packed), dtype=torch.long)
        """Place of each row in the concatenation of all ranks' padded parts."""
        self.owner = torch.empty(len(packed), dtype=torch.long)
        for index, rows in enumerate(self.shares):
            self.place[rows] = index * self.longest + torch.arange(len(rows))
            self.owner[rows] = index

    def among(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of `rows` belong to this rank, as indices into `rows`, and their places in its part."""
        own = (self.owner[rows] == self.ranks.index).nonzero().squeeze(1)
        return own, self.place[rows[own]] - self.ranks.index * self.longest

    def joined(self, rows: Tensor, own: Tensor) -> Tensor:
        """Return the values of all `rows`, gathered from the values `own` of each rank's rows.

        Every rank then computes the same loss from the same values. So the backward pass gives each rank the whole gradient
        of its own values, without a sum over ranks.
        """
        parts = [(self.owner[rows] == index).nonzero().squeeze(1) for index in range(self.ranks.size)]
        most = max(len(part) for part in parts)
        every = _Join.apply(own, most, self.ranks).to(own.device)
        source = torch.empty(len(rows), dtype=torch.long)
        for index, part in enumerate(parts):
            source[part] = index * most + torch.arange(len(part))
        joined: Tensor = every[source.to(own.device)]
        return joined

    def attention(self, dtype: torch.dtype, device: torch.device) -> SplitAttention:
        """Return the attention from this rank's tokens to the whole row."""
        return SplitAttention(self, dtype, device)


class SplitAttention(PackedAttention):
    """Attention from the queries of one rank to the keys and values of all ranks."""

    def __init__(self, row: SplitRow, dtype: torch.dtype, device: torch.device) -> None:
        self.row = row
        spans, seen = _spans(row.packed.segments, row.mine)
        self._lay(spans, [row.place[keys] for keys in seen], dtype, device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        """Attend from this rank's q [T / N, H, D] to the whole row. k and v [T / N, K, D] are this rank's, too."""
        both = _Gather.apply(torch.cat((k, v), 1), self.row.longest, self.row.ranks)
        keys, values = both.chunk(2, 1)
        return super().__call__(layer, q, keys, values, how)


def _spans(segments: Sequence[Segment], mine: Tensor) -> tuple[list[Span], list[Tensor]]:
    """Cut a rank's rows at the ends of segments. Return the spans, and the rows that each span's last query attends to."""
    spans: list[Span] = []
    seen: list[Tensor] = []
    breaks = (mine.diff() != 1).nonzero().squeeze(1) + 1
    at = 0
    for piece in mine.tensor_split(breaks.tolist()):
        first, last = (int(piece[0]), int(piece[-1]) + 1) if len(piece) else (0, 0)
        for i, segment in enumerate(segments):
            start, stop = max(first, segment.start), min(last, segment.stop)
            if start < stop:
                before = rows_seen(segments, i)
                keys = before[: len(before) - (segment.stop - stop)]
                spans.append(Span(at + start - first, stop - start, len(keys) - (stop - start)))
                seen.append(keys)
        at += len(piece)
    return spans, seen


class _GatherContext(Protocol):
    """Values that a forward pass stores for its backward pass."""

    ranks: ContextRanks
    rows: int
    start: int


class _Gather(torch.autograd.Function):
    """Gather of all ranks' rows, padded. The backward pass sums the gradients of all ranks for each row."""

    @staticmethod
    def forward(ctx: _GatherContext, own: Tensor, longest: int, ranks: ContextRanks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(own)
        return _gathered(own, longest, ranks)

    @staticmethod
    def backward(ctx: _GatherContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.ranks
        whole = gradient.float().contiguous()
        dist.all_reduce(whole, group=ranks.group)
        return whole.chunk(ranks.size)[ranks.index][: ctx.rows].to(gradient.dtype), None, None


class _Join(torch.autograd.Function):
    """Gather of all ranks' rows, padded. The backward pass takes each rank's own gradient, without a sum."""

    @staticmethod
    def forward(ctx: _GatherContext, own: Tensor, longest: int, ranks: ContextRanks) -> Tensor:
        ctx.rows = len(own)
        ctx.start = ranks.index * longest
        return _gathered(own, longest, ranks)

    @staticmethod
    def backward(ctx: _GatherContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.start : ctx.start + ctx.rows], None, None


def _gathered(own: Tensor, longest: int, ranks: ContextRanks) -> Tensor:
    """Return the rows of all ranks, each rank's padded to `longest`."""
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(ranks.size)]
    dist.all_gather(parts, padded, group=ranks.group)
    return torch.cat(parts)
