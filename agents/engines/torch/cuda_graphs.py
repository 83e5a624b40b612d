"""Decode steps as CUDA graphs: a GPU runs a recorded step at once, where Python would launch it kernel by kernel.

A step of decode is short: some hundred kernels of a few microseconds each, and Python needs longer to launch them than
the GPU to run them. A graph has fixed shapes and fixed addresses. So a step is rounded up to one of a few sizes
(requests to a power of two, keys to a power of two from 256 on), each recorded when it is first used. Rows without a
request write to the first position of a slot that nobody has, where the next request's prefill overwrites them.

A graph reads the weights and the cache where they were when it was recorded. So these graphs belong to one model, and
are forgotten when the cache moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.decoder import Decoder
from ...model.llama import Llama
from ..generation import Request
from .kv_cache import Cache, Speaking

SMALLEST_WIDTH = 256
"""Fewest keys of a recorded step."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded step: fill in `ids` and `position`, then `replay` returns the hidden states."""

    ids: Tensor
    position: Tensor
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """The recorded steps of one model by (rows, width)."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.device = model, model.embed.device
        self.recorded: dict[tuple[int, int], Recorded] = {}
        self.place: tuple[object, ...] = ()  # address and shape of the cache that the graphs read
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @classmethod
    def of(cls, model: Decoder) -> DecodeGraphs | None:
        """Return graphs for our own decoder on a GPU, or None elsewhere (layers of other models may synchronise with
        the GPU).
        """
        return cls(model) if isinstance(model, Llama) and model.embed.device.type == "cuda" else None

    def decode(self, requests: Sequence[Request], cache: Cache) -> Tensor:
        """Return the hidden states [n, d] of the last tokens of the requests in the first n slots."""
        place = (cache.both.data_ptr(), *cache.both.shape)
        if self.place != place:
            self.recorded.clear()
            self.place = place
        n = len(requests)
        rows, width = fixed_size(n, 1 + max(r.length for r in requests), cache.size)
        if (rows, width) not in self.recorded:
            self.recorded[rows, width] = self._record(rows, width, cache)
        graph = self.recorded[rows, width]
        spare = [0] * (rows - n)
        graph.ids.copy_(torch.tensor([*(r.ids[-1] for r in requests), *spare]))
        graph.position.copy_(torch.tensor([*(r.length for r in requests), *spare]))
        return graph.replay()[:n].clone()

    def _record(self, rows: int, width: int, cache: Cache) -> Recorded:
        ids = torch.zeros(rows, dtype=torch.long, device=self.device)
        # a warm-up writes to position `width - 1`, which no request uses yet
        position = torch.full((rows,), width - 1, dtype=torch.long, device=self.device)

        def step() -> Tensor:
            hidden: Tensor = self.model(ids, position, Speaking(cache, position, width))
            return hidden

        if self._pool is None:  # without a GPU: the same step in the same size, launched each time
            return Recorded(ids, position, step)
        here, aside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # libraries allocate their workspaces in a run that is not recorded
            step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: learners in other threads may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = step()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return Recorded(ids, position, replay)


def fixed_size(rows: int, width: int, room: tuple[int, int]) -> tuple[int, int]:
    """Round a step's requests and keys up to powers of two, at most the size of the cache."""
    slots, tokens = room
    return (
        min(slots, 1 << (rows - 1).bit_length()),
        min(tokens, max(SMALLEST_WIDTH, 1 << (width - 1).bit_length())),
    )
