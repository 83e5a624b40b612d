"""Weights that arrive in a worker of vLLM: whether all came, and what an update that failed leaves behind.

This module is imported in each worker. It needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration

Names = Iterable[tuple[str, Tensor]]


class Arrivals:
    """Record of one update: names that were sent, and parameters of the worker's model that were loaded."""

    def __init__(self, model: VllmModelForTextGeneration, config: VllmConfig, *, exact: bool = True) -> None:
        """Read what the model needs. `exact`: every bias and every part of a fused matrix must come. Otherwise vLLM's
        own list of loaded parameters decides, without biases: some architectures lack a few.
        """
        self.model, self.exact = model, exact
        lora, self.quantized = config.lora_config is not None, config.model_config.quantization is not None
        names = (name for name, _ in model.named_parameters())
        self.needed = {name.replace(".base_layer.", ".") if lora else name for name in names}
        self.sent: set[str] = set()
        self.loaded: set[str] | None = set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what the model loads inside of this block. An update may have several such blocks."""
        load = self.model.load_weights

        def noting(weights: Names) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self.sent.add(name)
                yield name, tensor

        def load_weights(weights: Names) -> set[str] | None:
            loaded: set[str] | None = load(noting(weights))
            self.loaded = None if loaded is None or self.loaded is None else self.loaded | set(loaded)
            return loaded

        self.model.load_weights = load_weights
        try:
            yield
        finally:
            del self.model.load_weights  # that of the class is back

    def check(self) -> None:
        """Refuse an update that is not complete."""
        if self.quantized:
            return  # vLLM computes such parameters from several weights
        loaded = self.needed if self.loaded is None else self.loaded
        missing = {name for name in self.needed - loaded if self.exact or not name.endswith(".bias")}
        if self.exact:
            missing |= lacking_parts(
                self.needed & loaded, self.sent, getattr(self.model, "packed_modules_mapping", {})
            )
        if missing:
            raise RuntimeError(
                f"{len(missing)} weights of vLLM's model did not come, among them {min(missing)} "
                f"({len(self.sent)} came); publish a model of the same architecture and layers, with all its weights"
            )


def lacking_parts(needed: Iterable[str], sent: set[str], fused: Mapping[str, list[str]]) -> set[str]:
    """Return the names of parts that did not come, such as `k_proj` of `qkv_proj`, where other parts came.

    vLLM counts a fused matrix as loaded as soon as one part of it is there.
    """
    lacking = set()
    for name in needed:
        for whole, parts in fused.items():
            if f".{whole}." not in name:
                continue
            names = {name.replace(f".{whole}.", f".{part}.") for part in parts}
            if names & sent:
                lacking |= names - sent
    return lacking


class Completeness(WeightTransferEngine):  # type: ignore[misc]
    """Mixin of a worker's side: an update that is not complete is an error, and does not end."""

    def start_weight_update(self) -> None:
        """Begin to record, and prepare the layers."""
        self.arrivals = Arrivals(self.model, self.vllm_config)
        super().start_weight_update()

    def receive_weights(self, update_info: object) -> None:
        """Load what has come."""
        with self.arrivals.recorded():
            super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """Check that all weights came, and put the loaded layers in place."""
        self.arrivals.check()
        super().finish_weight_update()
        pack_head(self.model)


def forget_update(model: VllmModelForTextGeneration, config: VllmConfig) -> None:
    """End an update that failed. Layers that were not whole get back their old weights, so that the next one can begin.

    vLLM would count what had come for them as a part of the next update.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
    )

    model.__dict__.pop("load_weights", None)
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    with set_current_vllm_config(config):
        finalize_layerwise_reload(model, config.model_config)


def pack_head(model: VllmModelForTextGeneration) -> None:
    """Pack a head anew that is tied to the embeddings: on CPUs it keeps a packed copy of the old weights."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        head = getattr(model.lm_head, "base_layer", model.lm_head)
        head.quant_method.process_weights_after_loading(head)
