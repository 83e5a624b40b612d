"""Who sees whom: packed sequences without padding, and exact prefixes computed once.

`pack` lays many sequences in one row of tokens. Sequences that begin alike (the samples of one prompt, the
turns of one conversation, prompts under one system text) share those tokens: the row is cut into *segments*,
each the child of the segment it continues. A token sees its own segment so far and all its ancestors, so values
and gradients are those of the sequences taken one by one, at a fraction of the work.

Shapes: T packed tokens, B segments of a bucket, Q queries and S keys of its longest, H heads, K key heads, D width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start:stop` of the packed row, which continue the segment `parent` (-1: they begin a sequence)."""

    start: int
    stop: int
    parent: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences as one row of tokens. `rows[i]` are the places of sequence i's tokens in that row."""

    ids: Tensor
    position: Tensor
    segments: tuple[Segment, ...]
    rows: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self.ids.numel()


def pack(sequences: Sequence[Sequence[int]], share: int | None = 16) -> Packed:
    """Pack sequences of token ids; prefixes of at least `share` tokens are laid once (None: nothing is shared)."""
    if not sequences or any(len(s) == 0 for s in sequences):
        raise ValueError("pack needs at least one sequence, and no empty one")
    row = _Row(share)
    whole = [list(s) for s in sequences]
    order = sorted(range(len(whole)), key=whole.__getitem__)
    if share is None:
        for i in range(len(whole)):
            row.grow(whole, [i], 0, 0, -1)
    else:
        row.grow(whole, order, 0, 0, -1)
    return Packed(
        ids=torch.tensor(row.ids, dtype=torch.long),
        position=torch.tensor(row.position, dtype=torch.long),
        segments=tuple(row.segments),
        rows=tuple(row.places(i) for i in range(len(whole))),
    )


class _Row:
    """The row while it is laid."""

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
        """Lay sorted `members`, equal up to `depth` and laid up to `start` (in segment `parent`)."""
        first, last = whole[members[0]], whole[members[-1]]
        end = depth + len(os.path.commonprefix([first[depth:], last[depth:]]))
        if end > start and (len(members) == 1 or first == last or end - start >= (self.share or 0)):
            parent, start = self.lay(first[start:end], start, parent), end
        for token, branch in groupby(members, key=lambda i: whole[i][end] if len(whole[i]) > end else -1):
            if token >= 0:
                self.grow(whole, list(branch), start, end, parent)
                continue
            for i in branch:  # this one ends here, while others go on
                self.last[i] = parent if start == end else self.lay(whole[i][start:], start, parent)

    def places(self, i: int) -> Tensor:
        parts = []
        segment = self.last[i]
        while segment >= 0:
            s = self.segments[segment]
            parts.append(torch.arange(s.start, s.stop))
            segment = s.parent
        return torch.cat(parts[::-1])


class PackedAttention:
    """Causal attention over a packed row: segments of like lengths are gathered into dense batches."""

    waste = 1.3  # a bucket may be this much larger than its segments
    scores = 1 << 23  # and hold this many query-key pairs

    def __init__(self, segments: Sequence[Segment], dtype: torch.dtype) -> None:
        contexts = [_context(segments, i) for i in range(len(segments))]
        lengths = [s.stop - s.start for s in segments]
        order = sorted(range(len(segments)), key=lambda i: (contexts[i].numel(), lengths[i]))
        self.buckets: list[_Bucket] = []
        landed: list[Tensor] = []
        offset = 0
        for group in self._cut(order, segments, contexts):
            bucket = _Bucket([segments[i] for i in group], [contexts[i] for i in group], dtype)
            self.buckets.append(bucket)
            width = bucket.queries.shape[1]
            for b, i in enumerate(group):
                own = torch.arange(lengths[i])
                landed.append(torch.stack((segments[i].start + own, offset + b * width + own)))
            offset += bucket.queries.numel()
        places = torch.cat(landed, 1)
        self.back = places[1][places[0].argsort()]  # packed token -> its row in the buckets' outputs

    def _cut(self, order: list[int], segments: Sequence[Segment], contexts: list[Tensor]) -> list[list[int]]:
        groups: list[list[int]] = []
        real = q_max = k_max = 0
        for i in order:
            q = segments[i].stop - segments[i].start
            k = contexts[i].numel() + q
            new_q, new_k = max(q, q_max), max(k, k_max)
            if groups:
                area = (len(groups[-1]) + 1) * new_q * new_k
                if area <= self.waste * (real + q * k) and area <= self.scores:
                    groups[-1].append(i)
                    real, q_max, k_max = real + q * k, new_q, new_k
                    continue
            groups.append([i])
            real, q_max, k_max = q * k, q, k
        return groups

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        parts = [bucket.attend(q, k, v).flatten(0, 1) for bucket in self.buckets]
        return torch.cat(parts)[self.back] if len(parts) > 1 else parts[0][self.back]


def _context(segments: Sequence[Segment], i: int) -> Tensor:
    """The rows of all ancestors' tokens, in order."""
    parts = []
    while (i := segments[i].parent) >= 0:
        parts.append(torch.arange(segments[i].start, segments[i].stop))
    return torch.cat(parts[::-1]) if parts else torch.empty(0, dtype=torch.long)


class _Bucket:
    """Segments padded on the right to one size. Padding needs no mask of its own: it stands after every real query."""

    def __init__(self, segments: list[Segment], contexts: list[Tensor], dtype: torch.dtype) -> None:
        lengths = [s.stop - s.start for s in segments]
        n_queries = max(lengths)
        n_keys = max(c.numel() + n for c, n in zip(contexts, lengths, strict=True))
        self.queries = torch.zeros(len(segments), n_queries, dtype=torch.long)
        self.keys = torch.zeros(len(segments), n_keys, dtype=torch.long)
        for b, (s, context, n) in enumerate(zip(segments, contexts, lengths, strict=True)):
            own = torch.arange(s.start, s.stop)
            self.queries[b, :n] = own
            self.keys[b, : context.numel() + n] = torch.cat((context, own))
        last_seen = torch.tensor([c.numel() for c in contexts])[:, None] + torch.arange(n_queries)  # [B, Q]
        hidden = torch.arange(n_keys) > last_seen[:, :, None]
        self.mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))  # [B, Q, S]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t[rows].transpose(1, 2) for t, rows in ((q, self.queries), (k, self.keys), (v, self.keys)))
        return attend(q, k, v, self.mask).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention: q [B, H, Q, D], k and v [B, K, S, D], additive mask [B, Q, S].

    Measured (docs/engine.md): torch's fused kernel wins in float32 and on long sequences; in bfloat16, on a CPU and
    up to some hundred tokens, two plain batched products are several times faster, backward above all.
    """
    if q.dtype == torch.float32 or q.device.type != "cpu" or q.shape[2] * k.shape[2] > 1 << 18:
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=shared)
    batch, heads, queries, width = q.shape
    groups = heads // k.shape[1]
    grouped = (q * width**-0.5).reshape(batch, -1, groups * queries, width)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, -1, groups, queries, k.shape[2])
    weights = (scores + mask[:, None, None]).softmax(-1)
    mixed: Tensor = weights.view(batch, -1, groups * queries, k.shape[2]) @ v
    return mixed.view(batch, heads, queries, width)
