"""Sizes of a Llama-family decoder, read from its configuration. An error names what the decoder does not support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..basics.json_types import JsonView
from ..basics.manifest import Damaged

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KNOWN = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedArchitecture(ValueError):
    """Raised when a decoder cannot compute a model."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes that every decoder has. Models with equal sizes can exchange weights."""

    vocab: int
    d: int
    layers: int
    kv_heads: int
    head_width: int
    context: int


@dataclass(frozen=True, slots=True)
class Shape(Dimensions):
    """Sizes and variants of one decoder of the Llama family."""

    heads: int
    ffn: int
    eps: float
    inverse_frequencies: tuple[float, ...]
    rope_factor: float = 1.0
    tied: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def computes(config: PretrainedConfig) -> bool:
    """Tell whether the decoder of `llama.py` computes a model with this configuration."""
    try:
        shape_of(config)
    except UnsupportedArchitecture:
        return False
    return True


def shape_of(config: PretrainedConfig) -> Shape:
    """Read the shape of a transformers configuration (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig)."""
    _refuse_unless_known(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inverse_frequencies, rope_factor = _rope(config, width)
    bias = bool(getattr(config, "attention_bias", False))
    return Shape(
        vocab=config.vocab_size,
        d=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_width=width,
        ffn=config.intermediate_size,
        context=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        inverse_frequencies=inverse_frequencies,
        rope_factor=rope_factor,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias or config.model_type == "qwen2",
        out_bias=bias and config.model_type != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type == "qwen3",
    )


def _refuse_unless_known(config: PretrainedConfig) -> None:
    kind = getattr(config, "model_type", None)
    works = f"what works here: {', '.join(KNOWN)} (SmolLM2, TinyLlama: llama), full attention, SiLU"
    if kind not in KNOWN:
        raise UnsupportedArchitecture(
            f"no decoder for model type {kind!r}; {works}. Others can be served by vLLM."
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(f"{kind} with activation {config.hidden_act!r}; {works}")
    layers = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None) and (kind == "mistral" or config.use_sliding_window)
    if layers - {"full_attention"} or sliding:
        raise UnsupportedArchitecture(f"{kind} with sliding-window attention; {works}")


def _rope(config: PretrainedConfig, width: int) -> tuple[tuple[float, ...], float]:
    """Return the inverse frequencies [D/2], and the factor on cos and sin.

    Transformers computes them for the scaled variants (linear, llama3, yarn).
    """
    rope: JsonView = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        theta = float(rope.get("rope_theta", 0) or getattr(config, "rope_theta", 10_000.0))
        return tuple(float(theta ** (-i / width)) for i in range(0, width, 2)), 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedArchitecture(
            f"rotary positions of type {kind!r}; what works: default, linear, llama3, yarn"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, None)
    return tuple(frequencies.tolist()), float(factor)


@contextmanager
def reading(place: Path, what: str) -> Iterator[None]:
    """Turn any error of a library that reads a model's files into one line that names the place."""
    try:
        yield
    except (Damaged, UnsupportedArchitecture, ImportError, MemoryError):
        raise
    except Exception as error:  # the readers raise what their parsers raise: struct.error, KeyError …
        cause = " ".join(str(error).split()) or type(error).__name__
        cause = cause if len(cause) <= 300 else cause[:300] + " …"
        raise Damaged(
            f"{place}: {what} cannot be read ({cause}). A file may be missing, incomplete or of another kind: "
            "copy or download the model again"
        ) from error
