"""Adapters of models that transformers computes: LoRA and prefix tuning, with the layers, names and files of peft.

The running pass decides which adapter each row uses (interface.py). There is no switch in the model. So one pass can use
several adapters, and several passes can run at the same time.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..basics.hints import nearest
from .attention import PLAIN, Weighing
from .decoder import Attention, Route, check_rank
from .interface import Unpackable, route_now
from .shape import Dimensions

if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners import PrefixEncoder
    from peft.tuners.lora import Linear
    from transformers import PreTrainedModel


class PeftAdapters(nn.Module):
    """Adapters of one model. Low-rank matrices are part of the model's layers; prefixes are stored here."""

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.configs: dict[str, PeftConfig] = {}
        self.prefixes = nn.ModuleDict()
        self.matrices: list[str] = []
        """Names of the matrices that a low-rank adapter changes by default."""

    def __bool__(self) -> bool:
        return bool(self.configs)

    def add(
        self,
        net: PreTrainedModel,
        name: str,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        tokens: int,
        sizes: Dimensions,
    ) -> list[nn.Parameter]:
        """Add an adapter, and return its parameters."""
        learned = {id(p): p.requires_grad for p in net.parameters()}
        if tokens:
            self._prefix(net, name, tokens, sizes)
        else:
            self._low_rank(net, name, rank, alpha, self._chosen(targets))
        for parameter in net.parameters():  # peft freezes all others
            parameter.requires_grad_(learned.get(id(parameter), True))
        self.configs[name].base_model_name_or_path = getattr(net.config, "_name_or_path", "")
        places = [*net.named_parameters(), *self.named_parameters()]
        parameters = [parameter for place, parameter in places if self.owns(name, place)]
        # peft gives them the type of the base, whose digits may be too few for small steps
        for parameter in parameters:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        return parameters

    def _chosen(self, targets: Sequence[str]) -> list[str]:
        """Return the target matrices; all by default. A matrix that no layer calls is an error.

        An adapter of such a matrix would change nothing until it is merged.
        """
        names = {name.rpartition(".")[2] for name in self.matrices}
        for target in targets:
            if target.rpartition(".")[2] not in names:
                raise ValueError(
                    f"no layer calls a matrix {target!r}; {nearest(target, sorted(names), 'it has')}"
                )
        if not targets and not self.matrices:
            raise ValueError("LoRA finds no matrix that it could change; name some in `targets`")
        return list(targets) or self.matrices

    def _low_rank(self, net: PreTrainedModel, name: str, rank: int, alpha: float, targets: list[str]) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear

        ends = tuple(f".{target}" for target in targets)
        changed = [module for place, module in net.named_modules() if f".{place}".endswith(ends)]
        check_rank(name, rank, [m.weight for m in changed if isinstance(m, (nn.Linear, Conv1D, Linear))])
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
        with warnings.catch_warnings():  # several adapters are meant
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            inject_adapter_in_model(config, net, adapter_name=name)
        for module in _layers(net):
            if type(module) is Linear:
                module.__class__ = _routed()
            elif not isinstance(module, _routed()):
                raise ValueError(
                    f"adapter {name!r}: targets are matrices, and {type(module).__name__} is none"
                )
        self.configs[name] = config

    def _prefix(self, net: PreTrainedModel, name: str, tokens: int, sizes: Dimensions) -> None:
        from peft import PrefixTuningConfig
        from peft.tuners import PrefixEncoder

        config = PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=tokens, num_layers=sizes.layers,
            num_attention_heads=sizes.kv_heads, token_dim=sizes.kv_heads * sizes.head_width,
            num_transformer_submodules=1,
        )  # fmt: skip
        encoder: PrefixEncoder = PrefixEncoder(config).to(next(net.parameters()).device)
        nn.init.zeros_(encoder.embedding.weight)  # a new prefix takes some attention, but adds no noise
        self.prefixes[name], self.configs[name] = encoder, config

    def owns(self, adapter: str | None, parameter: str) -> bool:
        """Tell whether a parameter belongs to this adapter. None: to any adapter."""
        parts = parameter.split(".")
        for kind in ("lora_A", "lora_B", "prefixes"):
            if kind in parts[:-1]:
                return adapter is None or parts[parts.index(kind) + 1] == adapter
        return False

    def tokens(self, adapter: str | None) -> int:
        """Return the number of virtual tokens of an adapter; 0 for one without a prefix."""
        if adapter is None or adapter not in self.prefixes:
            return 0
        return int(self.configs[adapter].num_virtual_tokens)

    def before(self, attention: Attention, position: Tensor, route: Route) -> Attention:
        """Return an attention in which the first keys and values of each row come from the prefix of its adapter."""
        prefixed = [(name, rows) for name, rows in route if name in self.prefixes]
        return (
            _Prefixed(attention, position, [(self._keys(n), r) for n, r in prefixed])
            if prefixed
            else attention
        )

    def _keys(self, name: str) -> Tensor:
        """Return the keys and values of a prefix of P tokens: [P, layers, 2, K, D]."""
        config = self.configs[name]
        encoder: PrefixEncoder = self.prefixes[name]
        weight = encoder.embedding.weight
        heads = config.num_attention_heads
        keys: Tensor = weight.view(len(weight), config.num_layers, 2, heads, config.token_dim // heads)
        return keys

    def take(
        self, net: PreTrainedModel, other: PreTrainedModel, theirs: PeftAdapters, name: str, like: Tensor
    ) -> None:
        """Replace our adapter of this name by a copy of another model's."""
        if name in self.prefixes:
            self.prefixes[name] = copy.deepcopy(theirs.prefixes[name]).to(like).requires_grad_(False)
        for place, module in other.named_modules():
            if isinstance(module, _routed()) and name in module.lora_A:
                ours = net.get_submodule(place)
                for kind in ("lora_A", "lora_B"):
                    low = copy.deepcopy(getattr(module, kind)[name])
                    getattr(ours, kind)[name] = low.to(like).requires_grad_(False)

    def merge(self, net: PreTrainedModel, adapter: str | None) -> None:
        """Add one low-rank adapter into the matrices, and remove all adapters. A prefix cannot be merged and is lost."""
        for place, module in list(net.named_modules()):
            if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
                if adapter is not None and adapter in module.lora_A:
                    module.merge(adapter_names=[adapter])
                parent, _, name = place.rpartition(".")
                plain: Linear = module
                setattr(net.get_submodule(parent), name, plain.get_base_layer())
        self.configs.clear()
        self.prefixes.clear()
        if hasattr(net, "peft_config"):
            del net.peft_config

    def save(self, net: PreTrainedModel, name: str, path: Path) -> None:
        """Write one adapter as peft's `save_pretrained` does."""
        from safetensors.torch import save_file

        config = copy.copy(self.configs[name])
        config.inference_mode = True
        if name in self.prefixes:
            encoder: PrefixEncoder = self.prefixes[name]
            state: dict[str, Tensor] = {"prompt_embeddings": encoder.embedding.weight}
        else:
            # only behind these names: an adapter may be called as a part of the model is
            (a, plain_a), (b, plain_b) = ((f".lora_{kind}.{name}.", f".lora_{kind}.") for kind in "AB")
            state = {
                f"base_model.model.{place.replace(a, plain_a).replace(b, plain_b)}": p
                for place, p in net.named_parameters()
                if self.owns(name, place)
            }
        plain = {place: tensor.detach().cpu().contiguous().clone() for place, tensor in state.items()}
        save_file(plain, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(path)


def read_prefix(path: Path) -> tuple[int, Tensor]:
    """Return the number of tokens and the weights of a saved prefix."""
    from safetensors.torch import load_file

    tokens = json.loads((path / "adapter_config.json").read_text())["num_virtual_tokens"]
    return int(tokens), load_file(path / "adapter_model.safetensors")["prompt_embeddings"]


class _Prefixed:
    """Attention with learned prefixes: they replace keys and values at the first positions of the rows that use them."""

    def __init__(
        self, attention: Attention, position: Tensor, prefixes: Sequence[tuple[Tensor, Tensor | None]]
    ) -> None:
        self.attention = attention
        self.places: list[tuple[Tensor, Tensor, Tensor]] = []  # prefix, rows, and the prefix's token at each
        for prefix, rows in prefixes:
            first = position < len(prefix)
            row = (first if rows is None else first & rows).nonzero().squeeze(1)
            self.places.append((prefix, row, position[row]))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing = PLAIN) -> Tensor:
        for prefix, row, token in self.places:
            both = prefix[token, layer].to(k.dtype)  # [rows, 2, K, D]
            k, v = k.index_copy(0, row, both[:, 0]), v.index_copy(0, row, both[:, 1])
        return self.attention(layer, q, k, v, how)


@contextmanager
def noted(net: PreTrainedModel) -> Iterator[set[str]]:
    """Record the names of the matrices that the model calls while the context is open, and that multiply only.

    A layer that reads the weights of a matrix without calling it is not recorded. Neither is a subclass of a matrix that
    does more than multiply, such as a router.
    """
    called: set[str] = set()

    def note(module: nn.Linear | Conv1D, inputs: tuple[Tensor, ...], out: object, name: str) -> None:
        if type(module) in (nn.Linear, Conv1D) or _is_product(module, inputs, out):
            called.add(name)

    hooks = [
        module.register_forward_hook(partial(note, name=name))
        for name, module in net.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _is_product(module: nn.Linear | Conv1D, inputs: tuple[Tensor, ...], out: object) -> bool:
    """Tell whether what a matrix returned is the plain product. Falcon has a class of its own for it."""
    if not (isinstance(module, nn.Linear) and isinstance(out, Tensor) and inputs):
        return False
    plain = F.linear(inputs[0], module.weight, module.bias)
    return plain.shape == out.shape and torch.allclose(plain, out, rtol=1e-3, atol=1e-5)


def matrices(net: PreTrainedModel, called: set[str]) -> list[str]:
    """Return the matrices that LoRA changes by default: those that are called, without head and experts.

    The names are short ("q_proj") if the short names stand for these matrices and for nothing else.
    """
    head = net.get_output_embeddings()
    avoided = set(UNTOUCHED.get(net.config.get_text_config().model_type, ()))
    if any(name.rpartition(".")[2] == "experts" for name, _ in net.named_modules()):
        avoided |= AS_EXPERTS
    wanted = [
        name
        for name, module in net.named_modules()
        if name in called
        and module is not head
        and ".experts." not in name
        and name.rpartition(".")[2] not in avoided
    ]
    short = {name.rpartition(".")[2] for name in wanted}
    matches = [name for name, _ in net.named_modules() if name.rpartition(".")[2] in short]
    return sorted(short if len(matches) == len(wanted) else wanted)


def _layers(net: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that peft put in place of matrices."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in net.modules() if isinstance(module, BaseTunerLayer)]


AS_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate"}
"""Names that peft reads as tensors of experts or of their router in any model with experts, even if they belong to
ordinary layers."""

UNTOUCHED = dict.fromkeys(("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"), ("out_proj",))
"""Names that peft refuses in a model of this type, because the fused kernels of its layers read the weights by themselves."""

_ROUTED: list[type[Linear]] = []


def _empty() -> nn.Module:
    """Return a routed layer without state, for unpickling in another process."""
    made: type[nn.Module] = _routed()
    return made.__new__(made)


def _routed() -> type[Linear]:
    """Return our subclass of peft's linear layer. It is made at first use, because importing peft takes time."""
    if not _ROUTED:
        from peft.tuners.lora import Linear

        class Routed(Linear):  # type: ignore[misc]
            """Linear layer of peft in which each row uses the adapter that the pass assigns to it."""

            def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
                return _empty, (), self.__dict__

            def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
                y: Tensor = self.base_layer(x, *args, **kwargs)
                for name, rows in route_now():
                    if name not in self.lora_A:
                        continue
                    change = self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
                    if rows is not None and x.shape[-2] != len(rows):
                        raise Unpackable("an adapted matrix sees some of the rows only")
                    y = y + (change if rows is None else change * rows[:, None])
                return y

        _ROUTED.append(Routed)
    return _ROUTED[0]
