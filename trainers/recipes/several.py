"""Several environments in one run: every step plays tasks of each, and all of them are one update.

    unitymas train ID --preset shared recipe=several recipe_args.beside='[{id: OTHER, data: mini}]' \\
        policies.team.algorithm.name=grpo policies.team.algorithm.task_wise=true

Tasks of different environments are never compared with each other; `task_wise` besides whitens the advantages of each,
so that none sets the scale for the others (AgentRL, 2510.04206). A role of an environment beside the run's own is
played by whom the map names for that role, else for "*". Validation is of the run's own environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...agents.basics.json_types import JsonView
from ...envs.core.arena import Arena
from ...envs.registry import make_arena
from ..config.choices import Whole
from ..controller.checkpoint import Saved
from ..controller.collect import Cursor, Harvest
from ..controller.step import Default

if TYPE_CHECKING:
    from ..controller.stage import Stage


@dataclass
class Several(Default):
    beside: tuple[JsonView, ...]
    """The other environments: arguments of `make`, `id` among them. `split` is the run's own unless given."""
    tasks: Whole = 0
    """Tasks in a step from each of them. 0: as many as from the run's own environment."""

    def __post_init__(self) -> None:
        if not self.beside:
            raise ValueError("recipe_args.beside: name at least one environment, as [{id: …}]")
        for options in self.beside:
            if "id" not in options:
                raise ValueError(f"recipe_args.beside: {dict(options)!r} has no id")
        self.places: list[tuple[Arena, Cursor]] = []

    def check(self, run: Stage) -> None:
        usual = {"split": run.config.env.split, "prompts": _named(run.config.env.prompts)}
        arenas = [make_arena(**{**usual, **options}) for options in self.beside]
        ids = [run.arena.env_id]
        for arena in arenas:
            if arena.env_id in ids:
                raise ValueError(
                    f"recipe_args.beside: {arena.env_id} stands there twice, or is the run's own"
                )
            ids.append(arena.env_id)
            for agent in arena.roles:
                run.player(agent, arena)  # raises where nobody plays
        self.places = [(arena, Cursor(list(arena.task_ids), run.config.seed)) for arena in arenas]

    async def collect(self, run: Stage) -> Harvest:
        harvest = await super().collect(run)
        for number, (arena, cursor) in enumerate(self.places, 1):
            collector = run.collector_of(arena)
            collector.trained = set(self.trains(run))
            tasks = self.tasks or run.config.tasks_per_step
            harvest.add(await self.gather(run, collector, cursor, tasks, place=f"@{number}"))
        return harvest

    def state_dict(self) -> dict[str, object]:
        return {arena.env_id: cursor.state_dict() for arena, cursor in self.places}

    def load_state_dict(self, state: Saved) -> None:
        for arena, cursor in self.places:
            cursor.load_state_dict(state[arena.env_id])


def _named(prompts: object) -> object:
    """Return the run's prompt set if it has a name, because other workflows have a set of that name, too."""
    return prompts if prompts in ("full", "few-shot", "short") else None
