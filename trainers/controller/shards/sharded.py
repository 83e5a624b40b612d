"""Sharded controllers: a collector that distributes the draws of a step to shards, and puts their results into one table.

    controllers: 4      shard 0 plays the first quarter of a step's tasks, shard 1 the second …

Names, seeds and order of the episodes are those of one controller, so the table, all statistics and the weights are the same.
With runtime=ray each shard is an actor with its own link to every group. Otherwise all shards are in this process, which shows
that results are the same, but saves no time.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ....agents.basics.failures import GroupLost
from ....agents.team import BoundTeam
from ....envs.core.arena import Arena
from ....envs.core.drivers import side_by_side
from ....envs.core.trace import Trace
from ...config.plan import RunPlan
from ...config.schema import ConfigError, EnvConfig
from ...group.actor import ActorCaller, GroupActor, RayGroup
from ...group.cluster import CALLS_AT_ONCE
from ...group.contract import Group
from ..collect import Collector, Draws, Growth, Harvest, Seat, sampled_tokens
from ..reporting.idle import Idle
from ..reporting.watchdog import Watchdog
from .crossing import packed
from .shard import Seating, Shard


class ShardFace(Protocol):
    """Interface of a shard, in this process or in an actor."""

    async def open(self, number: int, arena: Arena) -> None:
        """Add an environment."""
        ...

    async def play(self, seating: Seating, task: str, draw: Draws) -> Harvest:
        """Play the samples of a task, and seal them."""
        ...


class DistantShard(ActorCaller):
    """Shard in a Ray actor."""

    def __init__(self, number: int, kind: Callable[..., Shard], *arguments: object) -> None:
        """Make the actor, on any node."""
        import ray

        remote = ray.remote(GroupActor).options(
            num_cpus=0, max_concurrency=CALLS_AT_ONCE, scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        )  # fmt: skip
        super().__init__(f"controller {number}", remote.remote(kind, *arguments))
        self.listening: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Wait until the shard has started, and print the reports of its watchdog."""
        await super().begin()
        self.listening = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        with suppress(GroupLost):  # its draws tell that
            while True:
                print(f"{self.name}: {await self._ask('news')}", file=sys.stderr, flush=True)

    def abandon(self) -> None:
        """Stop the actor without waiting."""
        if self.listening is not None:
            self.listening.cancel()
        super().abandon()

    async def open(self, number: int, arena: Arena) -> None:
        """Send an environment to the actor."""
        await self._ask("open", number, packed(arena))

    async def play(self, seating: Seating, task: str, draw: Draws) -> Harvest:
        """Play the samples of a task in the actor."""
        harvest: Harvest = await self._ask("play", seating, task, draw)
        return harvest


class Shards:
    """All shards of a run."""

    def __init__(self, members: Sequence[ShardFace], watchdog: Watchdog, idle: Idle) -> None:
        self.members, self.watchdog, self.idle = list(members), watchdog, idle
        self.arenas: list[tuple[Arena, asyncio.Future[list[None]]]] = []
        self.open_draws = Counter({number: 0 for number in range(len(members))})

    def over(self, collector: Collector) -> ShardedCollector:
        """Return a collector whose draws these shards play."""
        return ShardedCollector(collector, self)

    async def number_of(self, arena: Arena) -> int:
        """Return the number of an environment. All shards have the environment when this returns."""
        known = [one for one, _ in self.arenas]
        number = next((i for i, one in enumerate(known) if one is arena), len(known))
        if number == len(known):
            self.arenas.append((arena, asyncio.gather(*(m.open(number, arena) for m in self.members))))
        await asyncio.shield(self.arenas[number][1])
        return number

    def place(self, position: int, count: int) -> int:
        """Return the shard that plays the draw at a position among `count` draws: one of equal ranges. If there are
        fewer draws than shards, return the shard with the fewest draws.
        """
        if count >= len(self.members):
            return position * len(self.members) // count
        return min(self.open_draws, key=lambda number: (self.open_draws[number], number))

    async def play(self, number: int, seating: Seating, task: str, draw: Draws) -> Harvest:
        """Let a shard play the samples of a task."""
        self.open_draws[number] += 1
        try:
            name = f"{draw.label}:{draw.first}"
            with self.idle.call(), self.watchdog.call(f"controller {number}", "play", (name,)):
                return await self.members[number].play(seating, task, draw)
        finally:
            self.open_draws[number] -= 1

    def close(self) -> None:
        """Stop the actors. Shards in this process need no stop."""
        for member in self.members:
            if isinstance(member, DistantShard):
                member.abandon()


