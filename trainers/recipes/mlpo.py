"""Leader-only training with frozen peers (MLPO: the leader learns to use what its peers say, and they stay).

    unitymas train ID --preset separate recipe=mlpo recipe_args.leader=solver

The peers play with the weights they have; only the policy behind the leader's role is updated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...agents.basics.hints import nearest
from ..controller.step import Default

if TYPE_CHECKING:
    from ..controller.stage import Stage


@dataclass(frozen=True)
class Mlpo(Default):
    overlaps = True

    leader: str
    """Name of the role that learns."""

    def check(self, run: Stage) -> None:
        roles = [role.name for role in run.arena.workflow.roles]
        if self.leader not in roles:
            raise ValueError(
                f"recipe_args.leader: no role is called {self.leader!r}; {nearest(self.leader, roles)}"
            )
        players = {
            role: {run.player(a) for a, r in run.arena.roles.items() if r.name == role} for role in roles
        }
        for peer in roles:
            if peer != self.leader and players[peer] & players[self.leader] & set(run.algorithms):
                raise ValueError(
                    f"recipe_args.leader: one policy plays both {self.leader!r} and {peer!r}, so the peer would learn "
                    "too; map the roles to different policies (--preset separate)"
                )

    def trains(self, run: Stage) -> list[str]:
        leaders = {run.player(a) for a, role in run.arena.roles.items() if role.name == self.leader}
        return [policy for policy in run.algorithms if policy in leaders]
