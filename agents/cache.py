"""Keys and values of what an engine has read: a slot for each running request, and blocks of shared prefixes.

A request owns one slot, contiguous in memory, for as long as it runs. Running requests always occupy the first
slots, so that a step reads one dense slice. Beside the slots stands a pool of *blocks* (a few tokens each): the keys
and values of prompts seen before. A block is known by its tokens and by the block before it, so equal means equal
and there is nothing to collide. New requests copy the blocks they share into their slots; of the rest, what several
of them have in common is computed once and written into the slot of each.

Shapes: L layers, S slots, C context, K key heads, D head width, T tokens, H heads; the leading 2 is keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Buckets, Span
from .llama import Attention
from .prompts import Piece
from .shape import Shape


class Cache:
    """The slots: [2, L, S, K, C, D]."""

    def __init__(
        self, shape: Shape, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (2, shape.layers, slots, shape.kv_heads, context, shape.head_width)
        self.both = torch.zeros(size, dtype=dtype, device=device)

    def rows(self, slot: Tensor, position: Tensor) -> Tensor:
        """Where `write` puts the heads of tokens at (slot [T], position [T]): [T * K]."""
        heads, context = self.both.shape[3:5]
        head = slot[:, None] * heads + torch.arange(heads, device=slot.device)
        return (head * context + position[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [T, K, D] in their rows."""
        for cached, new in zip(self.both[:, layer], (k, v), strict=True):
            cached.view(-1, new.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))

    def move(self, source: int, target: int, length: int) -> None:
        self.both[:, :, target, :, :length] = self.both[:, :, source, :, :length]


class Prefixes:
    """The pool of blocks, least recently used first out."""

    def __init__(self, cache: Cache, blocks: int, size: int) -> None:
        self.size = size
        self.blocks = blocks
        self.slots = cache.both.unflatten(4, (-1, size))  # [2, L, S, K, blocks of a slot, size, D]
        two, layers, _, heads, _, _, width = self.slots.shape
        self.pool = cache.both.new_empty(blocks, two, layers, heads, size, width)
        self.clear()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self.known: OrderedDict[tuple[object, tuple[int, ...]], tuple[int, int]] = (
            OrderedDict()
        )  # -> serial, place
        self.free = list(range(self.blocks))
        self.serial = 0

    def find(self, ids: Sequence[int], salt: object) -> list[int]:
        """Places of the known blocks `ids` begins with; the last token is never among them: it must be computed."""
        places: list[int] = []
        parent = salt
        for start in range(0, len(ids) - self.size, self.size):
            key = (parent, tuple(ids[start : start + self.size]))
            if key not in self.known:
                break
            self.known.move_to_end(key)
            parent, place = self.known[key]
            places.append(place)
        return places

    def load(self, found: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Copy blocks to the beginning of slots: (slot, places) of each."""
        copies = [(slot, i, place) for slot, places in found for i, place in enumerate(places)]
        if copies:
            slot, block, place = torch.tensor(copies).T
            self.slots[:, :, slot, :, block] = self.pool[place]

    def store(self, prompts: Iterable[tuple[int, Sequence[int], object]]) -> None:
        """Keep the whole blocks of prompts whose keys and values stand in slots: (slot, ids, salt) of each."""
        taken = {  # of a place taken twice, the later owner counts: the other was forgotten
            place: (slot, i, place) for slot, ids, salt in prompts for i, place in self._register(ids, salt)
        }
        if taken:
            slot, block, place = torch.tensor(list(taken.values())).T
            self.pool[place] = self.slots[:, :, slot, :, block]

    def _register(self, ids: Sequence[int], salt: object) -> Iterator[tuple[int, int]]:
        """Make the whole blocks of a prompt known; the new ones: (number in the prompt, place)."""
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
        """A free place; the oldest block gives way, but never one of the `keep` most recent (this prompt's own)."""
        if self.free:
            return self.free.pop()
        if len(self.known) <= keep:
            return None
        return self.known.popitem(last=False)[1][1]


class Reading:
    """Attention while prompts are read: the tokens of a piece, computed once, see their slot so far."""

    def __init__(self, cache: Cache, pieces: Sequence[Piece], alone: bool) -> None:
        """`pieces`: in the order of the row; what stands before each is in its slots, or also read now."""
        self.cache = cache
        device = cache.both.device
        spans: list[Span] = []
        slot: list[int] = []
        position: list[int] = []
        source: list[int] = []  # where a token is in the row
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.rows, k[self.source], v[self.source])
        both = self.cache.both[:, layer].unbind()
        widths = [mask.shape[2] for mask in self.buckets.masks]
        seen = (
            [cached[:, :, :width].index_select(0, seats) for cached in both]
            for seats, width in zip(self.seats, widths, strict=True)
        )
        out = self.buckets.attend(q, seen)
        if len(q) == self.n:
            return out
        return torch.cat((out, out.new_zeros(len(q) - self.n, *out.shape[1:])))  # rows that only fill a shape


class Speaking:
    """Attention while replies are spoken: one new token for each of the first n slots."""

    def __init__(self, cache: Cache, position: Tensor, width: int) -> None:
        self.cache, self.width = cache, width
        self.rows = cache.rows(torch.arange(len(position), device=position.device), position)
        hidden = torch.arange(width, device=position.device) > position[:, None]
        mask = torch.zeros(hidden.shape, dtype=cache.both.dtype, device=position.device)
        self.mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.rows, k, v)
        keys, values = self.cache.both[:, layer, : len(q), :, : self.width]
        grouped = q.unflatten(
            1, (k.shape[1], -1)
        )  # the heads that share keys stand as that key head's queries
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask).flatten(1, 2)


class Beside:
    """Both in one pass: the first n rows speak, the others are read."""

    def __init__(self, n: int, speaking: Attention, reading: Attention) -> None:
        self.n, self.speaking, self.reading = n, speaking, reading

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q1, q2), (k1, k2), (v1, v2) = (x.tensor_split([self.n]) for x in (q, k, v))
        return torch.cat((self.speaking(layer, q1, k1, v1), self.reading(layer, q2, k2, v2)))
