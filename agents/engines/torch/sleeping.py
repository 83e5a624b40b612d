"""Sleep of the torch engine: it frees keys and values, and moves its weights off the GPU, while policies learn
there.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch

from ...model.decoder import Decoder
from .cuda_graphs import DecodeGraphs
from .kv_cache import Cache, Prefixes


class Napping(ABC):
    """Sleep and wake of an engine with `model`, and with `cache` and `prefixes` unless transformers has its own."""

    sleeps = False
    """Flag: the engine's group lets it sleep while policies learn."""
    _asleep = False
    deterministic: bool
    model: Decoder
    prefixes: Prefixes
    device: torch.device
    _turn: threading.RLock
    graphs: DecodeGraphs | None

    def sleep(self) -> None:
        """Free keys and values, and move the weights to the CPU's memory. No request may be open."""
        if self._asleep:
            return
        if self.busy:
            raise RuntimeError("an engine cannot sleep while requests run or wait")
        self._asleep = True
        self._free()
        self._move("cpu")

    def free_cache(self) -> None:
        """Free keys and values if no request needs them and their shape is not fixed. They grow again with use."""
        with self._turn:
            if not (self.busy or self._asleep or self.deterministic):
                self._free()

    def _free(self) -> None:
        cache: Cache | None = getattr(self, "cache", None)
        if cache is not None:
            cache.free()
            self.prefixes = Prefixes(cache, self.prefixes.most, self.prefixes.size)

    def wake(self) -> None:
        """Take the memory back."""
        if self._asleep:
            self._asleep = False
            self._move(self.device)
            self._lay_out()

    def _move(self, device: torch.device | str) -> None:
        if self.device.type != "cpu":
            self.model = self.model.to(device)
            self.graphs = DecodeGraphs.of(self.model)  # recorded steps hold the old addresses of the weights

    def memory(self) -> dict[str, int]:
        """Return the bytes that the engine holds on its device."""
        cache: Cache | None = getattr(self, "cache", None)
        keys = 0 if cache is None else cache.both.nbytes + self.prefixes.pool.nbytes
        weights = [p.nbytes for p in self.model.parameters() if p.device.type == self.device.type]
        return {"keys_values": keys, "engine_weights": sum(weights)}

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Tell whether requests run or wait."""

    @abstractmethod
    def _lay_out(self) -> None:
        """Allocate what requests need at the beginning."""
