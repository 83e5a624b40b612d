"""Parts of a model of transformers: its layers apart from its scores, and what it has beside them for images and sounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from .shape import UnsupportedArchitecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def class_of(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return the class of transformers that loads a model. One that also sees images is used for its text."""
    loader: type[AutoModelForCausalLM | AutoModelForImageTextToText]
    for models, loader in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    ):
        if type(config) in models:
            return loader
    raise UnsupportedArchitecture(
        f"{config._name_or_path or config.model_type}: {config.model_type} is no causal language model"
    )


def body_of(net: PreTrainedModel) -> str:
    """Return the name of the part of a model that computes states from tokens: all except the head."""
    embed = net.get_input_embeddings()
    for name, part in net.named_children():
        if part is not embed and any(module is embed for module in part.modules()):
            return str(name)
    raise UnsupportedArchitecture(
        f"{net.config.model_type}: its layers are no part of their own, apart from its scores"
    )


def beside_text(net: PreTrainedModel) -> tuple[str, ...]:
    """Return the beginnings of the names of parameters that text does not use: the parts for images and sounds."""
    text, embed = net.get_decoder(), net.get_input_embeddings()
    places = {id(module): name for name, module in net.named_modules()}
    around, inner, _ = places.get(id(text), "").rpartition(".")
    if not inner or not any(module is embed for module in text.modules()):
        return ()
    parts = net.get_submodule(around).named_children()
    return tuple(f"net.{around}.{name}." for name, part in parts if part is not text)


class Given(nn.Module):
    """Module in place of the layers, when scores are computed from hidden states.

    It has the layers' other attributes, because some models keep a factor of their scores there, and others call an
    inner part of the layers by its name (OPT).
    """

    def __init__(self, body: nn.Module, embed: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"], self.__dict__["embed"] = body, embed

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        part: Tensor | nn.Module = getattr(self.__dict__["body"], name)
        embed = self.__dict__["embed"]
        if isinstance(part, nn.Module) and part is not embed and any(m is embed for m in part.modules()):
            return Given(part, embed)
        return part

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> States:
        """Return the hidden states that it is called with."""
        return States(last_hidden_state=inputs_embeds)


class States(dict[str | int, Tensor]):
    """Output of the layers that holds only hidden states, accessible by name and by index."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self.get(name)

    def __getitem__(self, key: str | int) -> Tensor:
        return super().__getitem__("last_hidden_state" if key == 0 else key)
