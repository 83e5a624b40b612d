"""Replicas of an engine as one engine: the interface for a group, with a router behind it.

The first replica lives in the group's own process, on the group's device. The others live in Ray actors, one GPU each,
where the group does (`runtime=ray`), else in this process: on device cuda:K they take cuda:K+1, K+2 …

All replicas get each publish before it returns, so their versions agree. In deterministic mode an engine's reply does
not depend on what it is generated beside, so one replica and several give the same bits. A replica that dies is told
and counted; its requests go to the others. When none is left, the group is lost.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ....agents.basics.failures import GroupLost, ReplicaLost
from ....agents.engines.engine import ENGINES, Ability, Engine, EngineOrder
from ....agents.engines.generation import Generation, Versioned
from ....agents.engines.sampling import SamplingParams
from ....agents.model.decoder import Decoder
from ...config.group_settings import GroupSpec
from .router import Router

if TYPE_CHECKING:
    from ray import ObjectRef


class ReplicatedEngine(Versioned):
    """Several engines with the same weights, and a router over them."""

    def __init__(
        self,
        name: str,
        members: Sequence[Engine],
        room: int,
        pack: Callable[[Decoder, str | None], ObjectRef] | None = None,
    ) -> None:
        """Make the engine. `room` is the number of prompt tokens that one replica stores. `pack` converts a model once
        into the form that replicas in other processes receive.
        """
        super().__init__()
        self.name, self.members, self.pack = name, list(members), pack
        self.router = Router(len(members), room)
        first = members[0]
        self.stop_ids, self.context = first.stop_ids, first.context
        self.dtype = getattr(first, "dtype", torch.float32)
        self.cannot: Mapping[Ability, str] = first.cannot
        self.own: Counter[str] = Counter(replicas_lost=0, requests_moved=0)

    @property
    def counts(self) -> Counter[str]:
        """Return the counters of the router and of all replicas, dead ones included."""
        total = Counter({**self.own, **self.router.counts, "replicas": len(self.router.open)})
        for member in self.members:
            total.update(member.counts)
        return total

    @property
    def alive(self) -> list[Engine]:
        """Return the replicas that are alive."""
        return [self.members[replica] for replica in self.router.open]

    @property
    def sleeps(self) -> bool:
        """Tell whether the replicas give their memory to the learner."""
        return all(getattr(member, "sleeps", False) for member in self.alive)

    async def agenerate(
        self,
        prompt: list[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Answer one prompt by one of the replicas. If that replica dies, another one answers."""
        while True:
            try:
                replica = self.router.choose(prompt, adapter)
            except LookupError:
                raise GroupLost(
                    f"group {self.name!r}: all its {len(self.members)} replicas are gone"
                ) from None
            try:
                return await self.members[replica].agenerate(prompt, params, key, adapter)
            except ReplicaLost as error:
                self._lose(replica, error)
                self.own["requests_moved"] += 1
            finally:
                self.router.finished(replica)

    def publish(self, model: Decoder, version: int, adapter: str | None = None) -> None:
        """Publish a model's weights, or those of one adapter alone, to all replicas. All have them when this
        returns.
        """
        self.router.clear()
        packed = None if self.pack is None else self.pack(model, adapter)

        def take(member: Engine) -> None:
            weights = model if packed is None or member is self.members[0] else packed
            member.publish(weights, version, adapter)

        self._all(take)
        self._took_over(version, adapter)
        versions = {replica: self._version(self.members[replica], adapter) for replica in self.router.open}
        if set(versions.values()) != {version}:
            raise RuntimeError(
                f"group {self.name!r}: its replicas have versions {versions}, not all {version}"
            )

    def fix_shapes(self) -> None:
        """Give the same bits for the same request from now on."""
        self._all(lambda member: member.fix_shapes())

    def sleep(self) -> None:
        """Free the memory of all replicas for the learner."""
        self._all(lambda member: member.sleep())  # type: ignore[attr-defined]

    def wake(self) -> None:
        """Take the memory back."""
        self._all(lambda member: member.wake())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop all replicas."""
        for member in self.members:
            member.close()

    def _all(self, work: Callable[[Engine], None]) -> None:
        """Make a call to all replicas at the same time. A replica that has died is left out from then on."""
        living = list(self.router.open)
        with ThreadPoolExecutor(len(living) or 1, "group") as pool:
            tasks = {replica: pool.submit(work, self.members[replica]) for replica in living}
        for replica, task in tasks.items():
            try:
                task.result()
            except ReplicaLost as error:
                self._lose(replica, error)
        if not self.router.open:
            raise GroupLost(f"group {self.name!r}: all its {len(self.members)} replicas are gone")

    def _version(self, member: Engine, adapter: str | None) -> int:
        return member.version_of(adapter) if isinstance(member, Versioned) else member.version

    def _lose(self, replica: int, error: Exception) -> None:
        """Record the death of a replica once, for all its requests."""
        if replica not in self.router.open:
            return
        self.router.lost(replica)
        self.own["replicas_lost"] += 1
        print(
            f"unitymas: group {self.name!r}: replica {replica} of {len(self.members)} is gone ({error}); its requests go to "
            f"the {len(self.router.open)} that are left",
            file=sys.stderr,
        )


class Elsewhere:
    """Engine on another device of this process. It copies each published model to that device."""

    def __init__(
        self, make: Callable[[EngineOrder], Engine], order: EngineOrder, device: torch.device
    ) -> None:
        self.device = device
        self.engine = make(replace(order, model=self._there(order.model)))

    def publish(self, model: Decoder, version: int, adapter: str | None = None) -> None:
        """Copy a model's weights, or those of one adapter alone."""
        self.engine.publish(self._there(model), version, adapter)

    def _there(self, model: Decoder) -> Decoder:
        there: Decoder = copy.deepcopy(model).to(self.device)
        return there

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def replicated(spec: GroupSpec, order: EngineOrder) -> Engine:
    """Make the engine of a group: one engine, or several behind a router."""
    make = ENGINES.find(spec.engine)
    first = make(order)
    if spec.replicas == 1:
        return first
    if why := first.cannot.get("replicas"):
        first.close()
        raise ValueError(f"groups.{spec.name}.replicas: {spec.engine} {why}; set replicas: 1")
    members: list[Engine] = [first]
    pack = None
    try:
        if spec.rank_actors:
            from .distant import packed, start

            members += start(spec, order)
            pack = packed
        else:
            members += _beside(make, spec, order)
    except BaseException:
        for member in members:
            member.close()
        raise
    return ReplicatedEngine(spec.name, members, order.slots * first.context, pack)


def _beside(make: Callable[[EngineOrder], Engine], spec: GroupSpec, order: EngineOrder) -> list[Engine]:
    """Make the other replicas in this process."""
    if not spec.device.startswith("cuda"):
        return [make(order) for _ in range(1, spec.replicas)]
    first = int(spec.device.partition(":")[2] or 0)
    there = partial(Elsewhere, make, order)
    return [there(torch.device("cuda", first + i)) for i in range(1, spec.replicas)]
