"""Runtimes of model groups: in the controller's process, or as Ray actors, one per group. The methods are the same.

    groups = await start_groups({"main": spec}, runtime="local")      # or "ray"
    answer = await groups["main"].generate("team", call)
    await stop_groups(groups)

With Ray, calls, answers, ids, signals and summaries cross, many in one message (actor.py); tensors never do. An actor is
asynchronous, so it answers any number of calls at once. It computes in threads of its own, so groups update side by side. Ray would give a worker
one thread. The actor sets the number of threads from the spec instead. For runs that must be equal bit for bit, the
spec must fix that number.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...agents.answers import Answer, DecisionId
from ...agents.policies import Call
from ..algorithms.algorithm import Algorithm, Needs
from ..config.group_settings import GroupSpec
from ..controller.statistics.table import Signal, ValueSummary
from .actor import ActorLink, GroupActor
from .contract import METHODS as METHODS
from .contract import Group
from .model_group import ModelGroup
from .sample_store import Sample

Runtime = Literal["local", "ray"]

CALLS_AT_ONCE = 10_000
OBJECT_STORE = 256 * 2**20
"""Bytes of shared memory for a Ray that is started here. They are few, because only thin records cross."""


class RayGroup:
    """A model group in an actor: each method returns what the group's own returns."""

    def __init__(self, spec: GroupSpec, actor: Any) -> None:
        self.spec, self.actor = spec, actor
        self._link: ActorLink | None = None

    @property
    def link(self) -> ActorLink:
        """The link of the event loop that runs now."""
        if self._link is None or self._link.loop is not asyncio.get_running_loop():
            self._link = ActorLink(self.actor)
        return self._link

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self.link.ask(method, *arguments)

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Generate as the group does. When the caller here is cancelled, the request in the actor is
        cancelled too.
        """
        link = self.link
        try:
            answer: Answer = await link.ask("generate", policy, call, temperature, keep)
            return answer
        except asyncio.CancelledError:
            link.tell("cancel", call.episode, call.node)
            raise

    async def cancel(self, episode: str, node: str | None = None) -> int:
        answer: int = await self._ask("cancel", episode, node)
        return answer

    async def seal(self, episode: str, keep: Sequence[str]) -> list[DecisionId]:
        answer: list[DecisionId] = await self._ask("seal", episode, keep)
        return answer

    async def drop(self, episode: str, cause: str) -> int:
        answer: int = await self._ask("drop", episode, cause)
        return answer

    async def retire(self, episodes: Collection[str]) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("retire", episodes)
        return answer

    async def samples(self, ids: Sequence[DecisionId]) -> list[Sample]:
        answer: list[Sample] = await self._ask("samples", ids)
        return answer

    async def records(
        self, ids: Sequence[DecisionId], policy: str, algorithm: Algorithm, signals: Sequence[Signal]
    ) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await self._ask("records", ids, policy, algorithm, signals)
        return answer

    async def admit(self, samples: Sequence[Sample]) -> None:
        await self._ask("admit", samples)

    async def phase(self, name: str) -> None:
        await self._ask("phase", name)

    async def values(
        self,
        policy: str,
        ids: Sequence[DecisionId],
        needs: Needs,
        critic: str | None = None,
        contexts: Mapping[DecisionId, str] | None = None,
    ) -> dict[DecisionId, ValueSummary]:
        answer: dict[DecisionId, ValueSummary] = await self._ask(
            "values", policy, ids, needs, critic, contexts
        )
        return answer

    async def prepare(self, policy: str, ids: Sequence[DecisionId]) -> None:
        await self._ask("prepare", policy, ids)

    async def update(
        self,
        policy: str,
        algorithm: Algorithm,
        signals: Sequence[Signal],
        minibatches: Sequence[Sequence[DecisionId]],
    ) -> dict[str, float]:
        answer: dict[str, float] = await self._ask("update", policy, algorithm, signals, minibatches)
        return answer

    async def publish(self, policy: str | None = None) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("publish", policy)
        return answer

    async def save(self, path: str | Path) -> None:
        await self._ask("save", path)

    async def load(self, path: str | Path) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("load", path)
        return answer

    async def export(self, policy: str, path: str | Path) -> str:
        answer: str = await self._ask("export", policy, path)
        return answer

    async def adopt(self, policy: str, path: str | Path) -> None:
        await self._ask("adopt", policy, path)

    async def report(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask("report")
        return answer

    async def close(self) -> None:
        """Stop the actor and free its memory."""
        self.abandon()

    def abandon(self) -> None:
        """Stop the actor without waiting."""
        import ray

        ray.kill(self.actor)


async def start_groups(
    specs: Mapping[str, GroupSpec], runtime: Runtime = "local", address: str | None = None
) -> dict[str, Group]:
    """Build all groups. `address` is that of a Ray cluster. Without one, a running Ray is joined, or a new
    one is started.
    """
    if runtime == "local":
        return _start_local(specs)
    if runtime != "ray":
        raise ValueError(f"unknown runtime {runtime!r}: choose local or ray")
    return await _start_ray(specs, address)


async def stop_groups(groups: Mapping[str, Group]) -> None:
    """Stop all groups."""
    await asyncio.gather(*(group.close() for group in groups.values()))


def _start_local(specs: Mapping[str, GroupSpec]) -> dict[str, Group]:
    threads = {name: spec.threads for name, spec in specs.items()}
    if len(set(threads.values())) > 1:
        raise ValueError(
            f"groups in one process share its threads, but ask for {threads}: set the same `threads` for all groups"
        )
    return {name: ModelGroup(spec) for name, spec in specs.items()}


async def _start_ray(specs: Mapping[str, GroupSpec], address: str | None) -> dict[str, Group]:
    import ray

    if not ray.is_initialized():
        connect(address)
    needed, available = sum(spec.gpus for spec in specs.values()), ray.cluster_resources().get("GPU", 0)
    if needed > available:  # Ray would wait for the missing GPUs for ever
        raise ValueError(f"the groups ask for {needed:g} GPUs (groups.*.gpus), and Ray has {available:g}")
    groups: dict[str, Group] = {name: RayGroup(spec, _actor(spec)) for name, spec in specs.items()}
    await asyncio.gather(
        *(group.report() for group in groups.values())
    )  # all groups are loaded now, or an error says why not
    return groups


def connect(address: str | None) -> None:
    """Join the cluster of `address`, of RAY_ADDRESS, or of this machine (`ray start --head`). Else start a
    Ray here.
    """
    import ray

    here: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "_system_config": {"worker_niceness": 0},  # groups are the main work here, not background work
    }
    if address is None:
        try:
            ray.init(log_to_driver=False, **here)
            return
        except ValueError:  # a cluster is joined, whose settings are fixed already
            address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError as error:
        raise ConnectionError(
            f"runtime=ray: no cluster answers at {address or 'the address of the last `ray start`'} ({error}). Start "
            "it, or correct RAY_ADDRESS (unset, a Ray is started on this machine)"
        ) from error


def _actor(spec: GroupSpec) -> Any:
    import ray
    import torch

    threads = spec.threads or torch.get_num_threads()
    remote = ray.remote(GroupActor).options(
        num_gpus=spec.gpus,
        num_cpus=0,  # the groups share the cores with the controller
        max_concurrency=CALLS_AT_ONCE,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
    )
    return remote.remote(ModelGroup, replace(spec, threads=threads))
