"""Attention over packed sequences: no padding, and shared prefixes are computed once.

`pack` puts many sequences into one row of tokens. Sequences with a common prefix share its tokens: the samples of one
prompt, the turns of one conversation, prompts with the same system text. The row is cut into *segments*. Each segment is
the child of the segment that it continues. A token attends to the earlier tokens of its own segment and to all tokens of
the segment's ancestors. So values and gradients equal those of the sequences computed one by one, with much less work.

Shapes: T packed tokens, B segments of a bucket, Q queries and S keys of its longest, H heads, K key heads, D width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True)
class LastQueries:
    """Causal mask without a tensor of Q x S: the queries stand at the last keys, and each attends up to its own place."""

    queries: int
    keys: int


AttentionMask = Tensor | LastQueries
"""Mask of attention: an additive tensor [B, Q, S], or causality alone."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start:stop` of the packed row, which continue the segment `parent`. A parent of -1: a sequence begins here."""

    start: int
    stop: int
    parent: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences as one row of T tokens: `ids` [T] and `position` [T]. `rows[i]` holds the places of sequence i's tokens."""

    ids: Tensor
    position: Tensor
    segments: tuple[Segment, ...]
    rows: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self.ids.numel()


def pack(sequences: Sequence[Sequence[int]], share: int | None = 16) -> Packed:
    """Pack sequences of token ids. Common prefixes of at least `share` tokens are stored once. None: nothing is shared."""
    row = _laid(sequences, share)
    return Packed(
        ids=torch.tensor(row.ids, dtype=torch.long),
        position=torch.tensor(row.position, dtype=torch.long),
        segments=tuple(row.segments),
        rows=tuple(row.places(i) for i in range(len(sequences))),
    )


def packed_length(sequences: Sequence[Sequence[int]], share: int | None = 16) -> int:
    """Return the number of tokens of the row that `pack` would return."""
    return len(_laid(sequences, share).ids)


def _laid(sequences: Sequence[Sequence[int]], share: int | None) -> _Row:
    if not sequences or any(len(s) == 0 for s in sequences):
        raise ValueError("pack needs at least one sequence, and no empty one")
    row = _Row(share)
    whole = [list(s) for s in sequences]
    if share is None:
        for i in range(len(whole)):
            row.grow(whole, [i], 0, 0, -1)
    else:
        row.grow(whole, sorted(range(len(whole)), key=whole.__getitem__), 0, 0, -1)
    return row


class _Row:
    """Packed row that is being built."""

    def __init__(self, share: int | None) -> None:
        self.share = share
        self.ids: list[int] = []
        self.position: list[int] = []
        self.segments: list[Segment] = []
        self.last: dict[int, int] = {}  # sequence -> the segment in which it ends

    def lay(self, tokens: list[int], at: int, parent: int) -> int:
        start = len(self.ids)
        self.ids += tokens
        self.position += range(at, at + len(tokens))
        self.segments.append(Segment(start, len(self.ids), parent))
        return len(self.segments) - 1

    def grow(self, whole: list[list[int]], members: list[int], start: int, depth: int, parent: int) -> None:
        """Append the sorted sequences `members`.

        They are equal up to `depth`, and the row already holds them up to `start` (in the segment `parent`).
        """
        # members are sorted, so a common prefix of the first and the last is common to all
        first, last = whole[members[0]], whole[members[-1]]
        end = depth + len(os.path.commonprefix([first[depth:], last[depth:]]))
        if end > start and (len(members) == 1 or first == last or end - start >= (self.share or 0)):
            parent, start = self.lay(first[start:end], start, parent), end
        # a prefix that is too short to share is not appended here: `start` stays, and each branch appends it
        for token, branch in groupby(members, key=lambda i: whole[i][end] if len(whole[i]) > end else -1):
            if token >= 0:
                self.grow(whole, list(branch), start, end, parent)
                continue
            for i in branch:  # this sequence ends here, while others continue
                self.last[i] = parent if start == end else self.lay(whole[i][start:], start, parent)

    def places(self, i: int) -> Tensor:
        return rows_seen(self.segments, self.last[i])


@dataclass(frozen=True, slots=True)
class Span:
    """Queries `start : start + n` of a row of tokens. `context` keys of their sequence come before them."""

    start: int
    n: int
    context: int


