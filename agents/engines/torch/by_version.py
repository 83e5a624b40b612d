"""Engine of a replay: each token is sampled by the version of the weights that sampled it in the original run.

In the original run, new weights came in the middle of replies. Here all these versions exist already. So the parts of a
reply are generated one after the other, each by an engine with the weights of its version. In deterministic mode a
reply depends on nothing else. So it equals the original bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ...model.decoder import Decoder
from ...text.tokenizing import Tokenizer
from ..drawn_versions import Drawn, ReplayFailed
from ..generation import Generation
from ..sampling import SamplingParams
from .torch_engine import TorchEngine


class ReplayEngine(TorchEngine):
    """Engine of the newest version, together with engines of older versions."""

    def __init__(
        self,
        drawn: Drawn,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        slots: int,
        context: int | None,
        dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        self.drawn = drawn
        self.engine = partial(
            TorchEngine, slots=slots, context=context, dtype=dtype, deterministic=deterministic
        )
        self.past: dict[tuple[str | None, int], TorchEngine] = {}  # adapter, version
        super().__init__(
            model, tokenizer, slots=slots, context=context, dtype=dtype, deterministic=deterministic
        )

    def publish(self, model: Decoder, version: int, adapter: str | None = None) -> None:
        """Copy new weights, and keep the older ones."""
        if hasattr(self, "model"):
            before = self.version_of(adapter)
            engine = self.engine(self.model, self.tokenizer)
            engine.version = before
            self.past[adapter, before] = engine
            self.past.pop((adapter, before - self.drawn.keep), None)
        super().publish(model, version, adapter)

    async def agenerate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        """Answer one prompt, part by part. Requests that the original run did not log (validation) use the newest
        weights.
        """
        name = "/".join(key or ())
        parts = self.drawn.versions.get(name)
        if parts is None:
            return await super().agenerate(prompt, params, key, adapter, begun)
        ends = [*(start for start, _ in parts[1:]), params.max_tokens]
        for (_, version), end in zip(parts, ends, strict=True):
            begun = await self._part(version, prompt, replace(params, max_tokens=end), adapter, begun)
            if end != ends[-1] and (begun.finish_reason, len(begun.ids)) != ("length", end):
                raise ReplayFailed(
                    f"the reply {name} ends after {len(begun.ids)} tokens ({begun.finish_reason}); in the "
                    f"original it went on under newer weights from token {end}"
                )
        assert begun is not None
        return begun

    async def _part(
        self,
        version: int,
        prompt: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        begun: Generation | None,
    ) -> Generation:
        if version == self.version_of(adapter):
            return await super().agenerate(prompt, params, None, adapter, begun)
        engine = self.past.get((adapter, version)) or self.past.get((None, version))
        if engine is None:
            raise ReplayFailed(f"the log wants version {version}, and the weights of that time are not kept")
        return await engine.agenerate(prompt, params, None, adapter, begun)
