"""Test of a model when it is loaded: are packed rows, padded batches and the model's own cache exact?

The reference is a few tokens, computed with transformers' own attention, each sequence by itself. Packed rows, padded
batches and the cache are used only if they give the same results.
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
from .interface import NAME, WHOLE, Pass, Unpackable
from .shape import UnsupportedArchitecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Ways:
    """Ways in which a model may be computed, as the test found."""

    unpackable: str = ""
    """Reason why sequences cannot be packed. Empty: they can."""
    pads: bool = True
    """Flag: one batch may hold sequences of different lengths."""
    remembers: bool = True
    """Flag: the model's own cache gives right results."""
    keys: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of key heads and their width, by layer."""
    largest: tuple[int, int] = (1, 1)
    """Number of key heads, and their width, that all layers get in a packed row."""
    width: int = 0
    """Width of the states that the scores are computed from."""

    def told(self) -> str:
        """Describe the limits of the model for the user. Empty: there are none."""
        if not self.unpackable:
            return ""
        how = "in padded batches" if self.pads else "one by one"
        again = "" if self.remembers else ", and whole again for each new token, because its cache is wrong"
        return f"no packed rows ({self.unpackable}); sequences are computed {how}{again}"


class Trying(Protocol):
    """Interface of the model under test: the part of `AutoDecoder` that the test uses."""

    net: PreTrainedModel

    @property
    def embed(self) -> Tensor:
        """Input embedding [V, d]."""
        ...

    def __call__(self, ids: Tensor, position: Tensor, attention: Attention) -> Tensor: ...

    def states(self, now: Pass, dtype: torch.dtype | None, **inputs: Tensor) -> Tensor:
        """Compute the hidden states [B, T, d] of a batch."""
        ...

    def scores(self, hidden: Tensor) -> Tensor:
        """Compute the scores [T, V] of states [T, d] with the architecture's own scale, cap and bias."""
        ...

    def padded(
        self, packed: Packed, now: Pass, dtype: torch.dtype | None, keep: Tensor | None, most: int = 0
    ) -> Tensor:
        """Compute the states of a packed row from padded batches."""
        ...

    def continued(
        self, ids: Tensor, past: dict[str, object] | None, route: Route
    ) -> tuple[Tensor, dict[str, object]]:
        """Return the states of the last tokens, and the new cache."""
        ...


def try_out(model: Trying) -> Ways:
    """Compute a few tokens in every way, and return the ways that are exact. Set the model's attention accordingly."""
    chance, device, ways = torch.Generator().manual_seed(0), model.embed.device, Ways()
    begin, one, two, other = (
        torch.randint(0, len(model.embed), (n,), generator=chance).tolist() for n in (24, 12, 17, 20)
    )
    sequences = [begin + one, begin + two, other]
    with torch.no_grad(), own_attention(model.net):
        expected = [_alone(model, ids) for ids in sequences]
        _refuse_unless_causal(model, begin, expected[0])
        scores = model.net(torch.tensor([other], device=device), use_cache=False).logits[0]
        if not alike([model.scores(expected[-1])], [scores]):
            kind = model.net.config.model_type
            raise UnsupportedArchitecture(f"{kind}: its scores need more than the states of its last layer")
    ways.width = expected[0].shape[1]
    packed = pack(sequences, share=4)
    ways.unpackable = _packs(model, packed, expected, ways)
    if ways.unpackable:
        with own_attention(model.net, keep=True):
            ways.pads = _pads(model, packed, sequences)
            ways.remembers = _continues(model, [begin + other, other + begin])
    return ways


