"""GiGPO: groups within groups. A trajectory is compared with others, and an act with other acts from the same state.

Paper: Feng et al., Group-in-Group Policy Optimization, 2505.10978.

    A = A_episode + step_weight * A_step
    A_episode   the agent's total in the trajectory, against the other trajectories of (task, agent)
    A_step      the act's discounted return, against all acts of that agent from the same anchor state of the task,
                in any trajectory

An anchor is a hash of the environment's state (`Decision.anchor`). A_step is 0 for an act whose state no other act
shares, and for an act without an anchor.

How published code deviates: verl-agent also groups *similar* states (a text ratio above a threshold). Here an
environment can give similar states the same name. Its agent-wise variant pools calls in A_episode. Here a trajectory
counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.choices import Amount, Share
from ..controller.statistics.comparison import ScoreKind, partition, returns
from ..controller.statistics.table import Bools, Floats, Ints, Signal, Table
from .algorithm import AlgorithmState, GroupRelative, Needs


@dataclass(frozen=True, kw_only=True)
class GiGPO(GroupRelative):
    name = "gigpo"

    step_weight: Amount = 1.0
    """Weight of the comparison between acts. 0 is GRPO on the agent's total. Usual 1."""
    gamma: Share = 0.95
    """Discount per act of the returns by which acts are compared. Usual 0.95–1."""
    score: ScoreKind = "agent"
    """Score by which trajectories are compared."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, anchors=self.step_weight != 0)

    def parts(self, table: Table) -> tuple[Floats, Floats, Bools]:
        """Return A_episode, A_step, and which rows compare with nothing in either."""
        outer, score = self.groups(table), self.scores(table)
        inner, later = partition(table, "anchor"), returns(table, self.gamma)
        return (
            self.compare(outer, score),
            self.compare(inner, later),
            outer.still(score) & inner.still(later),
        )

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        episode, step, still = self.parts(table)
        return self.compared(table, mine, episode + self.step_weight * step, still)

    def metrics(self, table: Table, mine: Ints, signals: list[Signal]) -> dict[str, float]:
        alone = partition(table, "anchor").still(returns(table, self.gamma))
        share = float(alone[mine].mean()) if len(mine) else 0.0
        return {**super().metrics(table, mine, signals), "groups/anchors_alone": share}
