"""Interface of a run to its recipe: the plan, the groups, who plays, and what is written down. No more than this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..algorithms.algorithm import State

if TYPE_CHECKING:
    from ...agents.team import BoundTeam
    from ...envs.core.arena import Arena
    from ...envs.core.trace import Trace
    from ..algorithms import Algorithm
    from ..config.plan import RunPlan
    from ..config.schema import RunConfig
    from .all_groups import HostedGroups
    from .collect import Collector, Cursor, Harvest
    from .statistics.table import Signal, Table
    from .stop_rules import StopRules


class Batches(Protocol):
    """Source of episodes that are played beside the updates."""

    async def batch(self) -> Harvest:
        """Return the episodes of the next step."""
        ...


class Stage(Protocol):
    """A run as its recipe sees it. `check` may ask for what stands before `hosts`; a step for everything."""

    config: RunConfig
    arena: Arena
    dir: Path
    step: int
    """Steps that are done."""
    plan: RunPlan
    """Plan of the run: who judges whom, credit settings, what each group holds."""
    cursor: Cursor
    """Position of the run in its tasks."""

    hosts: HostedGroups
    """All model groups: values, update, publish, retire, drop, export, adopt."""
    collector: Collector

    @property
    def stream(self) -> Batches | None:
        """Episodes that are played beside the updates; None: each step plays its own."""

    state: dict[str, State]
    """State that algorithms keep from step to step, by policy."""
    stops: StopRules
    on_trace: Callable[[Trace], None] | None

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The policies that learn, and how."""

    def player(self, agent: str, arena: Arena | None = None) -> str:
        """The map's entry of an agent."""

    def team(
        self, players: Mapping[str, str] = {}, temperature: float | None = None, arena: Arena | None = None
    ) -> BoundTeam:
        """Everybody at the table, by the map; `players` (agent -> policy) seats some otherwise."""

    def collector_of(self, arena: Arena) -> Collector:
        """A collector for another environment, with the players that the map gives its roles."""

    async def keep(
        self, traces: Sequence[Trace], table: Table, signals: Mapping[str, list[Signal]] = {}
    ) -> None:
        """Write down the step's traces and samples, where it is one of those that are kept."""
