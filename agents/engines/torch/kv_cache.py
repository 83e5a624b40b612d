"""The key-value cache: one slot for each running request, and a pool of blocks for shared prefixes.

A request owns one slot, contiguous in memory, for as long as it runs. Running requests always occupy the first
slots, so a decode step reads one dense slice. The cache has as many slots, and slots as long, as requests have needed
so far: memory that is not used is not reserved. Beside the slots there is a pool of *blocks* of a few tokens each,
with the keys and values of earlier prompts. The key of a block is its tokens and the block before it. So blocks are
shared only where all tokens are equal, and there are no hash collisions. A new request copies the blocks of its prefix
into its slot. The rest of the prompt goes through prefill. A part that several new requests have in common is computed
once and written into the slot of each.

Shapes: L layers, S slots, C context, K key heads, D head width, T tokens, H heads. The leading 2 is keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.attention import PLAIN, Buckets, Span, Weighing, attend, narrowed
from ...model.decoder import Attention
from ...model.shape import Dimensions
from .memory import available
from .prefill import Piece


class Cache:
    """Slots of the cache: [2, L, S, K, C, D]. They grow with the requests, up to a share of the free memory."""

    grain = 64  # slots grow by whole multiples of this many tokens
    share = 0.5  # of the free memory: while slots grow, the old and the new ones exist together

    def __init__(self, shape: Dimensions, dtype: torch.dtype, device: torch.device) -> None:
        self.both = torch.zeros(
            2, shape.layers, 0, shape.kv_heads, 0, shape.head_width, dtype=dtype, device=device
        )
        self.token = (
            2 * shape.layers * shape.kv_heads * shape.head_width * self.both.element_size()
        )  # bytes of one token
        self.last = (0, 0)  # size before `free`

    @property
    def size(self) -> tuple[int, int]:
        """Number of slots, and tokens in each, that are allocated."""
        return self.both.shape[2], self.both.shape[4]

    def limit(self) -> int:
        """Number of tokens that all slots together may hold."""
        return int((available(self.both.device) + self.both.nbytes) * self.share) // self.token

    def hold(self, slots: int, length: int, promised: int, most: int) -> None:
        """Allocate at least `slots` slots with room for `length` tokens each. No request needs more than `promised`.

        There are never more than `most` slots. If the memory allows it, the size doubles, so that the cache grows
        rarely.
        """
        had, width = self.size
        if slots <= had and length <= width:
            return
        if not had and slots <= self.last[0] and length <= self.last[1]:
            had, width = self.last  # as large as it was, at once
        elif length > width:
            width = self.round(min(promised, max(length, 2 * width)))
        had = had if slots <= had else min(most, max(slots, 2 * had))
        if had * width > self.limit():
            had, width = slots, self.round(promised)
        self.lay_out(had, width)

    def free(self) -> None:
        """Free the slots. The next request gets them back, as many and as long as they were."""
        self.last = max(self.size, self.last)
        self.lay_out(0, 0)

    def lay_out(self, slots: int, width: int) -> None:
        """Allocate this many slots of this width, and copy the old contents."""
        old, (two, layers, _, heads, _, depth) = self.both, self.both.shape
        self.both = old.new_zeros(two, layers, slots, heads, width, depth)
        slots, width = min(slots, old.shape[2]), min(width, old.shape[4])
        self.both[:, :, :slots, :, :width] = old[:, :, :slots, :, :width]

    def round(self, tokens: int) -> int:
        """Round up to a multiple of `grain`."""
        return -(-tokens // self.grain) * self.grain

    def rows(self, slot: Tensor, position: Tensor) -> Tensor:
        """Rows of the flat cache for the heads of tokens at (slot [T], position [T]): [T * K]."""
        heads, context = self.both.shape[3:5]
        # one layer is [S, K, C, D], so as [S * K * C, D] its row is (slot * K + head) * C + position
        head = slot[:, None] * heads + torch.arange(heads, device=slot.device)
        return (head * context + position[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, K, D] into these rows."""
        for cached, new in zip(self.both[:, layer], (k, v), strict=True):
            cached.view(-1, new.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))

    def move(self, source: int, target: int, length: int) -> None:
        self.both[:, :, target, :, :length] = self.both[:, :, source, :, :length]


