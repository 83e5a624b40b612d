"""Engines of the package, constructed for a model group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory

import torch

from ..model.decoder import Decoder
from ..model.weights import save_model
from .drawn_versions import Drawn
from .engine import Engine, EngineOrder
from .torch.torch_engine import TorchEngine
from .vllm.vllm_engine import VLLMEngine


def engine_kind(model: Decoder) -> type[TorchEngine]:
    """Return the class of the torch engine that fits a model."""
    if not model.unpackable:
        return TorchEngine
    from .torch.whole_engine import WholeEngine

    return WholeEngine


def torch_engine(order: EngineOrder) -> Engine:
    """Make our own engine, in this process."""
    if why := order.deterministic and order.model.unfixed:
        raise ValueError(
            f"deterministic runs need a model whose products keep their shapes, and this one {why}"
        )
    kind: Callable[..., TorchEngine] = engine_kind(order.model)
    if isinstance(drawn := order.options.get("replay"), Drawn):
        from .torch.by_version import ReplayEngine

        kind = partial(ReplayEngine, drawn)
    engine = kind(
        order.model,
        order.tokenizer,
        slots=order.slots,
        context=order.context,
        dtype=getattr(torch, order.precision),
        deterministic=order.deterministic,
    )
    engine.sleeps = order.sleeps
    return engine


def vllm_engine(order: EngineOrder) -> Engine:
    """Make one vLLM engine for one set of weights and all adapters on it."""
    with TemporaryDirectory(prefix="unitymas-weights-") as folder:
        save_model(order.model, folder, order.tokenizer, dtype=getattr(torch, order.precision))
        engine = VLLMEngine(
            folder,
            order.tokenizer,
            context=order.context,
            adapters=order.adapters,
            seed=order.seed,
            max_num_seqs=order.slots,
            dtype=order.precision,
            **order.options,
        )
    for name in order.adapters:
        engine.publish(order.model, 0, name)
    return engine
