"""Interface of decoders: the calls that engines and learners make on a model.

The model's configuration selects one of two implementations. Engines and learners use both in the same way.

    Llama          our own decoder of the Llama family, the faster one                    llama.py
    AutoDecoder    any other causal language model, with the layers of transformers       auto.py
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..basics.json_types import JsonView
from ..text.tokenizing import Tokenizer
from .attention import PLAIN, Packed, PackedAttention, Weighing
from .shape import Dimensions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .logprobs import Support

D = TypeVar("D", bound="Decoder")

# Adapters of a pass: (name, mask [T] of the rows that use it). A mask of None means all rows; () is the base model alone.
# An adapter is computed for every row and masked. This is cheap, and a product of fixed shape gives each row the same bits,
# no matter which other rows use the adapter.
Route = Sequence[tuple[str, "Tensor | None"]]


class Attention(Protocol):
    """Attention of a layer from q [T, H, D] to k and v [T, K, D], with result [T, H, D]. It selects the visible keys."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor: ...


class Decoder(nn.Module):
    """Causal language model that computes rows of tokens.

    `unpackable` is the reason why sequences cannot be packed in a row, or "". `unfixed` is the reason why the bits of a
    row's result may depend on the other rows, or "".
    """

    shape: Dimensions
    hf_config: PretrainedConfig
    """Configuration of transformers, which is saved with the model."""
    generation: JsonView = MappingProxyType({})
    """Content of the model's `generation_config.json`: it may name tokens that end a reply and that `hf_config` lacks."""
    embed: Tensor
    """Input embedding [V, d]. Its device and type are those of the model."""
    unpackable = ""
    unfixed = ""
    fixed = False
    """Flag: only adapters learn, so copies in the same precision share all other parameters."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        position: Tensor,
        attention: Attention,
        *,
        dtype: torch.dtype | None = None,
        route: Route = (),
        checkpointing: bool = False,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states [T, d] from ids [T] at `position` [T]. With `keep`, return only those of these rows."""

    def forward_packed(
        self,
        packed: Packed,
        *,
        dtype: torch.dtype | None = None,
        adapter: str | None = None,
        checkpointing: bool = False,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states [T, d] of packed sequences. Those of sequence i are `hidden[packed.rows[i]]`.

        `keep` lists rows, for example those that predict a trained token: only their states are returned, in this order.
        `dtype` is the type of the computation; the default is that of the parameters. With `checkpointing`, only each
        layer's input is stored for the backward pass, which computes the rest again.
        """
        self.check_length(packed)
        device = self.embed.device
        attention = PackedAttention(packed.segments, dtype or self.embed.dtype, device)
        route: Route = () if adapter is None else ((adapter, None),)
        ids, position = packed.ids.to(device), packed.position.to(device)
        hidden: Tensor = self(
            ids, position, attention, dtype=dtype, route=route, checkpointing=checkpointing, keep=keep
        )
        return hidden

    def check_length(self, packed: Packed) -> None:
        """Raise `ValueError` if a sequence is longer than the model's context."""
        if int(packed.position.max()) >= self.shape.context:
            raise ValueError(
                f"a sequence of {int(packed.position.max()) + 1} tokens is longer than the model's context of "
                f"{self.shape.context}; drop it, or cut it where it was made"
            )

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores [T, V] in float32. Training uses `logprobs`, which never stores all of them."""

    @abstractmethod
    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs [N] and entropies [N] of `targets` from hidden states [N, d], as `logprobs_entropy` does."""

    @abstractmethod
    def add_adapter(
        self, name: str, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = (), tokens: int = 0
    ) -> list[nn.Parameter]:
        """Add an adapter, and return its parameters for an optimizer.

        The adapter is low-rank and changes the matrices named by `targets`; () means all matrices of all layers. With
        `tokens`, it is instead a learned prefix of that many tokens in every layer.
        """

    @abstractmethod
    def learnable(self, adapter: str | None, critic: bool = False) -> dict[str, nn.Parameter]:
        """Return the parameters of one adapter, or (None) of the model itself, by name. A critic's exclude the head."""

    @abstractmethod
    def with_adapter_of(self: D, other: D, name: str) -> D:
        """Return a model that shares all tensors with this one, except for a frozen copy of another model's adapter."""

    def copied(self, dtype: torch.dtype) -> Decoder:
        """Return a copy in another precision."""
        return copy.deepcopy(self).to(dtype)

    @abstractmethod
    def merged(self, adapter: str | None = None) -> Decoder:
        """Return a copy without adapters. With `adapter`, that one is added into the matrices first."""

    def virtual(self, adapter: str | None) -> int:
        """Return the number of virtual tokens that an adapter puts before every prompt. Their ids do not matter."""
        return 0


class OwnFiles(Decoder):
    """Decoder that reads and writes its own files. For `Llama`, weights.py does so."""

    @abstractmethod
    def save(
        self, path: Path, tokenizer: Tokenizer | None, adapter: str | None, dtype: torch.dtype | None
    ) -> None:
        """Write a Hugging Face directory, with one adapter in the matrices. Callers use `weights.save_model`."""

    @abstractmethod
    def save_adapter(self, name: str, path: Path) -> None:
        """Write one adapter as peft does. Callers use `weights.save_adapter`."""

    @abstractmethod
    def load_prefix(self, path: Path) -> str:
        """Add the learned prefix of a folder that `save_adapter` wrote. Return the name of its adapter."""


def check_rank(adapter: str, rank: int, matrices: Sequence[Tensor]) -> None:
    """Raise a ValueError if a low-rank adapter has a rank above the full rank of every matrix that it changes."""
    full = max((min(matrix.shape) for matrix in matrices), default=rank)
    if rank > full:
        raise ValueError(
            f"adapter {adapter!r}: rank {rank} is above {full}, the full rank of its largest matrix; give a lower "
            "adapter.rank (usual: 8 to 64), or no adapter, which trains all parameters"
        )