class ShardedCollector(Collector):
    """Collector whose draws are played by shards."""

    def __init__(self, plain: Collector, shards: Shards) -> None:
        super().__init__(
            plain.arena, plain.team, plain.groups, plain.home, trained=plain.trained, concurrency=1, retries=plain.retries,
            counterfactual=plain.counterfactual, watchdog=plain.watchdog, progress=plain.progress,
        )  # fmt: skip
        self.shards = shards

    async def _play(
        self,
        tasks: list[str],
        draw: Draws,
        harvest: Harvest,
        on_trace: Callable[[Trace], None] | None,
        grow: Growth | None,
    ) -> None:
        """Play the same episodes as one controller does, and add them in the same order."""
        if grow is not None:
            raise ConfigError("controllers: trees are grown by one controller; set controllers=1")
        seating = seating_of(self, await self.shards.number_of(self.arena))
        thin = draw.thin and draw.keep and on_trace is None

        async def played(position: int, task: str) -> Harvest:
            own = replace(draw, first=draw.first + position, thin=thin)
            part = await self.shards.play(self.shards.place(position, len(tasks)), seating, task, own)
            for trace in part.traces:
                self.progress.ended(sampled_tokens(trace))
                if on_trace is not None:
                    on_trace(trace)
            return part

        parts = await side_by_side(played(*job) for job in enumerate(tasks))
        for part in parts:  # episode by episode, so that sums have the same order as with one controller
            for name, trace in zip(part.episodes, part.traces, strict=True):
                harvest.take(name, trace, part.draws[name])
            harvest.decisions += part.decisions
            harvest.failures += part.failures


def seating_of(collector: Collector, arena: int) -> Seating:
    """Return the names of a collector's players, for shards."""
    team: BoundTeam = collector.team
    temperatures = {seat.temperature for seat in team.policies.values() if isinstance(seat, Seat)}
    players = {
        agent: seat.policy if isinstance(seat, Seat) else team.names[agent]
        for agent, seat in team.policies.items()
    }
    odd = [a for a, n in players.items() if n in collector.home and not isinstance(team.policies[a], Seat)]
    if odd:
        raise ConfigError(
            f"controllers: the recipe seats {odd[0]!r} by a player of its own, which shards do not know; set controllers=1"
        )
    temperature = temperatures.pop() if temperatures else None
    trained = tuple(sorted(collector.trained))
    return Seating(arena, players, temperature, trained, bool(collector.counterfactual))


async def start_shards(plan: RunPlan, groups: Mapping[str, Group], watchdog: Watchdog, idle: Idle) -> Shards:
    """Start the shards of a run: in this process, or as actors that call the groups' actors."""
    config = replace(plan.config, env=EnvConfig(id=plan.config.env.id))  # environments are sent separately
    if config.runtime != "ray":
        return Shards(
            [Shard(config, groups, plan.home, watchdog) for _ in range(config.controllers)], watchdog, idle
        )
    alike = {
        name: RayGroup(group.spec, group.actor)
        for name, group in groups.items()
        if isinstance(group, RayGroup)
    }
    members = [DistantShard(number, Shard, config, alike, plan.home) for number in range(config.controllers)]
    try:
        await asyncio.gather(*(member.begin() for member in members))
    except BaseException:
        for member in members:
            member.abandon()
        raise
    return Shards(members, watchdog, idle)
