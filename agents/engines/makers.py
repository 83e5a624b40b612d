"""The engines that come with unitymas, made for a model group."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch

from ..model.weights import save_model
from .engine import Engine, EngineOrder
from .torch_engine import TorchEngine
from .vllm_engine import VLLMEngine


def torch_engine(order: EngineOrder) -> Engine:
    """Our own engine, in this process."""
    return TorchEngine(
        order.model,
        order.tokenizer,
        slots=order.slots,
        context=order.context,
        dtype=getattr(torch, order.precision),
        deterministic=order.deterministic,
    )


def vllm_engine(order: EngineOrder) -> Engine:
    """One vLLM engine for one set of weights and for all adapters on them."""
    with TemporaryDirectory(prefix="unitymas-weights-") as folder:
        save_model(order.model, folder, order.tokenizer)
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
