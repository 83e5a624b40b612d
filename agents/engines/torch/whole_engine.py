"""The engine of models whose rows cannot be packed: recurrent and hybrid ones, and those with masks of their own.

Such a model carries more than keys and values from token to token, so our cache cannot hold it. Here transformers'
own cache does. Prompts of one length make a batch, which decodes in lockstep until its last reply is complete: nothing
is padded, so the log-probs are exact for every architecture. All else (sampling, stopping, asyncio) is as in the
torch engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...model.auto import AutoDecoder
from ..engine import Ability
from ..generation import Request
from .torch_engine import TorchEngine


@dataclass(slots=True)
class Lockstep:
    """Requests whose prompts have the same length, and the model's state for them."""

    requests: list[Request]
    adapter: str | None
    past: dict[str, object] | None = None


class WholeEngine(TorchEngine):
    """Engine that generates batches of whole sequences with transformers' own cache."""

    cannot: Mapping[Ability, str] = {
        "determinism": "cannot give the same bits whatever else runs: this model decodes in batches of changing size"
    }
    model: AutoDecoder

    def _lay_out(self) -> None:
        self.batches: list[Lockstep] = []

    def fix_shapes(self) -> None:
        """Refuse: the shapes of this engine change."""
        raise ValueError(f"{type(self).__name__} {self.cannot['determinism']}")

    def _step(self) -> None:
        free = min(self.slots - len(self.running), len(self.waiting))
        self._admit([self.waiting.popleft() for _ in range(free)])
        self.batches = [batch for batch in self.batches if not all(r.done for r in batch.requests)]
        states: dict[int, torch.Tensor] = {}
        for batch in self.batches:
            if batch.past is None:
                ids = [r.tokens for r in batch.requests]
                self.counts.update(prompts=len(ids), tokens_read=sum(map(len, ids)))
            else:  # a row whose reply is complete continues, and its tokens are ignored
                ids = [r.ids[-1:] for r in batch.requests]
                self.counts.update(steps=1, tokens_spoken=len(ids))
            route = () if batch.adapter is None else ((batch.adapter, None),)
            row = torch.tensor(ids, device=self.device)
            hidden, batch.past = self.model.continued(row, batch.past, route)
            states.update(zip(map(id, batch.requests), hidden, strict=True))
        if self.running:
            self._say(torch.stack([states[id(request)] for request in self.running]))

    def _admit(self, requests: list[Request]) -> None:
        """Make batches of requests with the same adapter and the same number of tokens."""
        alike: dict[tuple[str, int], Lockstep] = {}
        for request in requests:
            request.version = self.version_of(request.adapter)
            key = (request.adapter or "", len(request.tokens))
            batch = alike.setdefault(key, Lockstep([], request.adapter))
            batch.requests.append(request)
            self.running.append(request)
        self.batches += alike.values()

    def _let_out(self, requests: list[Request]) -> None:
        self.batches = [b for b in self.batches if not any(r in requests for r in b.requests)]
        super()._let_out(requests)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
