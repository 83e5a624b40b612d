"""Decoder of any causal language model that transformers knows: Gemma, Phi, OLMo, Granite, Qwen3-MoE and others.

The layers are transformers' own (`AutoModelForCausalLM`). The attention is ours (interface.py), so these models use the
same packing and the same engine as our own decoder. Each model is tested when it is loaded: a few tokens are computed
packed, and again unpacked with transformers' own attention. Some models give other results when packed, because their
layers carry a state from token to token or make their own masks. Such a model computes whole sequences, in padded
batches or one by one.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..basics.hints import say_once
from ..text.tokenizing import Tokenizer
from .adapters import PeftAdapters, matrices, noted, read_prefix
from .anatomy import Given, beside_text, body_of, class_of
from .attention import Packed, Segment
from .decoder import Attention, OwnFiles, Route
from .interface import Pass, Recomputed, Widest, recomputed, running
from .logprobs import Support, plain_logprobs_entropy, rows_of_chunk
from .packing_trial import Ways, try_out
from .shape import Dimensions, reading

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ENDLESS = 1 << 17
"""Length of the context of a model whose configuration names none."""


@dataclass(frozen=True, slots=True)
class AutoShape(Dimensions):
    """Sizes of a model that transformers computes."""

    kind: str
    tensors: int
    """Hash of the names and shapes of all parameters."""


class AutoDecoder(OwnFiles):
    """Decoder whose layers come from transformers."""

    shape: AutoShape

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net, self.hf_config = net.eval(), net.config
        self.body = body_of(net)
        self.unseen = beside_text(net)
        self.adapters = PeftAdapters(net)
        for module in net.modules():
            if isinstance(module, GradientCheckpointingLayer) and not isinstance(module, Recomputed):
                module.__class__ = recomputed(type(module))
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(_widened)
        self.ways, self.several = Ways(), False
        with noted(net) as called:
            self.ways = try_out(self)
        self.adapters.matrices = matrices(net, called)
        self.unpackable = self.ways.unpackable
        self.several = len(set(self.ways.keys.values())) > 1
        """Flag: layers have keys of several shapes."""
        config = net.config.get_text_config()
        if told := self.ways.told():
            say_once(f"{config.model_type}: {told}")
        if any("experts" in name for name, _ in net.named_modules()):
            self.unfixed = (
                "routes tokens to experts, in products whose sizes depend on all tokens beside them"
            )
        heads, width = self.ways.largest
        names = "".join(f"{name}{tuple(p.shape)}" for name, p in net.named_parameters())
        self.shape = AutoShape(
            kind=config.model_type,
            vocab=len(self.embed),
            d=self.ways.width,
            layers=len(self.ways.keys),
            kv_heads=heads,
            head_width=width,
            context=context_of(config),
            tensors=zlib.crc32(names.encode()),
        )

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        """Input embedding [V, d]."""
        return self.net.get_input_embeddings().weight  # type: ignore[no-any-return]

    # -- forward passes -------------------------------------------------------------------------------------------

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
        """Compute the hidden states of a packed row with the layers of transformers."""
        attention = self.adapters.before(attention, position, route)
        if self.several:
            attention = Widest(attention, *self.ways.largest)
        hidden = self.states(
            Pass(attention, route, checkpointing, position),
            dtype,
            input_ids=ids[None],
            position_ids=position[None],
            attention_mask=torch.ones_like(ids)[None],
        )[0]
        return hidden if keep is None else hidden[keep]

    def forward_packed(
        self,
        packed: Packed,
        *,
        dtype: torch.dtype | None = None,
        adapter: str | None = None,
        checkpointing: bool = False,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states of packed sequences, as in `Decoder`. An unpackable model computes padded batches."""
        if self.unpackable:
            route: Route = () if adapter is None else ((adapter, None),)
            return self.padded(packed, Pass(None, route, checkpointing), dtype, keep)
        before = self.virtual(adapter)
        if not before:
            return super().forward_packed(
                packed, dtype=dtype, adapter=adapter, checkpointing=checkpointing, keep=keep
            )
        rows = torch.arange(len(packed), device=self.embed.device) if keep is None else keep
        return super().forward_packed(
            _after(packed, before),
            dtype=dtype,
            adapter=adapter,
            checkpointing=checkpointing,
            keep=rows + before,
        )

    def padded(
        self, packed: Packed, now: Pass, dtype: torch.dtype | None, keep: Tensor | None, most: int = 0
    ) -> Tensor:
        """Compute the hidden states of a packed row from batches of whole sequences, padded on the right.

        A batch holds at most about `most` tokens. With 0, the limit is the number of tokens of the row.
        """
        device = self.embed.device
        lengths = [len(rows) for rows in packed.rows]
        states: list[Tensor] = []
        places: list[Tensor] = []
        for batch in _batches(lengths, most or len(packed), not self.ways.pads):
            longest = max(lengths[i] for i in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            real = torch.zeros_like(ids)
            for b, i in enumerate(batch):
                ids[b, : lengths[i]], real[b, : lengths[i]] = packed.ids[packed.rows[i]], 1
            hidden = self.states(now, dtype, input_ids=ids.to(device), attention_mask=real.to(device))
            states += [hidden[b, : lengths[i]] for b, i in enumerate(batch)]
            places += [packed.rows[i] for i in batch]
        # a token that several sequences share was computed for each of them: one of the copies is used
        place = torch.cat(places)
        source = torch.zeros(len(packed), dtype=torch.long).index_copy_(0, place, torch.arange(len(place)))
        source = source.to(device)
        return torch.cat(states).index_select(0, source if keep is None else source[keep])

    def states(self, now: Pass, dtype: torch.dtype | None, **inputs: Tensor) -> Tensor:
        """Compute the hidden states [B, T, d] of a batch, after the last norm."""
        body = getattr(self.net, self.body)
        parameters = inspect.signature(body.forward).parameters
        if now.attention is None:
            inputs = {name: value for name, value in inputs.items() if name in parameters}
        with running(now), self._computed_in(dtype):
            hidden: Tensor = body(**inputs, **({"use_cache": False} if "use_cache" in parameters else {}))[0]
        return hidden.to(dtype or self.embed.dtype)

    def continued(
        self, ids: Tensor, past: dict[str, object] | None, route: Route
    ) -> tuple[Tensor, dict[str, object]]:
        """Compute the states [B, d] of the last of ids [B, n], which follow the tokens of the cache `past`.

        Return the states and the new cache. A model whose own cache is wrong keeps all ids as its cache.
        """
        if not self.ways.remembers:
            before = past and past["ids"]
            ids = torch.cat((before, ids), 1) if isinstance(before, Tensor) else ids
            return self.states(Pass(None, route), None, input_ids=ids)[:, -1], {"ids": ids}
        body = getattr(self.net, self.body)
        before = past and past["position_ids"]
        begin = before[:, -1:] + 1 if isinstance(before, Tensor) else torch.zeros_like(ids[:, :1])
        position = begin + torch.arange(ids.shape[1], device=ids.device)
        inputs = {**(past or {}), "input_ids": ids, "position_ids": position}
        if "position_ids" not in inspect.signature(body.forward).parameters:
            del inputs["position_ids"]
        with running(Pass(None, route)):
            out = body(**inputs, use_cache=True)
        cache = {
            name: out[name]
            for name in ("past_key_values", "cache_params", "state")
            if out.get(name) is not None
        }
        # some models count from 0 in each call if they get no positions (Bamba)
        return out[0][:, -1], {**cache, "position_ids": position}

    def _computed_in(self, dtype: torch.dtype | None) -> AbstractContextManager[object]:
        half = dtype in (torch.bfloat16, torch.float16)
        if half and (self.fixed or dtype != self.embed.dtype):
            return torch.autocast(self.embed.device.type, dtype=dtype)
        return nullcontext()

    # -- scores ---------------------------------------------------------------------------------------------------

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores [T, V], in float32 or wider."""
        scores = self.scores(hidden)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def scores(self, hidden: Tensor) -> Tensor:
        """Compute the scores [T, V] of the states [T, d] with the architecture's own scale, cap and bias."""
        head = copy.copy(self.net)
        layers = Given(getattr(self.net, self.body), self.net.get_input_embeddings())
        head.__dict__["_modules"] = {**self.net._modules, self.body: layers}
        with self._computed_in(hidden.dtype):
            return head(inputs_embeds=hidden[None]).logits[0]  # type: ignore[no-any-return]

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs [T] and entropies [T] in chunks. The backward pass computes each chunk again."""
        heat = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(hidden))
        heat = torch.where(heat == 0, 1.0, heat)
        step = rows_of_chunk(self.embed)

        def chunk(states: Tensor, begin: int) -> tuple[Tensor, Tensor]:
            part = slice(begin, begin + step)
            scores = self.logits(states) / heat[part, None]
            return plain_logprobs_entropy(scores, targets[part], support, begin)

        parts = [
            checkpoint(chunk, hidden[i : i + step], i, use_reentrant=False)
            for i in range(0, len(hidden), step)
        ]
        if not parts:
            return heat, heat
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    # -- adapters -------------------------------------------------------------------------------------------------

    def add_adapter(
        self, name: str, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = (), tokens: int = 0
    ) -> list[nn.Parameter]:
        """Add an adapter, made by peft."""
        odd = {
            "its keys and values are compressed": getattr(self.hf_config, "kv_lora_rank", None),
            "its layers have keys of several shapes": self.several,
        }
        if tokens and (why := self.unpackable or next((name for name, true in odd.items() if true), "")):
            raise ValueError(f"no prefix can be learned for {self.shape.kind}: {why}")
        return self.adapters.add(self.net, name, rank, alpha, targets, tokens, self.shape)

    def learnable(self, adapter: str | None, critic: bool = False) -> dict[str, nn.Parameter]:
        """Return the parameters of one adapter, or (None) of the model itself, by name."""
        if adapter is not None:
            return {n: p for n, p in self.named_parameters() if self.adapters.owns(adapter, n)}
        unused = self._head() if critic else set()
        return {
            n: p
            for n, p in self.named_parameters()
            if not self.adapters.owns(None, n) and id(p) not in unused and not n.startswith(self.unseen)
        }

    def _head(self) -> set[int]:
        """Return the ids of the parameters that only the scores depend on."""
        head, embed = self.net.get_output_embeddings(), self.embed
        return {id(p) for p in (head.parameters() if head is not None else ()) if p is not embed}

    def with_adapter_of(self, other: AutoDecoder, name: str) -> AutoDecoder:
        """Return a model that shares all tensors with this one, except for a copy of another model's adapter."""
        mixed = copy.deepcopy(self, {id(t): t for t in (*self.parameters(), *self.buffers())})
        mixed.adapters.take(mixed.net, other.net, other.adapters, name, self.embed)
        return mixed

    def copied(self, dtype: torch.dtype) -> AutoDecoder:
        """Return a copy in another precision. Each tensor is cast by itself, to keep the peak of memory low.

        If the model is `fixed`, tensors that already have this precision are shared.
        """
        memo: dict[int, object] = {
            id(p): p
            if self.fixed and p.dtype == dtype
            else nn.Parameter(p.detach().to(dtype, copy=True), p.requires_grad)
            for p in self.parameters()
        }
        return copy.deepcopy(self, memo)

    @torch.no_grad()
    def merged(self, adapter: str | None = None) -> AutoDecoder:
        """Return a copy without adapters. With `adapter`, that one is added into the matrices first.

        A `fixed` model has half precision, and a sum with an adapter's small change needs more digits.
        """
        plain = self.copied(torch.float32) if self.fixed else copy.deepcopy(self)
        plain.fixed = False
        plain.adapters.merge(plain.net, adapter)
        return plain

    def virtual(self, adapter: str | None) -> int:
        """Return the number of virtual tokens that an adapter puts before every prompt."""
        return self.adapters.tokens(adapter)

    # -- files ----------------------------------------------------------------------------------------------------

    def save(
        self, path: Path, tokenizer: Tokenizer | None, adapter: str | None, dtype: torch.dtype | None
    ) -> None:
        """Write a Hugging Face directory, with one adapter in the matrices."""
        plain = self.merged(adapter) if self.adapters else self
        if dtype is not None:
            plain = plain.copied(dtype)
        own = self.hf_config.dtype
        plain.net.save_pretrained(path)
        # transformers has put the type of the tensors there, which is float32 while a model learns
        self.hf_config.dtype = own
        if tokenizer is not None:
            tokenizer.save_pretrained(path)

    def load_prefix(self, path: Path) -> str:
        """Add the learned prefix of a folder. Return the name of its adapter."""
        tokens, weight = read_prefix(path)
        (embedding,) = self.add_adapter("prefix", tokens=tokens)
        with torch.no_grad():
            embedding.copy_(weight)
        return "prefix"

    def save_adapter(self, name: str, path: Path) -> None:
        """Write one adapter as peft does."""
        self.adapters.save(self.net, name, path)

    def to(self, where: torch.device | torch.dtype | Tensor | str) -> AutoDecoder:  # type: ignore[override]
        """Move to a device, or cast parameters to a type. Buffers, such as rotary frequencies, keep their type."""
        if isinstance(where, Tensor):
            return self.to(where.device).to(where.dtype)
        if not isinstance(where, torch.dtype):
            return super().to(where)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(where)
        return self


def _widened(module: nn.Module, inputs: object, states: Tensor) -> Tensor:
    """Return the embeddings in float32 under autocast. So all sums of layers have this precision if weights have half of it."""
    return states.float() if torch.is_autocast_enabled(states.device.type) else states


def context_of(config: PretrainedConfig) -> int:
    """Return the length of a model's longest sequence.

    Beyond their original length, some rotary embeddings depend on the longest sequence of the batch. A token's state
    would then depend on the other sequences, so the context ends at the original length.
    """
    context = getattr(config, "max_position_embeddings", None) or ENDLESS
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in [ropes, *(inner for inner in ropes.values() if isinstance(inner, dict))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original and original < context:
                say_once(
                    f"{config.model_type}: sequences of up to {original} tokens (its positions beyond depend on the "
                    "longest sequence of a batch)"
                )
                context = original
    return int(context)


def _after(packed: Packed, before: int) -> Packed:
    """Return the row with `before` more tokens at its start, which all its sequences share."""
    segments = [Segment(s.start + before, s.stop + before, s.parent + 1) for s in packed.segments]
    return Packed(
        ids=torch.cat((packed.ids.new_zeros(before), packed.ids)),
        position=torch.cat((torch.arange(before), packed.position + before)),
        segments=(Segment(0, before, -1), *segments),
        rows=packed.rows,
    )


def _batches(lengths: Sequence[int], tokens: int, alone: bool) -> Iterator[list[int]]:
    """Yield batches of sequences of similar lengths, by index, with at most about `tokens` tokens (padding included).

    With `alone`, each sequence is a batch.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batch and (alone or (len(batch) + 1) * lengths[i] > tokens):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def load_auto(
    path: Path, config: PretrainedConfig, **where: torch.device | torch.dtype | Tensor | str
) -> AutoDecoder:
    """Load a model in float32, with the layers of transformers."""
    dtype, name = config.dtype, config._name_or_path
    with reading(path, "the weights"):
        net = class_of(config).from_pretrained(
            path, config=config, dtype=torch.float32, local_files_only=True, **where
        )
    net.config.dtype, net.config._name_or_path = dtype, name
    return AutoDecoder(net)