@torch.no_grad()
def _packs(model: Trying, packed: Packed, expected: Sequence[Tensor], ways: Ways) -> str:
    """Return the reason why a packed row gives wrong results, or "". Store the sizes of each layer's keys in `ways`."""
    keys = ways.keys

    def noted(layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        if layer in keys:  # the engine stores one set of keys and values for each layer
            raise Unpackable("a layer attends twice")
        keys[layer] = (k.shape[1], k.shape[2])
        heads.add(q.shape[1])
        return attention(layer, q, k, v, how)

    heads: set[int] = set()
    device = model.embed.device
    attention = PackedAttention(packed.segments, model.embed.dtype, device)
    try:
        model.net.set_attn_implementation(NAME)
        hidden = model(packed.ids.to(device), packed.position.to(device), noted)
    except (
        Exception
    ) as error:  # a model of transformers may fail in any way on inputs that it does not expect
        told = str(error).strip().partition("\n")[0] or type(error).__name__
        return "its layers compute with their mask" if "'Sees'" in told else told
    if not alike([hidden[rows] for rows in packed.rows], expected):
        return "its layers mix tokens in other ways than by attention"
    if not keys or sorted(keys) != list(range(len(keys))):
        return "not all of its layers attend"
    most, width = (max(sizes) for sizes in zip(*keys.values(), strict=True))
    fits = all(most % own == 0 for own, _ in keys.values()) and all(count % most == 0 for count in heads)
    ways.largest = most, width
    return "" if fits else "its layers have keys of several shapes"


def _refuse_unless_causal(model: Trying, begin: list[int], whole: Tensor) -> None:
    """Raise an error if the states of a beginning depend on what follows: transformers also loads encoders."""
    if not alike([_alone(model, begin)], [whole[: len(begin)]]):
        raise UnsupportedArchitecture(
            f"{model.net.config.model_type}: a token's state depends on later tokens, so this is no causal language model"
        )


def _alone(model: Trying, ids: list[int]) -> Tensor:
    return model.states(WHOLE, None, input_ids=torch.tensor([ids], device=model.embed.device))[0]


def _pads(model: Trying, packed: Packed, sequences: Sequence[list[int]]) -> bool:
    """Tell whether padded batches give the states and gradients of single sequences."""
    with torch.enable_grad():
        padded = model.padded(packed, WHOLE, None, None, most=3 * len(packed))
        both = [[padded[rows] for rows in packed.rows], [_alone(model, ids) for ids in sequences]]
        parameters = [p for p in model.net.parameters() if p.requires_grad]
        # not the sum of squares: behind a norm without weights it is constant, and its gradients are rounding errors
        weights = torch.linspace(-1, 1, both[0][0].shape[1], device=model.embed.device)
        gradients = [
            torch.autograd.grad((torch.cat(way) * weights).sum(), parameters, allow_unused=True)
            for way in both
        ]
    pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None and b.any()]
    return alike(*both) and alike([a for a, _ in pairs], [b for _, b in pairs])


@torch.no_grad()
def _continues(model: Trying, sequences: list[list[int]]) -> bool:
    """Tell whether a batch that uses the model's own cache gives the states of whole sequences."""
    whole = torch.tensor(sequences, device=model.embed.device)
    expected = model.states(WHOLE, None, input_ids=whole)
    states: list[Tensor] = []
    past: dict[str, object] | None = None
    try:
        for part in whole.split([30, *[1] * (whole.shape[1] - 30)], 1):
            state, past = model.continued(part, past, ())
            states.append(state)
    except Exception:  # a cache of transformers may fail in any way
        return False
    return alike([torch.stack(states, 1)], [expected[:, 29:]])


@contextmanager
def own_attention(net: PreTrainedModel, keep: bool = False) -> Iterator[None]:
    """Use transformers' own attention, in plain matrix products, while the context is open. With `keep`, also afterwards."""
    net.set_attn_implementation("eager")
    try:
        yield
    finally:
        if not keep:
            net.set_attn_implementation(NAME)


def alike(states: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether states are equal up to rounding: 1e-3 of the largest value."""
    pairs = zip(states, expected, strict=True)
    return all(bool(((a - b).abs().max() <= 1e-3 * b.abs().max()).item()) for a, b in pairs)
