"""AT-GRPO: agent- and turn-wise groups, made exact by sampling trees.

Paper: Zhao et al., Stronger Together (Stronger-MAS / PettingLLMs), 2510.11062.

    at every act, `tree` candidates are drawn from the *same* state; they are one group
    score = alpha * team + local               per act: use the `mix` transform of credit.py
    A     = (score - mean) / (std + eps)
    the episode goes on with the best candidate; its siblings are training data only

Without a tree (`tree=0`) this is the paper's "parallel" baseline: k trajectories per task, grouped by (task, agent,
turn), where turns after the first compare acts in different states.

How published code deviates: PettingLLMs' group key divides an index that is already the problem's, so its default
groups mix eight problems; all agents speak before any acts, and after the first agent was scored every later one is
scored on copies of the winner, so that its candidates all score the same. Here a tree branches per act, and the next
role sees the winner's words.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..config.choices import Aggregation
from ..controller.statistics.comparison import Groups, Score, partition
from ..controller.statistics.table import Decision, Ints, Signal, Table
from .algorithm import GroupRelative, Metrics, Needs, Plan, Tree

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ATGRPO(GroupRelative):
    name = "at_grpo"

    tree: int = 4
    """Candidates per act, drawn from one state; 0: none (k trajectories instead). Usual 4–8."""
    tree_score: Literal["step", "rollout", "value"] = "step"
    """What a candidate is credited with and chosen by. step: what it earned at once. rollout: what it earned by the
    end of a fork that was played on (for rewards that come late; costs that many more acts, which are not trained).
    value: what it earned at once and what the critic expects after it. The critic learns that from the candidates that
    were continued: what their agent's chain earned later, late rewards included, and 0 where the episode was over."""
    continuation: Literal["greedy", "softmax", "random", "all"] = "greedy"
    """Which candidate the episode goes on with."""
    group: str = "agent-turn"
    """Acts drawn without a tree; with one, siblings are the groups."""
    score: Score = "act"
    """An act's own reward: siblings share everything else."""
    aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == 1 or self.tree < 0:
            raise ValueError(
                f"at_grpo: tree is {self.tree}: set it to 2 or more, so that candidates can be compared, or to 0 for no tree"
            )

    @property
    def needs(self) -> Needs:
        values: Literal["", "prompt"] = "prompt" if self.tree and self.tree_score == "value" else ""
        return replace(super().needs, k=1 if self.tree else 2, tree=self.tree, values=values)

    def collect(self, plan: Plan) -> Plan:
        if not self.tree:
            return plan
        return replace(plan, tree=Tree(self.tree, self.tree_score, self.continuation))

    def groups(self, table: Table) -> Groups:
        return partition(table, "siblings" if self.tree else self.group, self.each)

    def advantages(self, table: Table, mine: Ints, state: MutableMapping[str, Any]) -> list[Signal]:
        signals = super().advantages(table, mine, state)
        if not self.needs.values:
            return signals
        score, rows = self.scores(table), [table.rows[i] for i in mine.tolist()]
        targets = (self.foreseeable(row, score[i]) for row, i in zip(rows, mine.tolist(), strict=True))
        return [
            signal._replace(target=target, after=row.later)
            for signal, target, row in zip(signals, targets, rows, strict=True)
        ]

    @staticmethod
    def foreseeable(row: Decision, score: float) -> float:
        """What the critic should have said during an act: its reward and all that came later. Of a candidate that was
        not continued nobody knows that; what the critic expects after it stands in."""
        if row.later is None:
            return float(score)
        return float(score) - row.credit.get("value", 0.0) + row.later

    def critic_loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """Squared distance from what it should have said, at every token and after the last (`tree_score="value"`)."""
        from ..group import losses

        if batch.values is None or batch.returns is None or batch.old_values is None:
            raise ValueError(f"{self.name}: a critic's batch needs values, old_values and returns")
        per_token = losses.value_loss(batch.values, batch.returns, batch.old_values, None)
        loss = losses.aggregate(per_token, batch, self.aggregation, denominators, self.length)
        after = losses.value_after_loss(batch, denominators)
        return loss + after, {"value_loss": loss.detach(), "value_after_loss": after.detach()}