class Prefixes:
    """Pool of blocks. The least recently used block is removed first. It grows to `most` blocks if the memory allows
    it.
    """

    share = 0.25  # of the free memory

    def __init__(self, cache: Cache, most: int, size: int) -> None:
        self.cache, self.most, self.size = cache, most, size
        two, layers, _, heads, _, width = cache.both.shape
        self.pool = cache.both.new_empty(0, two, layers, heads, size, width)
        self.clear()

    @property
    def slots(self) -> Tensor:
        """View of the slots as blocks: [2, L, S, K, blocks of a slot, size, D]."""
        return self.cache.both.unflatten(4, (-1, self.size))  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Remove all blocks, because the weights have changed."""
        self.known: OrderedDict[tuple[object, tuple[int, ...]], tuple[int, int]] = (
            OrderedDict()
        )  # -> serial, place
        self.free = list(range(len(self.pool)))
        self.end = self.most  # largest number of blocks; lowered when memory is short
        self.serial = 0

    def find(self, ids: Sequence[int], salt: object) -> list[int]:
        """Find the places of the cached blocks that `ids` begins with. The last token is never cached: its
        state is needed.
        """
        places: list[int] = []
        parent = salt  # the first block's parent: blocks of different adapters are never equal
        for start in range(0, len(ids) - self.size, self.size):
            key = (parent, tuple(ids[start : start + self.size]))
            if key not in self.known:
                break
            self.known.move_to_end(key)
            parent, place = self.known[key]
            places.append(place)
        return places

    def load(self, prefixes: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Copy blocks to the beginning of slots. Each item is (slot, places)."""
        copies = [(slot, i, place) for slot, places in prefixes for i, place in enumerate(places)]
        if copies:
            slot, block, place = torch.tensor(copies).T
            self.slots[:, :, slot, :, block] = self.pool[place]

    def store(self, prompts: Iterable[tuple[int, Sequence[int], object]]) -> None:
        """Store the whole blocks of prompts whose keys and values are in slots. Each item is (slot, ids, salt)."""
        taken = {  # if two blocks have one place, the later one owns it: the first was already removed
            place: (slot, i, place) for slot, ids, salt in prompts for i, place in self._register(ids, salt)
        }
        if taken:
            slot, block, place = torch.tensor(list(taken.values())).T
            self.pool[place] = self.slots[:, :, slot, :, block]

    def _register(self, ids: Sequence[int], salt: object) -> Iterator[tuple[int, int]]:
        """Register the whole blocks of a prompt. Yield the new ones: (number in the prompt, place)."""
        parent = salt
        for start in range(0, len(ids) - self.size + 1, self.size):
            key = (parent, tuple(ids[start : start + self.size]))
            if key not in self.known:
                place = self._place(keep=len(ids) // self.size)
                if place is None:
                    return
                self.serial += 1
                self.known[key] = (self.serial, place)
                yield start // self.size, place
            self.known.move_to_end(key)
            parent = self.known[key][0]

    def _place(self, keep: int) -> int | None:
        """Return a free place, or that of the oldest block, but never one of the `keep` most recent (the prompt's
        own).
        """
        if self.free or self._grow():
            return self.free.pop()
        if len(self.known) <= keep:
            return None
        return self.known.popitem(last=False)[1][1]

    def _grow(self) -> bool:
        """Double the number of blocks, as far as `most` and the memory allow."""
        had = len(self.pool)
        if had >= self.end:
            return False
        room = int((available(self.pool.device) + self.pool.nbytes) * self.share) // (
            self.size * self.cache.token
        )
        self.end = max(had, min(self.most, room))
        blocks = min(self.end, max(256, 2 * had))
        grown = self.pool.new_empty(blocks, *self.pool.shape[1:])
        grown[:had] = self.pool
        self.pool = grown
        self.free += range(had, blocks)
        return bool(self.free)


