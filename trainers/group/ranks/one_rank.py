"""One rank: its shards of a group's policies, and their learners. The group calls the same method on all ranks at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ....agents.answers import DecisionId
from ....agents.basics.machine import give_back, keep_little
from ....agents.model.context_split import ContextRanks
from ....agents.model.llama import Llama
from ....agents.model.weights import hf_names, load_decoder, save_tensors
from ...algorithms.algorithm import Algorithm
from ...config.group_settings import GroupSpec
from ...controller import checkpoint
from ...controller.statistics.table import Signal
from ..hosting import learning_parameters
from ..learning.update import Learner
from ..optimizers.adam import OTHER_MOMENTS, fresh
from ..sample_store import Sample
from . import sharded_checkpoint
from .fsdp import RankPeers, spread
from .peaks import Phases, held, peak

PATIENCE = timedelta(minutes=30)
"""Longest wait for the other ranks. The death of one is noticed at once, because its connections close."""

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class Rank:
    """The shards and learners of one rank."""

    def __init__(self, spec: GroupSpec, index: int, store: Store) -> None:
        self.spec, self.index = spec, index
        self.device = rank_device(spec, index)
        keep_little()
        torch.set_num_threads(spec.threads or max(1, (os.cpu_count() or 1) // spec.ranks))
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend, store=store, rank=index, world_size=spec.ranks, timeout=PATIENCE)
        peak(self.device)  # the mark falls
        before = held(self.device)
        self.learners = self._build()
        give_back()  # what loading took
        self.loading = {"began": before, "load": peak(self.device), "loaded": held(self.device)}

    def _build(self) -> dict[str, Learner]:
        own = {name: policy for name, policy in self.spec.policies.items() if policy.learning is not None}
        whole = learning_parameters(self.spec, list(own)) if self.index == 0 else None
        settings = [policy.learning for policy in own.values() if policy.learning is not None]
        mesh = init_device_mesh(self.device.type, (self.spec.ranks,))
        dtypes = {learning.dtype for learning in settings}
        parts = spread(
            whole,
            mesh,
            dtypes.pop() if len(dtypes) == 1 else None,
            any(learning.offload for learning in settings),
        )
        many = self.spec.context_ranks
        peers = RankPeers(self.spec.ranks // many, self.index // many, many)
        if many > 1:
            pair = init_device_mesh(
                self.device.type, (peers.size, many), mesh_dim_names=("micro-batch", "context")
            )
            for own_part in parts:
                own_part.context = ContextRanks(pair.get_group("context"), many, self.index % many)
        inspection = Path(self.spec.folder) / "failed-updates" if self.spec.folder else None
        learners, place = {}, iter(parts)
        for name, policy in own.items():
            parameters, reference = next(place), next(place) if policy.reference else None
            assert policy.learning is not None
            learners[name] = Learner(
                name, parameters, policy.learning, reference=reference, inspection=inspection, peers=peers,
                seed=self.spec.seed,
            )  # fmt: skip
        return learners

    # -- what the group asks --------------------------------------------------------------------------------------

    def update(
        self,
        policy: str,
        algorithm: Algorithm,
        signals: Mapping[DecisionId, Signal],
        minibatches: Sequence[Sequence[Sample]],
    ) -> dict[str, float]:
        """Make this rank's part of the optimizer steps. Return the metrics, which are the same on all ranks."""
        same: dict[DecisionId, Sample] = {}  # a sample of several mini-batches is one object, as in the group
        whole = [[same.setdefault(sample.id, sample) for sample in samples] for samples in minibatches]
        return self.learners[policy].update(algorithm, signals, whole)

    def measure(self, policy: str, what: str, samples: Sequence[Sample]) -> list[NDArray[np.float32]] | None:
        """Compute `proximal`, `reference` or `values` of samples. The first rank returns them, in order."""
        learner = self.learners[policy]
        for sample in samples:
            if what == "proximal":
                sample.proximal_at = -1  # the group sends only samples without them
        {
            "proximal": learner.measure_proximal,
            "reference": learner.measure_reference,
            "values": learner.measure_values,
        }[what](samples)
        return [getattr(sample, what) for sample in samples] if self.index == 0 else None

    def steps(self) -> dict[str, int]:
        """Return optimizer steps by policy."""
        return {name: learner.steps for name, learner in self.learners.items()}

    def rest(self, policy: str) -> None:
        """Free gradients."""
        self.learners[policy].rest()
        give_back()

    @torch.no_grad()
    def weights(
        self, policy: str, names: Sequence[str], dtype: torch.dtype | None
    ) -> dict[str, Tensor] | None:
        """Gather whole tensors of a policy's model; every rank takes part, and the first returns them."""
        own = dict(self.learners[policy].parameters.model.named_parameters())
        gathered: dict[str, Tensor] = {}
        for name in names:
            full = _whole(own[name])
            if self.index == 0:
                gathered[name] = full.to("cpu", dtype or full.dtype)
        return gathered if self.index == 0 else None

    @torch.no_grad()
    def export(self, policy: str, folder: Path, dtype: torch.dtype | None, largest: int) -> OSError | None:
        """Write a policy's model, adapter included, in files of at most `largest` bytes. Every rank takes part in gathering a
        tensor, and the first writes it. Return why it could not.
        """
        parameters = self.learners[policy].parameters
        model = parameters.model
        assert isinstance(model, Llama)
        tensors = (model.played(name, parameters.adapter, _here) for name, _, _ in hf_names(model))
        try:
            if self.index == 0:
                save_tensors(model, tensors, folder, dtype, largest)
        except OSError as error:
            return error
        finally:
            for _ in tensors:  # the others wait for this rank
                pass
        return None

    def save(self, folder: Path) -> dict[str, dict[str, int]]:
        """Write this rank's part of a checkpoint. Return optimizer steps by parameter and policy."""
        return sharded_checkpoint.write(folder, self.learners)

    def load(self, folder: Path, steps: Mapping[str, Mapping[str, int]], taken: Mapping[str, int]) -> None:
        """Continue from a checkpoint of any number of ranks."""
        sharded_checkpoint.read(folder, self.learners, steps)
        for name, learner in self.learners.items():
            learner.steps = taken[name]

    @torch.no_grad()
    def load_whole(self, file: Path) -> None:
        """Continue from the checkpoint of a group without ranks: every rank takes its part of each tensor."""
        with checkpoint.reading(file) as state:
            for name, learner in self.learners.items():
                own, saved = learner.parameters.named(), state[name]
                if own.keys() != saved["parameters"].keys():
                    raise ValueError(f"policy {name!r} has other parameters there")
                for key, parameter in own.items():
                    _take(parameter, saved["parameters"][key])
                learner.steps = saved["learner"]["steps"]
                moments = saved["learner"]["optimiser"]["state"]
                learner.optimiser.state.clear()
                for i, parameter in enumerate(own.values()):
                    if i in moments:
                        learner.optimiser.state[parameter] = _state(learner, parameter, moments[i])

    @torch.no_grad()
    def adopt(self, policy: str, path: Path) -> None:
        """Load the parameters of a model with the same shape."""
        mine = self.learners[policy].parameters.model
        model, own = load_decoder(path, auto=not isinstance(mine, Llama)), dict(mine.named_parameters())
        theirs = dict(model.named_parameters())
        for name in theirs.keys() & own.keys():
            _take(own[name], theirs[name])

    def memory(self) -> dict[str, int]:
        """Count the bytes of this rank's parameters, gradients and optimizer, and the most that its process (on a GPU: its
        tensors) had since the last call. `process` is the process's id.
        """
        sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for learner in self.learners.values():
            for parameter in learner.trained:
                sizes["parameters"] += local(parameter).nbytes
                sizes["gradients"] += 0 if parameter.grad is None else local(parameter.grad).nbytes
                state = learner.optimiser.state.get(parameter, {})
                sizes["optimizer"] += sum(local(t).nbytes for t in state.values())
        return {**sizes, "peak": peak(self.device), "process": os.getpid()}

    def watch(self, policy: str) -> dict[str, int]:
        """Note the peaks of the phases of a policy's updates from now on. Return those of loading, in bytes."""
        peak(self.device)
        self.phases = Phases(self.learners[policy], self.device)
        return self.loading

    def watched(self) -> dict[str, int]:
        """Return the peaks of the phases since `watch`, and what is held now."""
        return {**self.phases.peaks, "after": held(self.device)}


def rank_device(spec: GroupSpec, index: int) -> torch.device:
    """Return the device of a rank: on cuda:K rank i has GPU K + i. An actor sees only its own GPU."""
    device = torch.device(spec.device)
    if device.type != "cuda":
        return device
    return torch.device("cuda", 0 if spec.rank_actors else (device.index or 0) + index)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _here(tensor: Tensor) -> Tensor:
    return _whole(tensor).cpu()


def _take(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    assert isinstance(parameter, DTensor)
    parameter.to_local().copy_(_part(parameter, whole).to_local())


def _part(parameter: DTensor, whole: Tensor) -> DTensor:
    mesh = parameter.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)


def _state(learner: Learner, parameter: Tensor, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of a parameter's moments."""
    own = fresh(learner.optimiser, parameter, int(whole["step"]))
    if {n: t.dtype for n, t in own.items()} != {n: t.dtype for n, t in whole.items()}:
        raise ValueError(OTHER_MOMENTS)
    for name in own.keys() - {"step"}:
        _take(own[name], whole[name])
    return own
