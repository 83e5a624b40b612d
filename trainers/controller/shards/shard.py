"""A shard: one of several controllers that play. Workflows, prompts, parsing, tools and rewards of its draws are here.

A shard calls the same groups as the main controller, and seals its episodes there. It returns small rows: decisions with their credits,
and traces, without prompts and tool results if they are not needed. It has no state between draws, so a run can continue with
another number of shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ....agents.team import BoundTeam
from ....envs.core.arena import Arena
from ....envs.core.records import Act, Use
from ....envs.core.trace import Trace
from ....own import load
from ...config.plan import guests
from ...config.schema import RunConfig
from ...group.contract import Group
from ..collect import Collector, Draws, Harvest, Seat, seated
from ..counterfactual import Counterfactual
from ..reporting.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Seating:
    """Settings that all draws of a collection share: environment, players, and learning policies."""

    arena: int
    players: Mapping[str, str]
    """Policy or fixed player of each agent."""
    temperature: float | None
    trained: tuple[str, ...]
    counterfactual: bool


class Shard:
    """Player of draws, in the controller's process or in an actor of its own."""

    def __init__(
        self,
        config: RunConfig,
        groups: Mapping[str, Group],
        home: Mapping[str, str],
        watchdog: Watchdog | None = None,
    ) -> None:
        for name in config.imports:
            load(name)
        self.config, self.home, self.reports = config, home, list[str]()
        if watchdog is None:  # nobody sees the output of an actor
            watchdog = Watchdog(config.watchdog, self.reports.append)
            watchdog.start()
            groups = {name: watchdog.over(group, name) for name, group in groups.items()}
        self.groups, self.watchdog = groups, watchdog
        self.guests = guests(config)
        self.arenas: dict[int, Arena] = {}
        self.collectors: list[tuple[Seating, Collector]] = []

    async def open(self, number: int, arena: Arena | bytes) -> None:
        """Add an environment. Draws name it by its number."""
        if isinstance(arena, bytes):
            from ray import cloudpickle

            self.arenas[number] = cloudpickle.loads(arena)
        else:
            self.arenas[number] = arena

    async def play(self, seating: Seating, task: str, draw: Draws) -> Harvest:
        """Play the samples of a task, and seal them."""
        harvest = await self.collector(seating).collect([task], draw)
        if draw.thin:
            for trace in harvest.traces:
                slim(trace)
        return harvest

    async def news(self) -> str:
        """Wait until the watchdog of this process reports, and return its report."""
        while not self.reports:
            await asyncio.sleep(1.0)
        return self.reports.pop(0)

    def collector(self, seating: Seating) -> Collector:
        """Return the collector of a seating. Equal settings share one collector, and with it one limit of episodes in
        flight.
        """
        for known, collector in self.collectors:
            if known == seating:
                return collector
        config, arena = self.config, self.arenas[seating.arena]
        questions: Mapping[str, Counterfactual] = config.counterfactual if seating.counterfactual else {}
        collector = Collector(
            arena, self.team(seating, arena), self.groups, self.home, trained=set(seating.trained),
            concurrency=-(-config.concurrency // config.controllers), retries=config.retries, counterfactual=questions,
            watchdog=self.watchdog,
        )  # fmt: skip
        self.collectors.append((seating, collector))
        return collector

    def team(self, seating: Seating, arena: Arena) -> BoundTeam:
        """Return the players of a seating."""

        def seat(policy: str) -> Seat:
            return Seat(self.groups[self.home[policy]], policy, seating.temperature)

        return seated(
            seating.players, self.config.policies, seat, lambda name: self.guests.player(name, arena.expert)
        )


def slim(trace: Trace) -> None:
    """Remove long texts that the main controller does not need."""
    for node in trace.nodes:
        if isinstance(node, Act):
            node.messages, node.fields = (), {}
        elif isinstance(node, Use):
            node.result = node.private = None
