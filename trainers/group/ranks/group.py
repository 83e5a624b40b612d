"""A group whose learners live in ranks: engines and samples here, shards there, the same face.

What a learner of a `ModelGroup` does in this process, `RemoteLearner` asks of all ranks. Models here are hollow: names
and shapes. Weights come from the ranks when they are published or exported, some at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....agents.answers import DecisionId
from ....agents.model import tensor_files
from ....agents.model.decoder import Decoder
from ....agents.model.llama import Llama
from ....agents.model.weights import save_adapter, save_settings
from ....agents.text.tokenizing import Tokenizer
from ...algorithms.algorithm import Algorithm
from ...config.group_settings import GroupSpec
from ...controller import checkpoint
from ...controller.checkpoint import Saved
from ...controller.statistics.table import Signal
from ..contract import GroupReport
from ..hosting import Hosted, export_dtype, host, same_shape, write_policy
from ..learning.parameters import Parameters
from ..learning.update import no_reference
from ..model_group import ModelGroup
from ..sample_store import Sample
from .forked import RankProcesses
from .fsdp import hollow

AT_ONCE = 1 << 28
"""Largest number of elements in one message from the ranks: 1 GiB in float32."""


class Ranks(Protocol):
    """All ranks of a group, on any machine."""

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every rank. Return the result of each."""
        ...

    def close(self) -> None:
        """End all ranks in any state."""
        ...


