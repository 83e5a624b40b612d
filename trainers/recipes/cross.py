"""Cross-policy sampling: with some probability an act is made by another policy than the role's own.

    unitymas train ID --preset separate recipe=cross recipe_args.probability=0.2

A team then meets states that its own habits would never lead it to (AgentRL, 2510.04206). Every policy learns from
what *it* said, whoever's role it played; the words of fixed players are context only.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...agents.basics.hints import nearest
from ...agents.policies import Answer, Call, Policy, PolicyWrapper
from ...agents.team import BoundTeam
from ..controller.step import Default

if TYPE_CHECKING:
    from ..controller.stage import Stage


class MixedSeat(PolicyWrapper):
    """Player that sometimes lets another policy act. The call's seed decides which."""

    def __init__(self, own: Policy, others: list[Policy], probability: float) -> None:
        super().__init__(own, *others)
        self.probability = probability

    async def act(self, call: Call) -> str | Answer:
        chance = random.Random(f"cross/{call.seed}")
        own, *others = self.policies
        crossed = chance.random() < self.probability
        reply = self.ask(chance.choice(others) if crossed else own, call)
        answer: str | Answer = await reply if inspect.isawaitable(reply) else reply
        return answer


@dataclass(frozen=True)
class Cross(Default):
    overlaps = True
    seats_by_name = False

    probability: float = 0.2
    """Probability that an act is made by another policy. Usual 0.1–0.3."""
    pool: tuple[str, ...] = ()
    """Policies that may act in place of others. Empty: all that play a role."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"recipe_args.probability: must lie in 0 … 1, got {self.probability}")

    def check(self, run: Stage) -> None:
        seated = {run.player(agent) for agent in run.arena.roles}
        for policy in self.pool:
            if policy not in seated:
                raise ValueError(
                    f"recipe_args.pool: {policy!r} plays no role; {nearest(policy, sorted(seated))}"
                )
        if len(seated) < 2:
            raise ValueError(
                "recipe 'cross' needs two policies that play; --preset separate gives each role one"
            )

    def team(self, run: Stage) -> BoundTeam:
        team = run.team()
        seats = {name: team.policies[agent] for agent, name in team.names.items()}
        pool = self.pool or tuple(dict.fromkeys(team.names.values()))
        mixed: dict[str, Policy] = {}
        for agent, name in team.names.items():
            others = [seats[other] for other in pool if other != name]
            mixed[agent] = MixedSeat(seats[name], others, self.probability) if others else seats[name]
        return BoundTeam(mixed, team.names)
