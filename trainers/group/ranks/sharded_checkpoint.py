"""Checkpoints of shards: torch's distributed checkpoints in safetensors files, read by any number of ranks.

Each rank writes its own parts. A rank that reads takes from the files what its own parts need, whoever wrote them. The
files hold tensors and plain names, so reading them runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...controller import checkpoint
from ...controller.checkpoint import Saved
from ..learning.update import Learner
from ..optimizers.adam import OTHER_MOMENTS, fresh


def write(folder: Path, learners: Mapping[str, Learner]) -> dict[str, dict[str, int]]:
    """Write parameters and moments. Return optimizer steps by parameter and policy; every rank calls this."""
    tensors: dict[str, Tensor] = {}
    for policy, learner in learners.items():
        tensors |= _tensors(policy, learner)
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    return {policy: _steps(learner) for policy, learner in learners.items()}


def read(folder: Path, learners: Mapping[str, Learner], steps: Mapping[str, Mapping[str, int]]) -> None:
    """Read the result of `write` into learners of the same policies, sharded or whole."""
    tensors: dict[str, Tensor] = {}
    for policy, learner in learners.items():
        own = learner.parameters.named()
        learner.optimiser.state.clear()
        for name, count in steps[policy].items():
            learner.optimiser.state[own[name]] = fresh(learner.optimiser, own[name], count)
        tensors |= _tensors(policy, learner)
    reader = HuggingFaceStorageReader(str(folder))
    written = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        kept = getattr(written.get(name), "properties", None)
        if kept is None or ("/parameters/" not in name and kept.dtype != tensor.dtype):
            raise ValueError(f"{name}: {OTHER_MOMENTS}")
    load(tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized())


def resume(folder: Path, learners: Mapping[str, Learner], state: Saved) -> None:
    """Read the checkpoint of a group with several ranks in one process. `state` is the stored state of each policy."""
    with checkpoint.reading(folder / "shards.json") as steps:
        read(folder / "shards", learners, steps)
    for name, learner in learners.items():
        learner.steps = state[name]["learner"]["steps"]


def _tensors(policy: str, learner: Learner) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.parameters.named().items():
        tensors[f"{policy}/parameters/{name}"] = parameter.detach()
        state = learner.optimiser.state.get(parameter, {})
        tensors |= {f"{policy}/{moment}/{name}": state[moment] for moment in state if moment != "step"}
    return tensors


def _steps(learner: Learner) -> dict[str, int]:
    own = learner.parameters.named()
    return {n: int(state["step"]) for n, p in own.items() if (state := learner.optimiser.state.get(p))}