class RemoteLearner:
    """The learner of one policy, over all ranks."""

    def __init__(
        self, policy: str, parameters: Parameters, ranks: Ranks, reference: bool, dtype: torch.dtype
    ) -> None:
        self.policy, self.parameters, self.ranks, self.dtype = policy, parameters, ranks, dtype
        self.has_reference = reference
        self.steps = 0

    def update(
        self,
        algorithm: Algorithm,
        signals: Mapping[DecisionId, Signal],
        minibatches: Sequence[Sequence[Sample]],
    ) -> dict[str, float]:
        """Make the optimizer steps on all ranks. Return their common metrics."""
        ids = {sample.id for samples in minibatches for sample in samples}
        own = {id: signal for id, signal in signals.items() if id in ids}
        try:
            metrics: dict[str, float] = self.ranks.call("update", self.policy, algorithm, own, minibatches)[0]
        finally:
            self.steps = self._taken()
        return metrics

    def _taken(self) -> int:
        try:
            return int(self.ranks.call("steps")[0][self.policy])
        except RuntimeError:  # the ranks have ended, and the error was raised before
            return self.steps

    def measure_proximal(self, samples: Sequence[Sample]) -> None:
        """Compute `proximal` of samples without it."""
        missing = [sample for sample in samples if sample.proximal_at != self.steps]
        for sample, logp in zip(missing, self._measure("proximal", missing), strict=True):
            sample.proximal, sample.proximal_at = logp, self.steps

    def measure_reference(self, samples: Sequence[Sample]) -> None:
        """Compute `reference` of samples without it."""
        if not self.has_reference:
            raise no_reference(self.policy)
        missing = [sample for sample in samples if sample.reference is None]
        for sample, logp in zip(missing, self._measure("reference", missing), strict=True):
            sample.reference = logp

    def measure_values(self, samples: Sequence[Sample]) -> None:
        """Compute `values` of a critic."""
        for sample, values in zip(samples, self._measure("values", samples), strict=True):
            sample.values = values

    def _measure(self, what: str, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        measured: list[NDArray[np.float32]] = (
            self.ranks.call("measure", self.policy, what, list(samples))[0] if samples else []
        )
        return measured

    def rest(self) -> None:
        """Free gradients on all ranks."""
        self.ranks.call("rest", self.policy)

    def published(self) -> Decoder:
        """Return the present model, in the engine's precision. For an adapter, only the adapter is filled."""
        model, adapter = self.parameters.model, self.parameters.adapter
        names = list(dict(model.named_parameters()) if adapter is None else model.learnable(adapter))
        return filled(self.parameters.model, dict(self.weights(names, self.dtype)))

    def weights(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, gathered some at a time."""
        shapes = dict(self.parameters.model.named_parameters())
        part: list[str] = []
        for i, name in enumerate(names):
            part.append(name)
            if i == len(names) - 1 or sum(shapes[n].numel() for n in part) >= AT_ONCE:
                yield from self.ranks.call("weights", self.policy, part, dtype)[0].items()
                part = []


def filled(model: Decoder, tensors: Mapping[str, Tensor]) -> Decoder:
    """Return a copy of a hollow model with these tensors in their places."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(tensors.get(name, p), requires_grad=False) for name, p in model.named_parameters()
    }
    return copy.deepcopy(model, memo)


class RankedGroup(ModelGroup):
    """A model group over many ranks."""

    largest_file = tensor_files.LARGEST
    """Bytes of one file of an exported model."""

    def __init__(self, spec: GroupSpec) -> None:
        self.ranks = _start(spec)  # the ranks load at the same time
        try:
            super().__init__(spec)
        except BaseException:
            self.ranks.close()
            raise

    def _host(self, spec: GroupSpec) -> tuple[dict[str, Hosted], Tokenizer]:
        hosted, tokenizer = host(spec, learn=False)
        learning = [policy for policy in hosted.values() if policy.spec.learning is not None]
        frozen = {id(policy.parameters.model) for policy in hosted.values() if policy.spec.learning is None}
        for policy, empty in zip(learning, _hollow([policy.parameters for policy in learning]), strict=True):
            engine = policy.engine
            dtype = getattr(engine, "dtype", torch.float32)
            if id(policy.parameters.model) not in frozen:
                policy.parameters = empty
            policy.learner = RemoteLearner(policy.name, empty, self.ranks, policy.spec.reference, dtype)
        return hosted, tokenizer

    # -- keeping --------------------------------------------------------------------------------------------------

    def _kept(self, hosted: Hosted) -> dict[str, object]:
        if not isinstance(hosted.learner, RemoteLearner):
            return super()._kept(hosted)
        return {"parameters": None, "learner": {"steps": hosted.learner.steps}, "version": hosted.version}

    def _keep_more(self, folder: Path) -> None:
        steps = self.ranks.call("save", folder / "shards")[0]
        checkpoint.write_json(folder / "shards.json", steps)

    def _restore(self, path: Path, state: Saved) -> None:
        remote = {name: h.learner for name, h in self.hosted.items() if isinstance(h.learner, RemoteLearner)}
        if (path / "shards").is_dir():
            with checkpoint.reading(path / "shards.json") as steps:
                taken = {name: int(state[name]["learner"]["steps"]) for name in remote}
                self.ranks.call("load", path / "shards", steps, taken)
        else:
            self.ranks.call("load_whole", path / "policies.pt")
        for name, learner in remote.items():
            learner.steps = int(state[name]["learner"]["steps"])
        for name, hosted in self.hosted.items():
            hosted.version = state[name]["version"]
            if hosted.learner is None:
                hosted.parameters.load_state_dict(state[name]["parameters"])

    def _export(self, hosted: Hosted, path: Path, tokenizer: Tokenizer) -> Path:
        """Write a policy. The first rank writes the tensors of our own decoder one at a time, and no process holds the
        whole model. A model that transformers writes, or with adapters by role, is gathered here.
        """
        learner = hosted.learner
        if not isinstance(learner, RemoteLearner):
            return super()._export(hosted, path, tokenizer)
        model, adapter = learner.parameters.model, learner.parameters.adapter
        dtype = export_dtype(self.spec, model)
        if not isinstance(model, Llama) or learner.parameters.roles:
            whole = filled(model, dict(learner.weights(list(dict(model.named_parameters())))))
            return write_policy(learner.parameters, whole, path, tokenizer, dtype)
        with checkpoint.writing(path) as folder:
            if adapter is not None:
                own = dict(learner.weights(list(model.learnable(adapter))))
                save_adapter(filled(model, own), adapter, folder / "adapter")
            save_settings(model, folder, dtype)
            tokenizer.save_pretrained(folder)
            if failure := self.ranks.call("export", hosted.name, folder, dtype, self.largest_file)[0]:
                raise failure
        return path

    def _take(self, hosted: Hosted, path: Path) -> None:
        same_shape(hosted, path)
        self.ranks.call("adopt", hosted.name, path)

    async def report(self) -> GroupReport:
        """Report as any group, and the memory of each rank."""
        return {**await super().report(), "ranks": await self._thread(lambda: self.ranks.call("memory"))}

    async def close(self) -> None:
        """End the ranks too."""
        await super().close()
        await self._thread(self.ranks.close)

    def abandon(self) -> None:
        """End the ranks too, in any state."""
        super().abandon()
        self.ranks.close()


def _start(spec: GroupSpec) -> Ranks:
    if spec.rank_actors:
        from .rank_actors import RankActors

        return RankActors(spec)
    return RankProcesses(spec)


def _hollow(parameters: list[Parameters]) -> list[Parameters]:
    """Hollow models, whose buffers stay: they are small, and no checkpoint of ranks has them."""
    empty = hollow(parameters)
    for own, bare in zip(parameters, empty, strict=True):
        for name, buffer in own.model.named_buffers():
            place, _, last = name.rpartition(".")
            bare.model.get_submodule(place)._buffers[last] = buffer  # it is saved as it was before
    return empty
