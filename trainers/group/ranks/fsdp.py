"""Models into shards: torch's FSDP2 (`fully_shard`) over all ranks of a group.

Rank 0 loads the models. The others get their structure without weights, and then their own part of each tensor, one
tensor at a time. So no rank but the first ever holds a whole model, and the first in the CPU's memory alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ....agents.model.llama import Llama
from ....agents.model.vocabulary_split import VocabularyRanks
from ..learning.dealing import Peers
from ..learning.parameters import Parameters

T = TypeVar("T")


@dataclass(frozen=True)
class RankPeers(Peers):
    """The ranks of a process group."""

    context: int = 1
    """Neighbouring ranks that share each micro-batch: they are one peer, and know the same."""

    def gather(self, own: T) -> list[T]:
        """Exchange plain data through the CPU."""
        everyone: list[T | None] = [None] * (self.size * self.context)
        dist.all_gather_object(everyone, own)
        return everyone[:: self.context]  # type: ignore[return-value]


def hollow(parameters: Sequence[Parameters]) -> list[Parameters]:
    """Return the structure of some policies without weights. Models that they share stay shared."""
    memo: dict[int, Tensor] = {}
    for own in parameters:
        for module in (own.model, *([own.head] if own.head is not None else [])):
            memo |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
            memo |= {id(b): b.to("meta") for b in module.buffers()}
    return [copy.deepcopy(own, memo) for own in parameters]


def spread(
    whole: Sequence[Parameters] | None, mesh: DeviceMesh, dtype: torch.dtype | None, offload: bool
) -> list[Parameters]:
    """Shard policies over the ranks. Rank 0 passes them as `whole`, the others pass None. Every rank gets all policies,
    with its part of every tensor. `dtype` is that of the computation; masters keep their own.
    """
    box: list[list[Parameters] | None] = [None if whole is None else hollow(whole)]
    dist.broadcast_object_list(box, src=0)
    parts = box[0]
    assert parts is not None
    for i, own in enumerate(parts):
        if own.head is not None:
            own.model.add_module(f"value_head_{i}", own.head)
    if whole is not None:  # the same names
        for i, own in enumerate(whole):
            if own.head is not None:
                own.model.add_module(f"value_head_{i}", own.head)
    for i, model in _models(parts):
        cut(model, mesh, dtype, offload)
        model.to_empty(device="cpu" if offload else mesh.device_type)
        _fill(model, None if whole is None else whole[i].model, mesh)
    return parts


def _models(parameters: Sequence[Parameters]) -> Iterator[tuple[int, nn.Module]]:
    """Each model once, with the number of the first policy on it."""
    seen: set[int] = set()
    for i, own in enumerate(parameters):
        if id(own.model) not in seen:
            seen.add(id(own.model))
            yield i, own.model


def cut(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None, offload: bool) -> None:
    """Shard a model's parameters, layer by layer."""
    rest: OffloadPolicy = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    )
    # parameters are float32, so only another precision needs a cast before they are gathered
    cast = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=cast, offload_policy=rest)
    for name, head in model.named_children():
        if name.startswith("value_head_"):  # values are computed in float32
            fully_shard(head, mesh=mesh, mp_policy=plain, offload_policy=rest)
    apart = set() if offload else share_vocabulary(model, mesh)
    fully_shard(model, mesh=mesh, mp_policy=cast, offload_policy=rest, ignored_params=apart)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # losses are shares of global denominators, so gradients add up
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def share_vocabulary(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Deal out the rows of our own decoder's embedding and head, which no rank gathers in a pass. Return both."""
    ranks, index = mesh.size(), mesh.get_local_rank()
    if not isinstance(model, Llama) or ranks == 1:
        return set()
    words = -(-model.shape.vocab // ranks)
    if words * (ranks - 1) >= model.shape.vocab:  # one would have none
        return set()
    model.vocabulary = VocabularyRanks(ranks, index, words)
    apart: set[nn.Parameter] = set()
    for name in ("embed", "untied_head"):
        if (whole := getattr(model, name)) is not None:
            own = whole.detach()[index * words : (index + 1) * words]
            part = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            setattr(model, name, parameter := nn.Parameter(part, whole.requires_grad))
            apart.add(parameter)
    return apart


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder: the list of modules that holds most of its parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[]))


@torch.no_grad()
def _fill(model: nn.Module, whole: nn.Module | None, mesh: DeviceMesh) -> None:
    """Give every rank its part of rank 0's tensors, one at a time."""
    source = {} if whole is None else dict(whole.named_parameters())
    device = torch.device(mesh.device_type)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full = (
            source[name].to(device)
            if source
            else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        )
        part = distribute_tensor(full, mesh, parameter.placements)
        parameter.to_local().copy_(part.to_local())
    buffers = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        full = buffers[name].to(device) if buffers else buffer.to(device)
        dist.broadcast(full, src=0)
        buffer.copy_(full)
