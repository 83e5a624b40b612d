"""Trial of a model that is loaded: in which ways may its sequences be computed?

A few tokens are computed by transformers' own attention, each sequence alone. That is the truth. Packed rows, padded
batches and the model's cache must give the same, or they are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .attention import PLAIN, Packed, PackedAttention, Weighing, pack
from .decoder import Attention, Route
from .interface import NAME, WHOLE, Pass
from .shape import UnsupportedArchitecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Ways:
    """Ways in which a model may be computed."""

    unpackable: str = ""
    """Reason why rows cannot be packed."""
    pads: bool = True
    """Flag: sequences of several lengths may stand in one batch."""
    remembers: bool = True
    """Flag: the model's own cache is right."""
    keys: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of key heads and their width, by layer."""

    def told(self) -> str:
        """Describe what a user should know; empty where all is well."""
        if not self.unpackable:
            return ""
        how = "in padded batches" if self.pads else "one by one"
        again = "" if self.remembers else ", and whole again for each new token, because its cache is wrong"
        return f"no packed rows ({self.unpackable}); sequences are computed {how}{again}"


class Trying(Protocol):
    """Interface of a model that is tried: an `AutoDecoder`."""

    net: PreTrainedModel

    @property
    def embed(self) -> Tensor:
        """Return the input embedding."""
        ...

    def __call__(self, ids: Tensor, position: Tensor, attention: Attention) -> Tensor: ...

    def states(self, now: Pass, dtype: torch.dtype | None, **inputs: Tensor) -> Tensor:
        """Return hidden states of a batch."""
        ...

    def scores(self, hidden: Tensor) -> Tensor:
        """Return scores as the architecture makes them."""
        ...

    def padded(
        self, packed: Packed, now: Pass, dtype: torch.dtype | None, keep: Tensor | None, most: int = 0
    ) -> Tensor:
        """Return states of packed rows, from padded batches."""
        ...

    def continued(
        self, ids: Tensor, past: dict[str, object] | None, route: Route
    ) -> tuple[Tensor, dict[str, object]]:
        """Return the last states, and what is then remembered."""
        ...


def try_out(model: Trying) -> Ways:
    """Compute a few tokens of a model (`AutoDecoder`) in every way, and leave the model with the attention that it is to use."""
    chance, device, ways = torch.Generator().manual_seed(0), model.embed.device, Ways()
    begin, one, two, other = (
        torch.randint(0, len(model.embed), (n,), generator=chance).tolist() for n in (24, 12, 17, 20)
    )
    sequences = [begin + one, begin + two, other]
    with torch.no_grad(), own_attention(model.net):
        expected = [_alone(model, ids) for ids in sequences]
        scores = model.net(torch.tensor([other], device=device), use_cache=False).logits[0]
        if not alike([model.scores(expected[-1])], [scores]):
            kind = model.net.config.model_type
            raise UnsupportedArchitecture(f"{kind}: its scores need more than the states of its last layer")
    packed = pack(sequences, share=4)
    ways.unpackable = _packs(model, packed, expected, ways.keys)
    if ways.unpackable:
        with own_attention(model.net, keep=True):
            ways.pads = _pads(model, packed, sequences)
            ways.remembers = _continues(model, [begin + other, other + begin])
    return ways


@torch.no_grad()
def _packs(
    model: Trying, packed: Packed, expected: Sequence[Tensor], keys: dict[int, tuple[int, int]]
) -> str:
    """Return the reason why a packed row is wrong (""): it is not. Note the keys of each layer."""

    def noted(layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        keys[layer] = (k.shape[1], k.shape[2])
        return attention(layer, q, k, v, how)

    device = model.embed.device
    attention = PackedAttention(packed.segments, model.embed.dtype, device)
    try:
        model.net.set_attn_implementation(NAME)
        hidden = model(packed.ids.to(device), packed.position.to(device), noted)
    except Exception as error:  # whatever a model of others does with what it does not expect
        return str(error).strip().partition("\n")[0] or type(error).__name__
    if not alike([hidden[rows] for rows in packed.rows], expected):
        return "its layers mix tokens in other ways than by attention"
    same = len(set(keys.values())) == 1 and sorted(keys) == list(range(len(keys)))
    return "" if same else "its layers have keys of several shapes"


def _alone(model: Trying, ids: list[int]) -> Tensor:
    return model.states(WHOLE, None, input_ids=torch.tensor([ids], device=model.embed.device))[0]


def _pads(model: Trying, packed: Packed, sequences: Sequence[list[int]]) -> bool:
    """Tell whether padding changes neither states nor gradients."""
    with torch.enable_grad():
        padded = model.padded(packed, WHOLE, None, None, most=3 * len(packed))
        both = [[padded[rows] for rows in packed.rows], [_alone(model, ids) for ids in sequences]]
        learned = [p for p in model.net.parameters() if p.requires_grad]
        slopes = [
            torch.autograd.grad(torch.cat(way).square().sum(), learned, allow_unused=True) for way in both
        ]
    used = [(a, b) for a, b in zip(*slopes, strict=True) if a is not None and b is not None and b.any()]
    return alike(*both) and alike([a for a, _ in used], [b for _, b in used])


@torch.no_grad()
def _continues(model: Trying, sequences: list[list[int]]) -> bool:
    """Tell whether the model's own cache gives the states of whole sequences, in a batch."""
    whole = torch.tensor(sequences, device=model.embed.device)
    expected = model.states(WHOLE, None, input_ids=whole)
    states: list[Tensor] = []
    past: dict[str, object] | None = None
    try:
        for part in whole.split([30, *[1] * (whole.shape[1] - 30)], 1):
            state, past = model.continued(part, past, ())
            states.append(state)
    except Exception:  # whatever goes wrong in a cache of others
        return False
    return alike([torch.stack(states, 1)], [expected[:, 29:]])


@contextmanager
def own_attention(net: PreTrainedModel, keep: bool = False) -> Iterator[None]:
    """Compute with transformers' own attention, which every model has in plain products; with `keep` for good."""
    net.set_attn_implementation("eager")
    try:
        yield
    finally:
        if not keep:
            net.set_attn_implementation(NAME)


def alike(states: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether states are equal up to rounding."""
    pairs = zip(states, expected, strict=True)
    return all(bool(((a - b).abs().max() <= 1e-3 * b.abs().max()).item()) for a, b in pairs)
