"""Where model groups run: in the controller's process, or as Ray actors, one per group. The methods are the same.

    groups = await start_groups({"main": spec}, runtime="local")      # or "ray"
    answer = await groups["main"].generate("team", call)
    await stop_groups(groups)

With Ray, calls, answers, ids, signals and summaries cross; tensors never do. An actor answers any number of calls at
once (it is asynchronous itself) and computes in threads of its own, so groups update side by side. Ray would pin a
worker to one thread: the spec's number is set instead, and where runs must agree bit for bit it must be fixed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..config.group_settings import GroupSpec
from .model_group import ModelGroup

Runtime = Literal["local", "ray"]

METHODS = (
    "generate", "cancel", "seal", "drop", "retire", "samples", "records", "admit", "phase", "values", "prepare", "update", "publish",
    "save", "load", "export", "adopt", "report",
)  # fmt: skip
"""What a group can be asked, wherever it runs."""

CALLS_AT_ONCE = 10_000
OBJECT_STORE = 256 * 2**20
"""Bytes of shared memory for a Ray that is started here: only thin records cross."""


class RayGroup:
    """A model group in an actor: each method of `METHODS` as a coroutine that returns what the group's own returns."""

    def __init__(self, spec: GroupSpec, actor: Any) -> None:
        self.spec, self.actor = spec, actor

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in METHODS:
            raise AttributeError(f"a model group has no {name!r}; it can be asked {', '.join(METHODS)}")
        method = getattr(self.actor, name)

        async def ask(*arguments: Any, **options: Any) -> Any:
            return await _answer(method.remote(*arguments, **options))

        return ask

    async def generate(self, policy: str, call: Any, *arguments: Any, **options: Any) -> Any:
        """As the group's own; and when whoever waits here is cancelled, the request there is too."""
        answer = self.actor.generate.remote(policy, call, *arguments, **options)
        try:
            return await _answer(answer)
        except asyncio.CancelledError:
            self.actor.cancel.remote(call.episode, call.node)
            raise

    async def close(self) -> None:
        """End the actor and give back its memory."""
        self.abandon()

    def abandon(self) -> None:
        """The same, without waiting."""
        import ray

        ray.kill(self.actor)


async def _answer(reference: Any) -> Any:
    """What an actor answers, or the very exception that was raised there."""
    from ray.exceptions import RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from error


async def start_groups(
    specs: Mapping[str, GroupSpec], runtime: Runtime = "local", address: str | None = None
) -> dict[str, Any]:
    """Build all groups. `address` is that of a Ray cluster; without one, a running one is joined, or Ray is started here."""
    if runtime == "local":
        return _start_local(specs)
    if runtime != "ray":
        raise ValueError(f"unknown runtime {runtime!r}: choose local or ray")
    return await _start_ray(specs, address)


async def stop_groups(groups: Mapping[str, Any]) -> None:
    """End all groups."""
    await asyncio.gather(*(group.close() for group in groups.values()))


def _start_local(specs: Mapping[str, GroupSpec]) -> dict[str, Any]:
    threads = {name: spec.threads for name, spec in specs.items()}
    if len(set(threads.values())) > 1:
        raise ValueError(
            f"groups in one process share its threads, but ask for {threads}: give all the same number"
        )
    return {name: ModelGroup(spec) for name, spec in specs.items()}


async def _start_ray(specs: Mapping[str, GroupSpec], address: str | None) -> dict[str, Any]:
    import ray

    if not ray.is_initialized():
        _connect(address)
    wanted, there = sum(spec.gpus for spec in specs.values()), ray.cluster_resources().get("GPU", 0)
    if wanted > there:  # Ray would wait for them for ever
        raise ValueError(f"the groups ask for {wanted:g} GPUs (groups.*.gpus), and Ray has {there:g}")
    groups = {name: RayGroup(spec, _actor(spec)) for name, spec in specs.items()}
    await asyncio.gather(*(group.report() for group in groups.values()))  # all have loaded, or say why not
    return groups


def _connect(address: str | None) -> None:
    """Join the cluster of `address`, of RAY_ADDRESS, or of this machine (`ray start --head`); else start a Ray here."""
    import ray

    here: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "_system_config": {"worker_niceness": 0},  # groups are the work here, not its background
    }
    if address is None:
        try:
            ray.init(log_to_driver=False, **here)
            return
        except ValueError:  # there is a cluster to join, and what it has was settled when it began
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
    remote = ray.remote(ModelGroup).options(
        num_gpus=spec.gpus,
        num_cpus=0,  # groups take turns with the controller on what there is
        max_concurrency=CALLS_AT_ONCE,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
    )
    return remote.remote(replace(spec, threads=threads))
