"""A decoder: what engines and learners ask of a model. There are two, chosen by the model's configuration.

    Llama          our own, for the Llama family: the fast path                          llama.py
    AutoDecoder    any other causal language model, through transformers                  auto.py

An engine and a learner cannot tell which of the two they have.
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

# Which adapter answers for which rows: (name, mask of rows), None meaning all. () is the base model alone. An adapter
# is computed for every row and masked: it is cheap, and a product of fixed shape does not depend on who else is there.
Route = Sequence[tuple[str, "Tensor | None"]]


class Attention(Protocol):
    """Attention of one layer: q [T, H, D], k and v [T, K, D] -> [T, H, D]. It decides which tokens see which."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor: ...


class Decoder(nn.Module):
    """A causal language model over rows of tokens.

    `unpackable` says why it takes whole sequences alone; it is empty where rows can be packed. `unfixed` says why the
    same row may give other bits beside other rows; empty where it does not.
    """

    shape: Dimensions
    hf_config: PretrainedConfig
    """Configuration of transformers, with which the model saves as it loaded."""
    generation: JsonView = MappingProxyType({})
    """Content of the model's `generation_config.json`: with it go tokens that end a reply and that `hf_config` may lack."""
    embed: Tensor
    """The input embedding [V, d]. Its device and type are the model's."""
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
        """Compute hidden states [T, d] from ids [T] at `position` [T]; with `keep`, those of these rows."""

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

        With `keep` (rows; for example those that predict a trained token) only their states are computed and returned, in
        its order. `dtype` is that of the computation (default: the parameters' own). `checkpointing` keeps only each layer's
        input for the backward pass and computes the rest again.
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
        """Refuse sequences that are longer than the model's context."""
        if int(packed.position.max()) >= self.shape.context:
            raise ValueError(
                f"a sequence of {int(packed.position.max()) + 1} tokens is longer than the model's context of "
                f"{self.shape.context}; drop it, or cut it where it was made"
            )

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [T, V] in float32. For training use `logprobs`, which never holds all of them."""

    @abstractmethod
    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N] of `targets`, from hidden states [N, d]; see `logprobs_entropy`."""

    @abstractmethod
    def add_adapter(
        self, name: str, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = (), tokens: int = 0
    ) -> list[nn.Parameter]:
        """Add a low-rank adapter to `targets` (names of matrices; (): all of every layer), or with `tokens` a
        learned prefix of every layer. Return its parameters, for an optimizer.
        """

    @abstractmethod
    def learnable(self, adapter: str | None, critic: bool = False) -> dict[str, nn.Parameter]:
        """Parameters of one adapter, or (None) of the model itself, by name. A critic does not need the head."""

    @abstractmethod
    def with_adapter_of(self: D, other: D, name: str) -> D:
        """Return a model that shares these tensors, except for one adapter: a copy of another model's, which
        does not learn.
        """

    def copied(self, dtype: torch.dtype) -> Decoder:
        """Return a copy in another precision."""
        return copy.deepcopy(self).to(dtype)

    @abstractmethod
    def merged(self, adapter: str | None = None) -> Decoder:
        """Return a copy without adapters; one of them may be added into the matrices."""

    def virtual(self, adapter: str | None) -> int:
        """Number of tokens that an adapter lays before every prompt. Their ids do not matter."""
        return 0


class OwnFiles(Decoder):
    """A decoder that writes and reads its files by itself. Those of our own are written by weights.py."""

    @abstractmethod
    def save(self, path: Path, tokenizer: Tokenizer | None = None) -> None:
        """Write a Hugging Face directory without adapters (`weights.save_model` does so for every decoder)."""

    @abstractmethod
    def save_adapter(self, name: str, path: Path) -> None:
        """Write one adapter as peft does (`weights.save_adapter` does so for every decoder)."""

    @abstractmethod
    def load_prefix(self, path: Path) -> str:
        """Add the learned prefix of a folder that `save_adapter` wrote. Return the adapter's name."""
