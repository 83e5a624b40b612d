"""Keys and values of what an engine has read: a slot for each running request, and blocks of shared prefixes.

A request owns one slot, contiguous in memory, for as long as it runs. Running requests always occupy the first
slots, so that a step reads one dense slice. Beside the slots stands a pool of *blocks* (16 tokens each): the keys
and values of prompts seen before. A block is known by its tokens and by the block before it, so equal means equal
and there is nothing to collide. A new request copies the blocks it shares into its slot and computes only the rest.

Keys are kept transposed, for that is how the decoding product reads them (on a CPU more than twice as fast).

Shapes: L layers, S slots, C context, K key heads, D head width, T tokens, H heads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import Buckets, Span, plain_attend
from .shape import Shape


class Cache:
    """The slots: keys [L, S, K, D, C] and values [L, S, K, C, D]."""

    def __init__(
        self, shape: Shape, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.layers, slots, shape.kv_heads)
        self.keys = torch.zeros(*size, shape.head_width, context, dtype=dtype, device=device)
        self.values = torch.zeros(*size, context, shape.head_width, dtype=dtype, device=device)

    def write(self, layer: int, slot: Tensor, position: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [T, K, D] at (slot [T], position [T])."""
        self.keys[layer][slot, :, :, position] = k
        self.values[layer][slot, :, position] = v

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


class Prefixes:
    """The pool of blocks, least recently used first out."""

    def __init__(self, cache: Cache, blocks: int, size: int) -> None:
        layers, _, heads, width, _ = cache.keys.shape
        self.size = size
        self.blocks = blocks
        self.cache = cache
        self.keys = cache.keys.new_empty(blocks, layers, heads, width, size)
        self.values = cache.values.new_empty(blocks, layers, heads, size, width)
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

    def load(self, places: Sequence[int], slot: int) -> None:
        """Copy blocks to the beginning of a slot."""
        if places:
            index, n = torch.tensor(places), len(places) * self.size
            self.cache.keys[:, slot, ..., :n] = self.keys[index].permute(1, 2, 3, 0, 4).flatten(3)
            self.cache.values[:, slot, :, :n] = self.values[index].permute(1, 2, 0, 3, 4).flatten(2, 3)

    def store(self, ids: Sequence[int], salt: object, slot: int) -> None:
        """Keep the whole blocks of a prompt whose keys and values stand in `slot`."""
        parent = salt
        places, starts = [], []
        for start in range(0, len(ids) - self.size + 1, self.size):
            key = (parent, tuple(ids[start : start + self.size]))
            if key not in self.known:
                place = self._place(keep=len(ids) // self.size)
                if place is None:
                    break
                self.serial += 1
                self.known[key] = (self.serial, place)
                places.append(place)
                starts.append(start)
            self.known.move_to_end(key)
            parent = self.known[key][0]
        if places:
            first, last = starts[0], starts[-1] + self.size  # new blocks always follow the known ones
            index, cut = torch.tensor(places), (len(places), self.size)
            keys = self.cache.keys[:, slot, ..., first:last]  # [L, K, D, n * size]
            self.keys[index] = keys.reshape(*keys.shape[:3], *cut).permute(3, 0, 1, 2, 4)
            values = self.cache.values[:, slot, :, first:last]  # [L, K, n * size, D]
            self.values[index] = values.reshape(*values.shape[:2], *cut, -1).permute(2, 0, 1, 3, 4)

    def _place(self, keep: int) -> int | None:
        """A free place; the oldest block gives way, but never one of the `keep` most recent (this prompt's own)."""
        if self.free:
            return self.free.pop()
        if len(self.known) <= keep:
            return None
        return self.known.popitem(last=False)[1][1]


class Reading:
    """Attention while prompts are read: new tokens of several slots see their slot so far."""

    def __init__(self, cache: Cache, parts: Sequence[tuple[int, int, int]], alone: bool) -> None:
        """`parts`: (slot, position of the first new token, how many), in the order of the row."""
        self.cache = cache
        device = cache.keys.device
        spans, self.n = [], 0
        for _, start, n in parts:
            spans.append(Span(self.n, n, start))
            self.n += n
        self.buckets = Buckets(spans, cache.keys.dtype, device, alone)
        self.seats = [torch.tensor([parts[i][0] for i in g], device=device) for g in self.buckets.groups]
        self.slot = torch.repeat_interleave(
            torch.tensor([p[0] for p in parts]), torch.tensor([p[2] for p in parts])
        )
        self.position = torch.cat([torch.arange(start, start + n) for _, start, n in parts])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slot, self.position, k[: self.n], v[: self.n])
        keys, values = self.cache.keys[layer], self.cache.values[layer]

        widths = [mask.shape[2] for mask in self.buckets.masks]
        seen = (
            (keys[seats, ..., :width].transpose(-1, -2), values[seats, :, :width])
            for seats, width in zip(self.seats, widths, strict=True)
        )
        out = self.buckets.attend(q, seen)
        if len(q) == self.n:
            return out
        return torch.cat((out, out.new_zeros(len(q) - self.n, *out.shape[1:])))  # rows that only fill a shape


class Speaking:
    """Attention while replies are spoken: one new token for each of the first n slots."""

    def __init__(self, cache: Cache, position: Tensor, width: int) -> None:
        self.cache, self.position, self.width = cache, position, width
        self.slot = torch.arange(len(position), device=position.device)
        hidden = torch.arange(width, device=position.device) > position[:, None]
        mask = torch.zeros(hidden.shape, dtype=cache.keys.dtype, device=position.device)
        self.mask = mask.masked_fill_(hidden, float("-inf"))[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slot, self.position, k, v)
        keys = self.cache.keys[layer, : len(q), ..., : self.width].transpose(-1, -2)
        values = self.cache.values[layer, : len(q), :, : self.width]
        return plain_attend(q[:, :, None], keys, values, self.mask).squeeze(2)
