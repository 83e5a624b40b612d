"""AT-GRPO: agent- and turn-wise groups, made exact by sampling trees.

Paper: Zhao et al., Stronger Together (Stronger-MAS / PettingLLMs), 2510.11062.

    at every act, `tree` candidates are drawn from the *same* state; they are one group
    score = alpha * team + local               per act: use the `mix` transform of credit.py
    A     = (score - mean) / (std + eps)
    the episode continues with the best candidate; its siblings are training data only

Without a tree (`tree=0`) this is the paper's "parallel" baseline: k trajectories per task, grouped by (task, agent,
turn). After the first turn these groups compare acts in different states.

How published code deviates: the group key of PettingLLMs divides an index that is already the problem's, so its
default groups mix eight problems. All its agents speak before any of them acts. Once the first agent is scored, every
later agent is scored on copies of the winner, so all its candidates get the same score. Here a tree branches per act,
and the next role sees the winner's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..config.choices import Aggregation, Whole
from ..controller.statistics.comparison import Groups, ScoreKind, partition
from ..controller.statistics.table import Decision, Ints, Signal, Table
from .algorithm import AlgorithmState, GroupRelative, Metrics, Needs, Plan, Tree

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.learning.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ATGRPO(GroupRelative):
    name = "at_grpo"

    tree: Whole = 4
    """Number of candidates per act, drawn from one state; 0: none (k trajectories instead). Usual 4–8."""
    tree_score: Literal["step", "rollout", "value"] = "step"
    """Score by which candidates are credited and chosen. step: what the act earned at once. rollout: what it
    earned by the end of a fork that was played on (for rewards that come late; the fork costs as many acts as
    are left, and they are not trained). value: what the act earned at once, and what the critic expects after
    it. The critic learns this from the candidates that were continued: the later earnings of their agent's
    chain, late rewards included, and 0 where the episode was over.
    """
    continuation: Literal["greedy", "softmax", "random", "all"] = "greedy"
    """Choice of the candidate with which the episode continues."""
    group: str = "agent-turn"
    """Groups of acts drawn without a tree. With a tree the siblings are the groups."""
    score: ScoreKind = "act"
    """Score of an act: its own reward. Siblings share everything else."""
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

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
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
        """Return the target of the critic during an act: its reward and all later rewards of its chain. For a
        candidate that was not continued, what the critic expects after it replaces the later rewards.
        """
        if row.later is None:
            return float(score)
        return float(score) - row.credit.get("value", 0.0) + row.later

    def critic_loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """Squared distance between values and targets, at every token and after the last
        (`tree_score="value"`).
        """
        from ..group.learning import losses

        if batch.values is None or batch.returns is None or batch.old_values is None:
            raise ValueError(f"{self.name}: a critic's batch needs values, old_values and returns")
        per_token = losses.value_loss(batch.values, batch.returns, batch.old_values, None)
        loss = losses.aggregate(per_token, batch, self.aggregation, denominators, self.length)
        after = losses.value_after_loss(batch, denominators)
        return loss + after, {"value_loss": loss.detach(), "value_after_loss": after.detach()}