class Reading:
    """Attention of prefill: the tokens of a piece are computed once, and attend to all earlier tokens of their slot."""

    def __init__(self, cache: Cache, pieces: Sequence[Piece], alone: bool) -> None:
        """Prepare `pieces`, in the order of the row. The tokens before each are in its slots, or in an
        earlier piece.
        """
        self.cache = cache
        device = cache.both.device
        spans: list[Span] = []
        slot: list[int] = []
        position: list[int] = []
        source: list[int] = []  # index in the row of each token that is written
        self.n = 0
        for piece in pieces:
            spans.append(Span(self.n, piece.n, piece.start))
            for s in piece.slots:
                slot += [s] * piece.n
                position += range(piece.start, piece.start + piece.n)
                source += range(self.n, self.n + piece.n)
            self.n += piece.n
        self.rows = cache.rows(torch.tensor(slot, device=device), torch.tensor(position, device=device))
        self.source = torch.tensor(source, device=device)
        self.buckets = Buckets(spans, cache.both.dtype, device, alone)
        self.seats = [
            torch.tensor([pieces[i].slots[0] for i in group], device=device) for group in self.buckets.groups
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        self.cache.write(layer, self.rows, k[self.source], v[self.source])
        # keys are written first, so that tokens of the same pass can attend to each other through the cache
        both = self.cache.both[:, layer].unbind()  # keys and values: [S, K, C, D] each
        seen = (
            [cached[:, :, :width].index_select(0, seats) for cached in both]
            for seats, width in zip(self.seats, self.buckets.widths, strict=True)
        )
        out = self.buckets.attend(q, seen, how)
        if len(q) == self.n:
            return out
        # rows that only fill up a fixed shape
        return torch.cat((out, out.new_zeros(len(q) - self.n, *out.shape[1:])))


class Speaking:
    """Attention of decode: one new token for each of the first n slots."""

    def __init__(self, cache: Cache, position: Tensor, width: int) -> None:
        self.cache, self.width = cache, width
        self.rows = cache.rows(torch.arange(len(position), device=position.device), position)
        hidden = torch.arange(width, device=position.device) > position[:, None]
        mask = torch.zeros(hidden.shape, dtype=cache.both.dtype, device=position.device)
        self.mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]  # [n, 1, 1, width]
        self.position = position
        self.seen: dict[object, Tensor] = {
            None: self.mask[:, 0]
        }  # masks by the layer's attention window: [n, 1, width]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        self.cache.write(layer, self.rows, k, v)
        keys, values = self.cache.both[:, layer, : len(q), :, : self.width]  # [n, K, width, D] each, no copy
        if how is not PLAIN:
            if how.sees not in self.seen:
                self.seen[how.sees] = narrowed(self.seen[None], self.position[:, None], how.sees)
            return attend(q[:, :, None], keys, values, self.seen[how.sees], how)[:, :, 0]
        grouped = q.unflatten(
            1, (k.shape[1], -1)
        )  # query heads that share a key head become that head's queries: [S, K, H / K, D]
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask).flatten(1, 2)


class Beside:
    """Attention of one pass with decode and prefill: the first n rows are decode, the others prefill."""

    def __init__(self, n: int, speaking: Attention, reading: Attention) -> None:
        self.n, self.speaking, self.reading = n, speaking, reading

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        (q1, q2), (k1, k2), (v1, v2) = (x.tensor_split([self.n]) for x in (q, k, v))
        return torch.cat((self.speaking(layer, q1, k1, v1, how), self.reading(layer, q2, k2, v2, how)))