@dataclass(frozen=True, slots=True)
class Weighing:
    """Parameters of one layer's attention weights. The default is softmax(q k' / sqrt(D)) over all earlier tokens."""

    scale: float | None = None
    """Factor of the scores. None: 1 / sqrt(D)."""
    softcap: float | None = None
    """Bound of the scores, applied with tanh. None: no bound."""
    sinks: Tensor | None = None
    """Score [H] of an additional key without a value, for each head."""
    sees: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function of query and key positions that tells whether the query may attend to the key. None: to every earlier key."""


PLAIN = Weighing()


class Buckets:
    """Dense batches of spans of similar sizes, padded on the right.

    The causal mask also hides padding: padded keys stand after every real query, and padded queries are dropped.

    On a device with fused kernels (`fused`), a bucket of one span needs no mask tensor, because the kernels compute causal
    attention themselves. Only such a bucket may have more than the limit of query-key pairs. So the memory for a long
    context grows with its length, not with the square.
    """

    waste = 1.3  # largest area of a bucket, as a multiple of the area of its spans
    pairs = 1 << 19  # most query-key pairs of a bucket: the scores of more do not fit the processor's caches
    # the same on a GPU, where few launches matter; the mask of one bucket is then 16 MB
    pairs_fused = 1 << 23

    def __init__(
        self, spans: Sequence[Span], dtype: torch.dtype, device: torch.device, alone: bool = False
    ) -> None:
        """Build the buckets. With `alone` each span has its own, so its result does not depend on the other spans."""
        self.spans, self.dtype, self.device = spans, dtype, device
        kernels = fused(device)
        most = self.pairs_fused if kernels else self.pairs
        self.groups = [[i] for i in range(len(spans))] if alone else self._cut(spans, most)
        self.shapes: list[tuple[int, int]] = []  # (B, Q) of each bucket
        self.widths = [
            max(spans[i].context + spans[i].n for i in group) for group in self.groups
        ]  # S of each
        rows: list[Tensor] = []  # [B * Q] of each bucket: rows of the queries
        self.masks: list[AttentionMask] = []
        pairs: list[Tensor] = []  # [2, n] of each span: tokens of the row, and their rows in the buckets
        offset = 0
        for group, width in zip(self.groups, self.widths, strict=True):
            longest = max(spans[i].n for i in group)
            queries = torch.zeros(len(group), longest, dtype=torch.long)
            for b, i in enumerate(group):
                own = torch.arange(spans[i].n)
                queries[b, : spans[i].n] = spans[i].start + own
                pairs.append(torch.stack((spans[i].start + own, offset + b * longest + own)))
            offset += queries.numel()
            self.shapes.append((len(group), longest))
            rows.append(queries.flatten())
            if kernels and len(group) == 1:
                self.masks.append(LastQueries(longest, width))
            else:
                self.masks.append(self._mask(group, longest))
        self.seen: dict[object, list[Tensor]] = {}  # masks of all buckets, by the `sees` function of a layer
        places = torch.cat(pairs, 1)
        self.rows = torch.cat(rows).to(device)
        self.back = places[1][places[0].argsort()].to(device)  # token -> its row in the buckets' outputs

    def _cut(self, spans: Sequence[Span], most: int) -> list[list[int]]:
        # greedy: sorted spans join the last bucket while padding stays below `waste` and the bucket below `most` pairs
        groups: list[list[int]] = []
        real = n_max = k_max = 0
        for i in sorted(range(len(spans)), key=lambda i: (spans[i].context, spans[i].n)):
            n, k = spans[i].n, spans[i].context + spans[i].n
            if groups:
                wider, longer = max(n, n_max), max(k, k_max)
                area = (len(groups[-1]) + 1) * wider * longer
                if area <= self.waste * (real + n * k) and area <= most:
                    groups[-1].append(i)
                    real, n_max, k_max = real + n * k, wider, longer
                    continue
            groups.append([i])
            real, n_max, k_max = n * k, n, k
        return groups

    def _mask(self, group: Sequence[int], longest: int) -> Tensor:
        """Return the additive mask [B, Q, S] that hides later keys."""
        last_seen = self._positions(group, longest)  # last key that each query may see
        width = max(self.spans[i].context + self.spans[i].n for i in group)
        hidden = torch.arange(width) > last_seen[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self.device)

    def _positions(self, group: Sequence[int], longest: int) -> Tensor:
        """Return the positions [B, Q] of a bucket's queries in their sequences."""
        return torch.tensor([self.spans[i].context for i in group])[:, None] + torch.arange(longest)

    def _masks(self, how: Weighing) -> Sequence[AttentionMask]:
        """Return the masks of a layer. Layers with the same `sees` function share them."""
        if how.sees is None and how.softcap is None and how.sinks is None:
            return self.masks
        if how.sees not in self.seen:
            self.seen[how.sees] = [
                narrowed(
                    self._mask(group, longest) if isinstance(mask, LastQueries) else mask,
                    self._positions(group, longest).to(self.device),
                    how.sees,
                )
                for group, (_, longest), mask in zip(self.groups, self.shapes, self.masks, strict=True)
            ]
        return self.seen[how.sees]

    def attend(self, q: Tensor, keys_values: Iterable[Sequence[Tensor]], how: Weighing = PLAIN) -> Tensor:
        """Attend from q [T, H, D] to k and v [B, K, S, D] of each bucket. Return [T, H, D]."""
        gathered = _gather(q, self.rows, self.shapes)
        parts = [
            attend(own.transpose(1, 2), k, v, mask, how).transpose(1, 2).flatten(0, 1)
            for own, (k, v), mask in zip(gathered, keys_values, self._masks(how), strict=True)
        ]
        return torch.cat(parts).index_select(0, self.back)


