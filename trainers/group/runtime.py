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
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from ..config.group_settings import GroupSpec, sharded
from ..config.schema import RayConfig
from .actor import GroupActor, RayGroup
from .cluster import CALLS_AT_ONCE, check_room, connect, reserve, with_engine_gpus
from .contract import METHODS as METHODS
from .contract import Group
from .model_group import ModelGroup

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")
Runtime = Literal["local", "ray"]


async def start_groups(
    specs: Mapping[str, GroupSpec], runtime: Runtime = "local", settings: RayConfig | None = None
) -> dict[str, Group]:
    """Start all groups. `settings` name a Ray cluster and the placement on it. By default a running Ray is joined, or a
    new one is started.
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
    """Return the class of group for a spec: in one process, or over several ranks."""
    if not sharded(spec):
        return ModelGroup
    from .ranks.group import RankedGroup

    return RankedGroup


async def _start_ray(specs: Mapping[str, GroupSpec], settings: RayConfig) -> dict[str, Group]:
    connect(settings)
    specs = with_engine_gpus(specs)
    check_room(specs, settings.strategy)
    places = await reserve(specs, settings)
    groups: dict[str, Group] = {}
    started: list[RayGroup] = []
    try:
        for index, (name, spec) in enumerate(specs.items()):
            actor = _actor(spec, places.of(name))
            last = index == len(specs) - 1  # the last group to close releases the placement
            started.append(RayGroup(spec, actor, places.reserved if last else None))
            groups[name] = started[-1]
        await asyncio.gather(*(group.begin() for group in started))
    except BaseException:
        for group in groups.values():
            group.abandon()  # no actor stays behind
        raise
    return groups


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
