"""Sizes that the kit measures, models of these sizes with random weights, and the way of a measurement."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....agents.basics.json_types import JsonObject
from ....agents.model.llama import Llama
from ....agents.model.shape import shape_of
from ....trainers.group.sample_store import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen3Config

Measurement = JsonObject
"""Measurement: its subject, and its figures or the error that ended it."""

PUBLISHED: dict[str, JsonObject] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
"""Configuration of Qwen3-30B-A3B, whose 48 layers are equal."""
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements. The defaults are those for a GPU."""

    shapes: dict[str, JsonObject] = field(
        default_factory=lambda: {n: COMMON | own for n, own in PUBLISHED.items()}
    )
    contexts: tuple[int, ...] = (2048, 8192, 32_768)
    batches: tuple[int, ...] = (1, 64)
    prompt: int = 256
    reply: int = 128
    mixture: JsonObject = field(default_factory=lambda: dict(MIXTURE))
    mixture_layers: int = 4
    product: int = 8192


TINY = Sizes(
    shapes={"small": COMMON | SMALL},
    contexts=(64, 128),
    batches=(1, 3),
    prompt=20,
    reply=6,
    mixture=MIXTURE | SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    mixture_layers=2,
    product=64,
)
"""Sizes with which the kit runs on a CPU in seconds, for a test of the kit."""


@dataclass(frozen=True)
class Stand:
    """Device, sizes and deadline of a section."""

    device: torch.device
    sizes: Sizes
    until: float

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the computation."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def measure(self, what: Measurement, work: Callable[[], Measurement]) -> Iterator[Measurement]:
        """Yield a row with the figures of `work`, or with its error, or with a note that there was no time."""
        if time.monotonic() > self.until:
            yield {**what, "skipped": "out of time"}
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            figures = work()
        except Exception as error:  # reported by name, and the others continue
            yield {**what, "error": f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"}
        else:
            yield {**what, **figures, "peak GiB": round(self.peak(), 3)}
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def peak(self) -> float:
        """Return the peak memory in GiB: of this measurement on a GPU, of the whole process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def seconds(self, work: Callable[[], object], warm: int = 1, times: int = 2) -> float:
        """Return the seconds of the fastest run, after some runs as a warm-up."""
        for _ in range(warm):
            work()
        best = float("inf")
        for _ in range(times):
            self.finish()
            began = time.perf_counter()
            work()
            self.finish()
            best = min(best, time.perf_counter() - began)
            if time.monotonic() > self.until:
                break
        return best

    def finish(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def model(self, name: str, dtype: torch.dtype = torch.float32) -> Llama:
        """Make our decoder with random weights, on the device."""
        config = self.config(name)
        with torch.device(self.device):
            model = Llama(shape_of(config), config).to(dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0.0, 0.02)
        return model

    def config(self, name: str) -> Qwen3Config:
        """Make transformers' configuration of a shape."""
        from transformers import Qwen3Config

        return Qwen3Config(**self.sizes.shapes[name])

    def theirs(self, config: object, dtype: torch.dtype) -> PreTrainedModel:
        """Make transformers' model of the same shape with random weights, on the device."""
        from transformers import AutoModelForCausalLM

        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def samples_of(context: int, vocab: int) -> list[Sample]:
    """Return four replies of different lengths to one prompt. The longest one fills the context."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, vocab, context * 3 // 4)
    lengths = [context // 4, context // 8, context // 16, context // 4]
    return [
        Sample(
            "task",
            str(i),
            "team",
            0,
            prompt,
            rng.integers(1, vocab, n),
            np.full(n, -np.log(vocab), np.float32),
        )
        for i, n in enumerate(lengths)
    ]


def n_tokens(samples: list[Sample]) -> int:
    """Return the number of tokens of all prompts and replies. A shared prompt counts for every sample."""
    return sum(len(sample.prompt) + sample.n_tokens for sample in samples)
