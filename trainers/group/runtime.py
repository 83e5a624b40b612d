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
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...agents.answers import Answer, DecisionId
from ...agents.basics.failures import GroupLost
from ...agents.policies import Call
from ..algorithms.algorithm import Algorithm, Needs
from ..config.group_settings import GroupSpec, sharded
from ..config.schema import RayConfig
from ..controller.statistics.table import Signal, ValueSummary
from .actor import ActorLink, ActorPeer, GroupActor, check_versions
from .cluster import CALLS_AT_ONCE, beside, check_room, connect, placement, release, reserve
from .contract import METHODS as METHODS
from .contract import Group, GroupReport, Peer
from .model_group import ModelGroup
from .sample_store import Sample, SampleRow

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")
Runtime = Literal["local", "ray"]


class RayGroup:
    """A model group in an actor: each method returns what the group's own returns."""

    def __init__(self, spec: GroupSpec, actor: ActorHandle, reserved: PlacementGroup | None = None) -> None:
        self.spec, self.actor, self.reserved = spec, actor, reserved
        self._link: ActorLink | None = None

    @property
    def link(self) -> ActorLink:
        """The link of the event loop that runs now."""
        if self._link is None or self._link.loop is not asyncio.get_running_loop():
            self._link = ActorLink(self.actor)
        return self._link

    async def _ask(self, method: str, *arguments: object) -> Any:
        return await self._lost(self.link.ask(method, *arguments))

    async def _lost(self, answer: Awaitable[T]) -> T:
        """Await an answer. An actor that is gone is a failure with a name of its own."""
        from ray.exceptions import RayActorError

        try:
            return await answer
        except RayActorError as error:
            cause = str(error).strip().splitlines()[0]
            raise GroupLost(f"group {self.spec.name!r} is gone: {cause}") from error

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Generate as the group does. When the caller here is cancelled, the request in the actor is
        cancelled too.
        """
        link = self.link
        try:
            answer: Answer = await self._lost(link.ask("generate", policy, call, temperature, keep))
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

    async def send(self, ids: Sequence[DecisionId], peer: Peer, news: bool = False) -> None:
        await self._ask("send", ids, peer, news)

    @property
    def peer(self) -> Peer:
        return ActorPeer(self.actor, self.spec.name)

    async def records(
        self, ids: Sequence[DecisionId], policy: str, algorithm: Algorithm, signals: Sequence[Signal]
    ) -> list[SampleRow]:
        answer: list[SampleRow] = await self._ask("records", ids, policy, algorithm, signals)
        return answer

    async def admit(self, samples: Sequence[Sample]) -> None:
        await self._ask("admit", samples)

    async def phase(self, name: str) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("phase", name)
        return answer

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

    async def report(self) -> GroupReport:
        answer: GroupReport = await self._ask("report")
        return answer

    async def close(self) -> None:
        """Stop the actor and free its memory."""
        self.abandon()

    def abandon(self) -> None:
        """Stop the actor without waiting, and give its place back."""
        import ray

        ray.kill(self.actor)
        release(self.reserved)
        self.reserved = None


async def start_groups(
    specs: Mapping[str, GroupSpec], runtime: Runtime = "local", settings: RayConfig | None = None
) -> dict[str, Group]:
    """Build all groups. `settings` name a Ray cluster and the placement on it; by default a running Ray is joined, or a
    new one started.
    """
    if runtime == "local":
        return _start_local(specs)
    if runtime != "ray":
        raise ValueError(f"unknown runtime {runtime!r}: choose local or ray")
    return await _start_ray(specs, settings or RayConfig())


async def stop_groups(groups: Mapping[str, Group]) -> None:
    """Stop all groups."""
    await asyncio.gather(*(group.close() for group in groups.values()))


def _start_local(specs: Mapping[str, GroupSpec]) -> dict[str, Group]:
    threads = {name: spec.threads for name, spec in specs.items()}
    if len(set(threads.values())) > 1:
        raise ValueError(
            f"groups in one process share its threads, but ask for {threads}: set the same `threads` for all groups"
        )
    groups: dict[str, Group] = {}
    try:
        for name, spec in specs.items():
            groups[name] = group_class(spec)(spec)
    except BaseException:
        for group in groups.values():
            group.abandon()  # no process stays behind
        raise
    return groups


def group_class(spec: GroupSpec) -> type[ModelGroup]:
    """Return the kind of group that a spec asks for: in one process, or over many ranks."""
    if not sharded(spec):
        return ModelGroup
    from .ranks.group import RankedGroup

    return RankedGroup


async def _start_ray(specs: Mapping[str, GroupSpec], settings: RayConfig) -> dict[str, Group]:
    connect(settings)
    check_room(specs, sum(spec.gpus + beside(spec) for spec in specs.values()))
    reserved = await reserve(specs, settings)
    groups: dict[str, Group] = {}
    try:
        begun = []
        for index, (name, spec) in enumerate(specs.items()):
            actor = _actor(spec, placement(reserved, index))
            last = index == len(specs) - 1  # the last to be closed gives the placement back
            groups[name] = RayGroup(spec, actor, reserved if last else None)
            begun.append(_begun(name, actor))
        await asyncio.gather(*begun)
    except BaseException:
        for group in groups.values():
            group.abandon()  # no actor stays behind
        raise
    return groups


async def _begun(name: str, actor: ActorHandle) -> None:
    """Wait until a group stands. Its node must compute with what this process computes with."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        there = await actor.begin.remote()
    except RayActorError as error:
        cause = str(error).strip().splitlines()[0]
        raise GroupLost(f"group {name!r} is gone while it starts: {cause}") from error
    except RayTaskError as error:
        raise error.cause from error
    check_versions(f"group {name!r}", there)


def _actor(spec: GroupSpec, place: Mapping[str, object]) -> ActorHandle:
    import ray
    import torch

    threads = spec.threads or torch.get_num_threads()
    remote = ray.remote(GroupActor).options(
        num_gpus=spec.gpus,
        num_cpus=spec.cpus or (0.001 if place else 0),  # 0: the groups share the cores with the controller
        max_concurrency=CALLS_AT_ONCE,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        **place,
    )
    return remote.remote(group_class(spec), replace(spec, threads=threads, rank_actors=True))
