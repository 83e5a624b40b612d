"""A replica in a Ray actor: requests travel in batches over the star's link, weights through Ray's object store.

A publish puts one copy of the weights into the store; all replicas of a node read that copy. The actor holds the model
twice: as it was published, and in its engine.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from ....agents.basics.failures import ReplicaLost
from ....agents.basics.threads import contained
from ....agents.engines.engine import ENGINES, Ability, EngineOrder
from ....agents.engines.generation import Generation, Versioned
from ....agents.engines.sampling import SamplingParams
from ....agents.model.decoder import Decoder
from ...config.group_settings import GroupSpec, replica_gpus
from ..actor import ActorLink, GroupActor, check_versions
from ..cluster import CALLS_AT_ONCE

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

PackedWeights = Mapping[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]
"""Weights by name: their type, shape and bytes."""


def packed(model: Decoder, adapter: str | None) -> ObjectRef:
    """Put a model's weights, or one adapter's alone, into the object store. Return the reference."""
    import ray

    tensors = dict(model.named_parameters()) if adapter is None else model.learnable(adapter)
    return ray.put({name: _bytes(tensor) for name, tensor in tensors.items()})


def _bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
    plain = tensor.detach().cpu().contiguous()
    kind = str(plain.dtype).removeprefix("torch.")
    return kind, tuple(plain.shape), plain.flatten().view(torch.uint8).numpy()


@torch.no_grad()
def unpack(weights: PackedWeights, model: Decoder) -> None:
    """Copy weights into a model's own tensors."""
    own = dict(model.named_parameters())
    for name, (kind, shape, data) in weights.items():
        tensor = torch.from_numpy(np.array(data)).view(getattr(torch, kind)).view(shape)
        own[name].copy_(tensor)


class ReplicaFacts(TypedDict):
    """Facts about an engine that do not change."""

    stop_ids: frozenset[int]
    context: int
    cannot: dict[Ability, str]
    sleeps: bool


class EngineHost:
    """An engine in another process, and the model whose weights are published to it."""

    def __init__(self, name: str, order: EngineOrder, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model, self.device = order.model, torch.device(device)
        self.engine = ENGINES.find(name)(replace(order, model=self._there()))
        self.requests: dict[int, asyncio.Task[Generation]] = {}

    def _there(self) -> Decoder:
        return self.model.to(self.device)

    async def generate(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        key: tuple[str, str] | None,
        adapter: str | None,
    ) -> Generation:
        """Answer one prompt. `number` names the request for `cancel`."""
        task = asyncio.ensure_future(self.engine.agenerate(prompt, params, key, adapter))
        self.requests[number] = task
        try:
            return await task
        finally:
            del self.requests[number]

    async def cancel(self, number: int) -> None:
        """Cancel a request."""
        if number in self.requests:
            self.requests[number].cancel()

    def publish(self, weights: PackedWeights, version: int, adapter: str | None) -> None:
        """Copy new weights."""
        unpack(weights, self.model)
        self.engine.publish(self.model, version, adapter)

    def about(self) -> ReplicaFacts:
        """Return the facts about the engine that do not change."""
        engine = self.engine
        return {
            "stop_ids": engine.stop_ids, "context": engine.context, "cannot": dict(engine.cannot),
            "sleeps": getattr(engine, "sleeps", False),
        }  # fmt: skip


class ReplicaActor(GroupActor):
    """Actor's end: an engine that is called through a link. Rare calls do not use the link."""

    async def rarely(self, method: str, *arguments: object) -> object:
        """Make a call that changes the engine, in a thread, so that requests continue."""
        return await asyncio.to_thread(contained(self._rarely), method, *arguments)

    def _rarely(self, method: str, *arguments: object) -> object:
        host = self.group
        return getattr(host if hasattr(host, method) else host.engine, method)(*arguments)


class DistantEngine(Versioned):
    """Link to a replica in an actor. The router uses it as an engine."""

    def __init__(self, actor: ActorHandle) -> None:
        super().__init__()
        self.actor = actor
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._link: ActorLink | None = None
        about: ReplicaFacts = self._ask("about")
        self.stop_ids, self.context = about["stop_ids"], about["context"]
        self.cannot: Mapping[Ability, str] = about["cannot"]
        self.sleeps = about["sleeps"]

    @property
    def link(self) -> ActorLink:
        """Return the link of the running event loop."""
        if self._link is None or self._link.loop is not asyncio.get_running_loop():
            self._link = ActorLink(self.actor)
        return self._link

    async def agenerate(
        self,
        prompt: list[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Answer one prompt. Cancelling the task cancels the request in the actor."""
        from ray.exceptions import RayActorError

        link, number = self.link, next(self._numbers)
        try:
            generation: Generation = await link.ask("generate", number, prompt, params, key, adapter)
        except RayActorError as error:
            raise ReplicaLost(str(error).strip().splitlines()[0]) from error
        except asyncio.CancelledError:
            link.tell("cancel", number)
            raise
        read = len(generation.prompt_ids) - generation.cached
        self.counts.update(
            prompts=1, tokens_read=read, tokens_copied=generation.cached, tokens_spoken=len(generation.ids)
        )
        self.counts[f"finish_{generation.finish_reason}"] += 1
        return generation

    def publish(self, model: Decoder | ObjectRef, version: int, adapter: str | None = None) -> None:
        """Copy the weights that `packed` put into the store."""
        self._ask("publish", model, version, adapter)
        self._took_over(version, adapter)

    def fix_shapes(self) -> None:
        """Give the same bits for the same request from now on."""
        self._ask("fix_shapes")

    def sleep(self) -> None:
        """Free memory until `wake`."""
        self._ask("sleep")

    def wake(self) -> None:
        """Take the memory back."""
        self._ask("wake")

    def close(self) -> None:
        """Stop the actor."""
        import ray

        if ray.is_initialized():
            ray.kill(self.actor)

    def _ask(self, method: str, *arguments: object) -> Any:
        """Wait for an answer, in a thread that is not the event loop's."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(self.actor.rarely.remote(method, *arguments))
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise ReplicaLost(str(error).strip().splitlines()[0]) from error


def _begun(actors: list[ActorHandle]) -> list[dict[str, str]]:
    """Wait until the replicas have started. Return the versions of their libraries, or raise the error of one that
    could not start.
    """
    import ray
    from ray.exceptions import RayTaskError

    try:
        answers: list[dict[str, str]] = ray.get([actor.begin.remote() for actor in actors])
        return answers
    except RayTaskError as error:
        raise error.cause from error


def start(spec: GroupSpec, order: EngineOrder) -> list[DistantEngine]:
    """Start all replicas except the first, at the same time. Each has the GPUs of its engine if the group is on GPUs."""
    import ray

    gpus = replica_gpus(spec)
    device = "cuda" if gpus and spec.engine != "vllm" else "cpu"  # vLLM fills a GPU with its own copy
    threads = spec.threads or 1
    made = ray.remote(ReplicaActor).options(
        num_gpus=float(gpus),
        num_cpus=0,
        max_concurrency=CALLS_AT_ONCE,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
    )
    # if it is a learner's model, it stays on its device
    model = (
        order.model
        if next(order.model.parameters()).device.type == "cpu"
        else copy.deepcopy(order.model).to("cpu")
    )
    shared = ray.put(replace(order, model=model))
    actors = [made.remote(EngineHost, spec.engine, shared, device, threads) for _ in range(1, spec.replicas)]
    try:
        for there in _begun(actors):
            check_versions(f"groups.{spec.name}.replicas: a replica", there)
        return [DistantEngine(actor) for actor in actors]
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
