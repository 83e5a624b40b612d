"""Decoder of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3 and relatives.

Training and generation use the same forward pass with different attention: `attention(layer, q, k, v)` is an argument. In
training it covers a packed row of sequences (`attention.PackedAttention`), in the engine a cache (`kv_cache.py`). Matrix
products are fused (q, k and v in one; gate and up in one), because a small model spends its time on them. `weights.py`
loads and saves weights.

Parameters keep their own type (float32 for training). They are cast to the type of the computation where they are used. So
a model trains in float32, or in bfloat16 with float32 weights, without autocast.

Shapes: T tokens, d width, H heads, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .decoder import Attention, Decoder, Route, check_rank
from .logprobs import Support, logprobs_entropy
from .shape import Shape
from .vocabulary_split import VocabularyRanks, split_embedding, split_logprobs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Linear(nn.Module):
    """Matrix product with named low-rank adapters. Each row of the batch may use another adapter."""

    def __init__(self, d_in: int, d_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        self.adapters = nn.ModuleDict()

    def forward(self, x: Tensor, route: Route = ()) -> Tensor:
        """Compute [T, d_out] from x [T, d_in], with the adapters of the route."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)
        for name, rows in route:
            if name not in self.adapters:
                continue
            change = self.adapters[name](x)
            y = y + (change if rows is None else change * rows[:, None])
        return y


