"""Attention implementation for transformers' models, registered under the name "unitymas".

Transformers asks an attention implementation for two things: a mask, built from a function of positions (causal, sliding
window, chunks), and the attention itself. Here the mask stays a function. The caller of the model supplies the attention,
which selects the visible keys (`attention.PackedAttention`, or the engine's cache). So the same packing works for our
decoder and for every model whose layers mix tokens by attention alone.

    with running(Pass(attention, route)):
        model(input_ids=row, position_ids=position, …)

Without a pass, or in a pass without an attention, the model computes padded batches with its own masks and cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .attention import PLAIN, Weighing, attend
from .decoder import Attention, Route

NAME = "unitymas"


class Unpackable(ValueError):
    """Raised when a model's layers need something that a packed row does not have."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Settings of one forward pass. Each thread has its own pass, so passes can run at the same time."""

    attention: Attention | None = None
    """Attention over a packed row. None: the model's own masks and cache."""
    route: Route = ()
    """Adapters, and the rows that use each."""
    checkpointing: bool = False
    """Flag: store only each layer's input for the backward pass, which computes the rest again."""
    position: Tensor | None = None
    """Positions of a packed row's tokens, (T,)."""


WHOLE = Pass()
"""Pass over whole sequences, without adapters."""
_PASS: ContextVar[Pass] = ContextVar("pass", default=WHOLE)


@contextmanager
def running(now: Pass) -> Iterator[None]:
    """Set this thread's pass while the context is open."""
    token = _PASS.set(now)
    try:
        yield
    finally:
        _PASS.reset(token)


class Sees:
    """Mask of a layer as a function of positions. Layers of transformers get it in place of a tensor."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.all = function is causal_mask_function
        self.function = function

    def __getitem__(self, part: tuple[slice, ...]) -> Sees:
        """Return the mask for a part of the queries. Only all queries are possible (Gemma 4 asks for them in this way)."""
        if any(cut not in (slice(None), slice(0, None)) for cut in part):
            raise Unpackable("its layers compute with their mask")
        return self

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Tell which keys each query may attend to. Both arguments are positions, and they broadcast."""
        return self.function(0, 0, query, key)


LayerMask = Sees | Tensor | None
"""Mask that a layer of transformers gets: ours in a packed pass, else a tensor. None: causality alone."""


def _mask(
    *, mask_function: Callable[..., Tensor] = causal_mask_function, use_vmap: bool = False, **shape: object
) -> LayerMask:
    if _PASS.get().attention is None:
        shape["allow_is_causal_skip"] = False
        theirs: LayerMask = sdpa_mask(mask_function=mask_function, use_vmap=use_vmap, **shape)
        return theirs
    if use_vmap:
        raise Unpackable("its masks are more than functions of positions")
    return Sees(mask_function)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend from q [B, H, Q, D] to k and v [B, K, S, D], as transformers' interface asks. Return [B, Q, H, D]."""
    attention = _PASS.get().attention
    query = _tempered(module, query, _PASS.get().position)
    how = Weighing(scaling, softcap, s_aux, _sees(attention_mask) if attention else None)
    width, narrow = query.shape[-1], query.shape[-1] - value.shape[-1]
    if narrow > 0:  # values narrower than keys: zeros change no sum
        value = F.pad(value, (0, narrow))
    if attention is None:
        out = attend(query, key, value, _added(attention_mask, query, key), how).transpose(1, 2)
    else:
        odd = sorted(
            name for name, other in others.items() if isinstance(other, Tensor) and name not in _KNOWN
        )
        if odd or query.shape[0] != 1 or narrow < 0:
            raise Unpackable(f"its attention takes {', '.join(odd) or 'values wider than keys'}")
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise Unpackable("its attention layers have no number")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = attention(layer, q, k, v, how)[None]
    return out[..., : width - max(narrow, 0)].contiguous(), None


class Widest:
    """Attention for layers whose keys have several shapes: all keys and values get the shape of the largest.

    Zeros change no score, and repeated key heads are the heads that the queries share in any case. So the result is the same.
    """

    def __init__(self, attention: Attention, heads: int, width: int) -> None:
        self.attention, self.heads, self.width = attention, heads, width

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        """Attend from q [T, H, D] to k and v [T, K, D], where K and D depend on the layer."""
        own = q.shape[2]
        if own < self.width:
            how = replace(how, scale=own**-0.5 if how.scale is None else how.scale)
            q, k, v = (F.pad(x, (0, self.width - own)) for x in (q, k, v))
        k, v = (x.repeat_interleave(self.heads // x.shape[1], 1) for x in (k, v))
        return self.attention(layer, q, k, v, how)[..., :own]


def _tempered(module: nn.Module, query: Tensor, position: Tensor | None) -> Tensor:
    """Return the queries [B, H, Q, D] of Llama 4 at the temperature of their positions.

    Its layers without rotary positions scale queries by their places in the row, which are no positions in a packed row.
    """
    if position is None or not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    step, share = (getattr(module, name) for name in ("floor_scale", "attn_scale"))

    def scale(place: Tensor) -> Tensor:
        return torch.floor((place.float() + 1.0) / step).log1p() * share + 1.0  # type: ignore[no-any-return]

    place = torch.arange(query.shape[2], device=query.device)
    return query * (scale(position) / scale(place)).to(query.dtype)[:, None]


_KNOWN = ("position_ids", "cache_position", "attention_mask")


def _sees(mask: LayerMask) -> Sees | None:
    if not isinstance(mask, Sees):
        raise Unpackable("it makes its masks by itself")
    return None if mask.all else mask


def _added(mask: LayerMask, query: Tensor, key: Tensor) -> Tensor:
    """Return the additive mask [B, Q, S] of a mask [B, 1, Q, S], which may be boolean. None hides nothing."""
    size = (len(query), query.shape[2], key.shape[2])
    if not isinstance(mask, Tensor):
        return query.new_zeros(size)
    if mask.dtype != torch.bool:
        return mask[:, 0, :, : size[2]].to(query.dtype).expand(size)
    hidden = ~mask[:, 0, :, : size[2]].expand(size)
    return query.new_zeros(size).masked_fill_(hidden, float("-inf"))


class Recomputed:
    """Mixin of a model's layers. In a pass with checkpointing, the backward pass computes the layer again."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Pickle a layer. Its class is made again in the other process, from the layer's original class."""
        return _empty, (type(self).__mro__[2],), self.__dict__

    def forward(self, *args: object, **kwargs: object) -> object:
        """Compute the layer, with the checkpointing that the pass asks for."""
        now = _PASS.get()
        forward = super().forward  # type: ignore[misc]
        if not now.checkpointing or not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), running(now)

        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)


def recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer's class, with `Recomputed` mixed in."""
    if kind not in _RECOMPUTED:
        _RECOMPUTED[kind] = type(kind.__name__, (Recomputed, kind), {"__module__": kind.__module__})
    return _RECOMPUTED[kind]


_RECOMPUTED: dict[type[nn.Module], type[nn.Module]] = {}


def _empty(kind: type[nn.Module]) -> nn.Module:
    """Return a layer without state, for unpickling."""
    layer = recomputed(kind)
    return layer.__new__(layer)


def route_now() -> Route:
    """Return the adapters of this thread's pass."""
    return _PASS.get().route


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
