"""CORY: two copies of one model answer the same task, the observer after seeing the pioneer's words; every so many
steps they exchange roles, so that neither forgets how to answer alone.

    unitymas train ID recipe=cory recipe_args.pioneer=solver recipe_args.observer=refiner --preset separate

Paper: Ma et al., Coevolving with the Other You, 2410.06101. Both earn the sum of both rewards there: use the credit
transform `spread` (docs/algorithms.md) where the environment pays them separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...agents.basics.hints import nearest
from ...agents.team import BoundTeam
from ..config.choices import Count
from ..controller.step import Default

if TYPE_CHECKING:
    from ..controller.stage import Stage


@dataclass(frozen=True)
class Cory(Default):
    pioneer: str = "pioneer"
    """Name of the role that answers first."""
    observer: str = "observer"
    """Name of the role that sees the pioneer's answer."""
    every: Count = 5
    """Steps between exchanges. Usual 1–20."""

    def check(self, run: Stage) -> None:
        roles = {role.name: role.agents for role in run.arena.workflow.roles}
        for key in ("pioneer", "observer"):
            name = getattr(self, key)
            if name not in roles:
                raise ValueError(f"recipe_args.{key}: no role is called {name!r}; {nearest(name, roles)}")
        if run.player(roles[self.pioneer][0]) == run.player(roles[self.observer][0]):
            raise ValueError(
                f"recipe 'cory' exchanges two policies, and one plays both {self.pioneer!r} and {self.observer!r}; "
                "map the roles to different policies (--preset separate)"
            )

    def swapped(self, run: Stage) -> bool:
        return run.step // self.every % 2 == 1

    def team(self, run: Stage) -> BoundTeam:
        players = {agent: run.player(agent) for agent in run.arena.roles}
        if self.swapped(run):
            roles = {role.name: role.agents for role in run.arena.workflow.roles}
            first, second = players[roles[self.pioneer][0]], players[roles[self.observer][0]]
            players.update(dict.fromkeys(roles[self.pioneer], second))
            players.update(dict.fromkeys(roles[self.observer], first))
        return run.team(players)