class LowRank(nn.Module):
    """Low-rank change of one matrix: x A' B' * scale, with A = `down` and B = `up`. B starts at 0: no change."""

    def __init__(self, d_in: int, d_out: int, rank: int, scale: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, d_in) / rank)
        self.up = nn.Parameter(torch.zeros(d_out, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Compute the change [T, d_out] from x [T, d_in]."""
        return F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype)) * self.scale

    def matrix(self, gather: Callable[[Tensor], Tensor] = torch.detach) -> Tensor:
        """Compute the change of the matrix itself [d_out, d_in]. `gather` makes a tensor whole if a rank has a part of it."""
        return gather(self.up) @ gather(self.down) * self.scale


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Compute the normed x [T, d]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    """Layer of the decoder: attention, then a gated feed-forward network, each with a norm before and a residual sum."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        heads, keys, width = shape.heads, shape.kv_heads, shape.head_width
        self.attention_norm = Norm(shape.d, shape.eps)
        self.qkv = Linear(shape.d, (heads + 2 * keys) * width, shape.qkv_bias)
        self.q_norm = Norm(width, shape.eps) if shape.qk_norm else None
        self.k_norm = Norm(width, shape.eps) if shape.qk_norm else None
        self.out = Linear(heads * width, shape.d, shape.out_bias)
        self.mlp_norm = Norm(shape.d, shape.eps)
        self.gate_up = Linear(shape.d, 2 * shape.ffn, shape.mlp_bias)
        self.down = Linear(shape.ffn, shape.d, shape.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, route: Route, keep: Tensor | None
    ) -> Tensor:
        """Compute the states after this layer from x [T, d]; with `keep`, only those of these rows."""
        heads, keys = self.shape.heads, self.shape.kv_heads
        qkv = self.qkv(self.attention_norm(x), route).view(len(x), -1, self.shape.head_width)
        qk, v = torch.split(qkv, [heads + keys, keys], 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), 1)
        q, k = torch.split(rotate(qk, cos, sin), [heads, keys], 1)
        mixed = attention(self.index, q, k, v).flatten(1)
        if keep is not None:
            x, mixed, route = x[keep], mixed[keep], _among(route, keep)
        x = x + self.out(mixed, route)
        gate, up = self.gate_up(self.mlp_norm(x), route).chunk(2, -1)
        return x + self.down(F.silu(gate) * up, route)  # type: ignore[no-any-return]


def _among(route: Route, keep: Tensor) -> Route:
    """Restrict the route to the rows in `keep`."""
    return [(name, None if rows is None else rows[keep]) for name, rows in route]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions: x [T, heads, D], cos and sin [T, 1, D/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Llama(Decoder):
    """Decoder of the Llama family."""

    shape: Shape
    vocabulary: VocabularyRanks | None = None
    """Ranks that share the rows of embedding and head. None: this process has all rows."""
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, hf_config: PretrainedConfig | None = None) -> None:
        super().__init__()
        self.shape, self.hf_config = shape, hf_config
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.d))
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))
        self.norm = Norm(shape.d, shape.eps)
        self.untied_head = None if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.d))
        angle = torch.outer(torch.arange(shape.context).float(), torch.tensor(shape.inverse_frequencies))
        self.register_buffer("cos", angle.cos() * shape.rope_factor, persistent=False)
        self.register_buffer("sin", angle.sin() * shape.rope_factor, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, std: float = 0.02) -> Llama:
        """Set random weights, the same for the same seed. Norms are 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
        return self

    @property
    def head(self) -> Tensor:
        """Output matrix [V, d]. It is the embedding itself if the two are tied."""
        return self.embed if self.untied_head is None else self.untied_head

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
        """Compute hidden states [T, d] after the last norm, from ids [T] at `position` [T].

        With `keep`, only the states of those rows are returned. All of the last layer after its attention is then computed
        for these rows alone.
        """
        x = self._embedded(ids, dtype or self.embed.dtype)
        cos, sin = self.cos[position, None].to(x.dtype), self.sin[position, None].to(x.dtype)
        for i, layer in enumerate(self.layers):
            rows = keep if i == len(self.layers) - 1 else None
            if checkpointing:
                x = checkpoint(layer, x, cos, sin, attention, route, rows, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attention, route, rows)
        return self.norm(x)  # type: ignore[no-any-return]

    def _embedded(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if self.vocabulary is not None:
            return split_embedding(ids, self.embed, dtype, self.vocabulary)
        return F.embedding(ids, self.embed).to(dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores [T, V] in float32."""
        return F.linear(hidden, self.head.to(hidden.dtype)).float()

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies with `logprobs_entropy`."""
        if self.vocabulary is not None:
            return split_logprobs(hidden, self.head, targets, temperature, support, self.vocabulary)
        return logprobs_entropy(hidden, self.head, targets, temperature, support)

    def learnable(self, adapter: str | None, critic: bool = False) -> dict[str, nn.Parameter]:
        """Return the parameters of one adapter, or (None) of the model itself, by name."""
        if adapter is not None:
            return {n: p for n, p in self.named_parameters() if f".adapters.{adapter}." in n}
        unused = "untied_head" if critic else ""
        return {n: p for n, p in self.named_parameters() if ".adapters." not in n and n != unused}

    def add_adapter(
        self, name: str, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = (), tokens: int = 0
    ) -> list[nn.Parameter]:
        """Add a low-rank adapter to every matrix of every layer."""
        if targets or tokens:
            raise ValueError("an adapter with targets or tokens needs a model that transformers computes")
        parameters: list[nn.Parameter] = []
        matrices = [module for module in self.modules() if isinstance(module, Linear)]
        check_rank(name, rank, [module.weight for module in matrices])
        for module in matrices:
            d_out, d_in = module.weight.shape
            module.adapters[name] = LowRank(d_in, d_out, rank, alpha / rank).to(module.weight.device)
            parameters += module.adapters[name].parameters()
        return parameters

    def with_adapter_of(self, other: Llama, name: str) -> Llama:
        """Return a model that shares all tensors with this one, except for a copy of another model's adapter."""
        mixed = copy.deepcopy(self, {id(t): t for t in (*self.parameters(), *self.buffers())})
        for place, module in other.named_modules():
            ours = mixed.get_submodule(place)
            if isinstance(module, Linear) and isinstance(ours, Linear):
                ours.adapters[name] = (
                    copy.deepcopy(module.adapters[name]).to(self.embed).requires_grad_(False)
                )
        return mixed

    def copied(self, dtype: torch.dtype) -> Llama:
        """Return a copy in another precision. Each tensor is cast by itself, to keep the peak of memory low.

        If the model is `fixed`, tensors that already have this precision are shared.
        """
        memo: dict[int, object] = {
            id(p): p
            if self.fixed and p.dtype == dtype and ".adapters." not in name
            else nn.Parameter(p.detach().to(dtype, copy=True))
            for name, p in self.named_parameters()
        }
        return copy.deepcopy(self, memo).to(dtype)

    @torch.no_grad()
    def merged(self, adapter: str | None = None) -> Llama:
        """Return a copy without adapters. With `adapter`, that one is added into the matrices first."""
        # one tensor at a time: a deep copy that is cast would hold the model three times
        memo: dict[int, object] = {
            id(p): p
            if ".adapters." in name
            else nn.Parameter(self.played(name, adapter).clone(), p.requires_grad)
            for name, p in self.named_parameters()
        }
        plain = copy.deepcopy(self, memo)
        plain.fixed = False
        for module in plain.modules():
            if isinstance(module, Linear):
                module.adapters.clear()
        return plain

    @torch.no_grad()
    def played(
        self, name: str, adapter: str | None, gather: Callable[[Tensor], Tensor] = torch.detach
    ) -> Tensor:
        """Return one tensor of the model with an adapter's change. `gather` makes a tensor whole if a rank has a part of it.

        A `fixed` model has half precision, and a sum with an adapter's small change needs more digits.
        """
        place, _, kind = name.rpartition(".")
        module = self.get_submodule(place)
        whole = gather(self.get_parameter(name))
        if self.fixed:
            whole = whole.float()
        if adapter is None or kind != "weight" or not isinstance(module, Linear):
            return whole
        low = module.adapters[adapter]
        assert isinstance(low, LowRank)
        return whole + low.matrix(gather)