def narrowed(mask: Tensor, position: Tensor, sees: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
    """Hide in an additive mask [B, Q, S] the keys that `sees` excludes for queries at `position` [B, Q].

    If every key of a query is hidden (it is padding), its first key stays visible, because a softmax over no keys is NaN.
    """
    if sees is None:
        return mask
    keys = torch.arange(mask.shape[-1], device=mask.device)
    mask = mask.masked_fill(~sees(position[:, :, None], keys[None, None]), float("-inf"))
    first = mask[..., 0].masked_fill((mask == float("-inf")).all(-1), 0.0)
    return torch.cat((first[..., None], mask[..., 1:]), -1)


class PackedAttention:
    """Causal attention over a packed row, with keys and values gathered from the same row."""

    def __init__(self, segments: Sequence[Segment], dtype: torch.dtype, device: torch.device) -> None:
        seen = [rows_seen(segments, i) for i in range(len(segments))]
        spans = [
            Span(s.start, s.stop - s.start, len(rows) - (s.stop - s.start))
            for s, rows in zip(segments, seen, strict=True)
        ]
        self._lay(spans, seen, dtype, device)

    def _lay(
        self, spans: Sequence[Span], seen: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Put spans into buckets. `seen[i]` holds the rows that the last query of span i attends to."""
        self.buckets = Buckets(spans, dtype, device)
        keys = [pad_sequence([seen[i] for i in g], batch_first=True) for g in self.buckets.groups]
        self.shapes = [(len(own), own.shape[1]) for own in keys]
        self.keys = torch.cat([own.flatten() for own in keys]).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        """Attend from q [T, H, D] to k and v [T, K, D]. Return [T, H, D]."""
        both = _gather(torch.cat((k, v), 1), self.keys, self.shapes)
        return self.buckets.attend(q, (own.transpose(1, 2).chunk(2, 1) for own in both), how)


def _gather(x: Tensor, rows: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Gather the rows of all buckets from x [T, …], as one dense batch [B, Q, …] for each bucket.

    All buckets share one gather, because the time of its backward pass depends on the size of x and not on the number
    of rows.
    """
    parts = x.index_select(0, rows).split([count * longest for count, longest in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def rows_seen(segments: Sequence[Segment], i: int) -> Tensor:
    """Return the rows of segment i and of all its ancestors, in the order of the sequence."""
    parts = []
    while i >= 0:
        parts.append(torch.arange(segments[i].start, segments[i].stop))
        i = segments[i].parent
    return torch.cat(parts[::-1])


def fused(device: torch.device) -> bool:
    """Tell whether the device has attention kernels that are causal without a mask tensor, such as FlashAttention."""
    return device.type == "cuda"


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, how: Weighing = PLAIN) -> Tensor:
    """Compute grouped-query attention from q [B, H, Q, D], k and v [B, K, S, D], with a mask of [B, Q, S].

    Torch's fused kernel is faster in float32 and for long sequences. In bfloat16 on a CPU, for up to some hundred tokens,
    two batched matrix products are several times faster, above all in the backward pass (docs/engine.md).
    """
    if how.softcap is not None or how.sinks is not None:
        assert not isinstance(mask, LastQueries)
        return plain_attend(q, k, v, mask, how)
    if fused(q.device) or isinstance(mask, LastQueries):
        return _fused_attend(q, k, v, mask, how.scale)
    exact = q.dtype in (torch.float32, torch.float64)
    if exact or q.device.type != "cpu" or q.shape[2] * k.shape[2] > 1 << 18:
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None], enable_gqa=shared, scale=how.scale
        )
    return plain_attend(q, k, v, mask, how)


def _fused_attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
    """Compute `attend` in a kernel that never stores [Q, S] scores.

    FlashAttention supports causality and shared key heads, in 16 bits. The kernel for float32 and for masks does not
    support shared key heads. For this kernel the key heads are repeated, because torch would otherwise use plain products.
    """
    from torch.nn.attention.bias import (
        causal_lower_right,  # here, because it imports torch's compiler: two seconds
    )

    flash = isinstance(mask, LastQueries) and q.dtype != torch.float32
    if not flash and (share := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    own = causal_lower_right(mask.queries, mask.keys) if isinstance(mask, LastQueries) else mask[:, None]
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=own, enable_gqa=shared, scale=scale)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: Weighing = PLAIN) -> Tensor:
    """Compute `attend` with plain matrix products. Query heads with the same key head are rows of one matrix."""
    batch, heads, queries, width = q.shape
    groups = heads // k.shape[1]
    scaled = q * (width**-0.5 if how.scale is None else how.scale)
    grouped = scaled.reshape(batch, -1, groups * queries, width)  # [B, K, H / K * Q, D]
    scores = (grouped @ k.transpose(-1, -2)).view(
        batch, -1, groups, queries, k.shape[2]
    )  # [B, K, H / K, Q, S]
    if how.softcap is not None:
        scores = (scores / how.softcap).tanh() * how.softcap
    scores = scores + mask[:, None, None]
    if how.sinks is not None:
        sink = how.sinks.to(scores.dtype).view(1, -1, groups, 1, 1).expand(batch, -1, -1, queries, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    mixed: Tensor = weights.view(batch, -1, groups * queries, k.shape[2]) @ v
    return mixed.view(batch, heads, queries, width)
