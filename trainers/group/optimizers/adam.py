"""AdamW for short memory: moments in one byte each, parameters in bfloat16 with stochastic rounding, each by choice.

    bytes a number      parameter  gradient  moments      sum
    torch's AdamW               4         4        8       16
    8-bit moments               4         4      2.03      10
    and bfloat16                2         2      2.03       6

All arithmetic is float32, over some rows at a time, so that little is held twice. Steps are the same on any number of
ranks, because rounding depends on an element's place in the whole tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ....agents.basics.json_types import JsonObject, JsonView
from ...config.group_settings import Learning
from .moments_8bit import BLOCK, FIRST, SECOND
from .stochastic_rounding import bits, share, to_bfloat16

SMALL = 4096
"""Tensors with fewer numbers, and vectors, keep their moments in float32."""
AT_ONCE, AT_ONCE_GPU = 1 << 18, 1 << 25
"""Number of elements that are computed at once: few enough for a processor's caches; a GPU needs few launches."""


def make_optimizer(trained: Sequence[nn.Parameter], settings: Learning, key: str) -> torch.optim.Optimizer:
    """Make the optimizer that the settings describe. The random bits of rounding follow from `key` and the step."""
    how: JsonObject = {
        "lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay,
    }  # fmt: skip
    if settings.moments == "8bit" or settings.parameters == "bfloat16":
        return CompactAdam(trained, eight_bit=settings.moments == "8bit", key=key, **how)
    return torch.optim.AdamW(trained, fused=True, **how)


def fresh(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int = 0) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step, with a count of steps."""
    if isinstance(optimizer, CompactAdam):
        state = optimizer.fresh(parameter)
    else:  # torch's fused kernels need the count on the same device as the parameter
        own = parameter.detach()
        state = {"step": torch.tensor(0.0, device=own.device)}
        state |= {moment: torch.zeros_like(own) for moment in ("exp_avg", "exp_avg_sq")}
    state["step"].fill_(float(steps))
    return state


class CompactAdam(torch.optim.Optimizer):
    """AdamW with moments of 8 bits, and stochastic rounding of parameters that are bfloat16."""

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        *,
        eight_bit: bool,
        key: str = "",
        **settings: float | tuple[float, float],
    ) -> None:
        super().__init__(trained, settings)
        self.eight_bit, self.key = eight_bit, key

    def fresh(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        state, own = {"step": torch.tensor(0.0)}, parameter.detach()
        coded = self.eight_bit and own.dim() > 1 and own.numel() >= SMALL
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = torch.zeros_like(own, dtype=torch.uint8 if coded else torch.float32)
            if coded:
                flat = own.flatten(1)
                blocks = flat.narrow(1, 0, -(-flat.shape[1] // BLOCK))
                state[f"{moment}_scale"] = torch.zeros_like(blocks, dtype=torch.float32)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step."""
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = self.fresh(parameter)
                state = self.state[parameter]
                state["step"] += 1
                key = zlib.crc32(f"{self.key}/{number}/{int(state['step'])}".encode())
                own = {name: _rows(tensor) for name, tensor in state.items() if name != "step"}
                rows, gradient, first = _rows(parameter), _rows(parameter.grad), _first_row(parameter)
                most = AT_ONCE_GPU if rows.device.type == "cuda" else AT_ONCE
                many = max(1, most // max(1, rows.shape[1]))
                for start in range(0, len(rows), many):
                    part = slice(start, start + many)
                    random = bits(
                        key, (first + start) * rows.shape[1], rows[part].numel(), rows.device
                    ).view_as(rows[part])
                    moments = {name: tensor[part] for name, tensor in own.items()}
                    _change(rows[part], gradient[part], moments, int(state["step"]), group, random)

    def load_state_dict(self, state_dict: JsonView) -> None:
        """Load a state. Torch's own method would cast codes to the type of their parameter."""
        super().load_state_dict({**state_dict, "state": {}})
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            own = self.state[every[index]] = self.fresh(every[index])
            for name, tensor in own.items():
                tensor.copy_(state[name])


def check_moments(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Refuse a state whose moments have another precision than the optimizer's."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, kept in state.items():
        own = fresh(optimizer, torch.empty_like(every[index], device="meta"))
        if {n: t.dtype for n, t in own.items()} != {n: t.dtype for n, t in kept.items()}:
            raise ValueError(OTHER_MOMENTS)


OTHER_MOMENTS = (
    "the checkpoint has moments of another precision: set policies.*.learning.moments and .parameters as they were, or "
    "begin a new run from its exported policy"
)


def _change(
    rows: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    step: int,
    how: JsonView,
    random: Tensor,
) -> None:
    """Change some rows of a parameter and of its moments."""
    m, v, g = moments["exp_avg"], moments["exp_avg_sq"], gradient.float()
    coded = "exp_avg_scale" in moments
    first = FIRST.read(m, moments["exp_avg_scale"]) if coded else m
    second = SECOND.read(v, moments["exp_avg_sq_scale"]) if coded else v
    beta, square = how["betas"]
    first.lerp_(g, 1 - beta)
    second.mul_(square).addcmul_(g, g, value=1 - square)
    if coded:
        for name, number, code, place in (("exp_avg", first, FIRST, 16), ("exp_avg_sq", second, SECOND, 24)):
            codes, scale = code.write(number, share(random, place))
            moments[name].copy_(codes)
            moments[f"{name}_scale"].copy_(scale)
    size = (second / (1 - square**step)).sqrt_().add_(how["eps"])
    changed = rows.float() * (1 - how["lr"] * how["weight_decay"])
    changed.addcdiv_(first, size, value=-how["lr"] / (1 - beta**step))
    rows.copy_(to_bfloat16(changed, random) if rows.dtype == torch.bfloat16 else changed)


def _rows(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as rows: a view, unless it is a gradient with another memory layout."""
    own: Tensor = getattr(tensor, "to_local", lambda: tensor)().detach()
    columns = math.prod(own.shape[1:])
    return own.reshape(own.numel() // columns if columns else 0, columns)


def _first_row(tensor: Tensor) -> int:
    """Return the index of this rank's first row in the whole tensor, which is sharded by rows."""
    if not hasattr(tensor, "device_mesh"):
        return 0
    mesh = tensor.device_mesh
    each = math.ceil(len(tensor) / int(mesh.size()))
    return min(len(tensor), int(mesh.get_local_rank()) * each)
