"""Interface of a run for its recipe: the plan, the groups, the players, and the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..algorithms.algorithm import AlgorithmState

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
    """A run as its recipe sees it. `check` may use the fields before `hosts`, and `step` all of them."""

    config: RunConfig
    arena: Arena
    dir: Path
    step: int
    """Number of finished steps."""
    plan: RunPlan
    """Plan of the run: critics of policies, credit settings, and the policies of each group."""
    cursor: Cursor
    """Position of the run in its tasks."""

    hosts: HostedGroups
    """All model groups: values, update, publish, retire, drop, export, adopt."""
    collector: Collector

    @property
    def stream(self) -> Batches | None:
        """Source of episodes that are played during updates. None: each step plays its own."""

    state: dict[str, AlgorithmState]
    """State of the algorithms, by policy."""
    stops: StopRules
    on_trace: Callable[[Trace], None] | None

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """Return the algorithm of each policy that learns."""

    def player(self, agent: str, arena: Arena | None = None) -> str:
        """Return the player of an agent, according to the map."""

    def team(
        self, players: Mapping[str, str] = {}, temperature: float | None = None, arena: Arena | None = None
    ) -> BoundTeam:
        """Return the players of all agents, according to the map. `players` (agent -> policy) replaces some of them."""

    def collector_of(self, arena: Arena) -> Collector:
        """Return a collector for another environment, with the players of its roles in the map."""

    async def keep(
        self, traces: Sequence[Trace], table: Table, signals: Mapping[str, list[Signal]] = {}
    ) -> None:
        """Write the step's traces and samples, if this step's are kept."""
