"""Rules made of other rules: mixing of team and local rewards, turn deltas, influence, propagation along the
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from ..envs.core.ledger import Credit, Rule, as_rule
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node

Score = Callable[[Trace, Task], float]
NodeScore = Callable[[Trace, Node, Task], "float | None"]


class TurnDelta:
    """Change of a score from turn to turn: `score(trace, node, task)` of the measuring acts, as differences.

    `measure` is the role whose acts are scored. The difference to its previous act (for the first act: its score
    itself) is paid to every act of `roles` since then. With several instances, each is compared with its own previous
    act. An instance without one is compared with the mean of those that measured last.
    """

    def __init__(self, score: NodeScore, measure: str, roles: tuple[str, ...], name: str = "delta") -> None:
        self.score, self.measure, self.roles, self.name = score, measure, roles, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        if node.kind != "act" or node.role != self.measure:
            return
        earlier = [n for n in trace.acts(self.measure) if n.round < node.round]
        earlier = [n for n in earlier if n.agent == node.agent] or earlier
        since = max((n.round for n in earlier), default=-1)
        reached = [self.score(trace, n, task) or 0.0 for n in earlier if n.round == since]
        change = (self.score(trace, node, task) or 0.0) - (sum(reached) / len(reached) if reached else 0.0)
        for other in trace.acts():
            if other.role in self.roles and since < other.round <= node.round:
                yield Credit(other.id, self.name, change)

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        return ()


class Mixed:
    """α × team + β × local, per role: `Mixed(team, local, alpha={"planner": 1.0}, beta=1.0)`."""

    def __init__(
        self,
        team: Score,
        local: NodeScore,
        alpha: float | Mapping[str, float] = 1.0,
        beta: float | Mapping[str, float] = 1.0,
        name: str = "mixed",
    ) -> None:
        self.team, self.local, self.alpha, self.beta, self.name = team, local, alpha, beta, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        own = self.local(trace, node, task) if node.kind == "act" else None
        if own is not None:
            yield Credit(node.id, f"{self.name}/local", _of(self.beta, node.role) * own)

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        shared = self.team(trace, task)
        return [Credit(n.id, f"{self.name}/team", _of(self.alpha, n.role) * shared) for n in trace.acts()]


class Influence:
    """Shaping as in MAPoRL: an act's own score against what earlier acts had reached.

    Q is the mean score of the earlier acts (of `roles`), R the act's own. `quality`: QR − (1−Q)(1−R);
    `margin`: R − Q. The result is paid times `alpha`. An act without earlier acts gets nothing.
    """

    def __init__(
        self,
        score: NodeScore,
        kind: Literal["quality", "margin"] = "quality",
        alpha: float = 0.5,
        roles: tuple[str, ...] | None = None,
        name: str = "influence",
    ) -> None:
        if kind not in ("quality", "margin"):
            raise ValueError(f"kind={kind!r}: use 'quality' or 'margin'")
        self.score, self.kind, self.alpha, self.roles, self.name = score, kind, alpha, roles, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        if node.kind != "act" or not self._counts(node):
            return
        own = self.score(trace, node, task)
        earlier = [n for n in trace.acts() if n.round < node.round and self._counts(n)]
        scores = [s for s in (self.score(trace, n, task) for n in earlier) if s is not None]
        if own is None or not scores:
            return
        q = sum(scores) / len(scores)
        change = q * own - (1 - q) * (1 - own) if self.kind == "quality" else own - q
        yield Credit(node.id, self.name, self.alpha * change)

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        return ()

    def _counts(self, node: Node) -> bool:
        return self.roles is None or node.role in self.roles


class Propagated:
    """Propagation of a rule's credits backwards along the graph's edges, with a discount.

    A node's amount is shared among its parents (tools are passed through). Each gets `discount` × amount / number of
    parents, and so on to the roots. The node itself keeps its own.
    """

    def __init__(
        self, rule: Rule | Callable[[Trace, Task], object], discount: float = 0.9, name: str = "propagated"
    ) -> None:
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount={discount}: must lie between 0 and 1")
        self.rule, self.discount, self.name = as_rule(rule), discount, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        return ()

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        amount: dict[str, float] = {}
        for node in trace.nodes:
            for credit in self.rule.on_node(trace.until(node.round), node, task):
                amount[credit.node] = amount.get(credit.node, 0.0) + credit.amount
        for credit in self.rule.on_end(trace, task):
            amount[credit.node] = amount.get(credit.node, 0.0) + credit.amount
        kinds = {n.id: n.kind for n in trace.nodes}
        for node in sorted(trace.nodes, key=lambda n: -n.round):
            have, parents = amount.get(node.id, 0.0), [p for p in node.parents if p in kinds]
            passed = have if node.kind == "use" else self.discount * have
            for parent in parents:
                amount[parent] = amount.get(parent, 0.0) + passed / len(parents)
        return [
            Credit(id, self.name, value) for id, value in amount.items() if kinds.get(id) == "act" and value
        ]


def _of(weight: float | Mapping[str, float], role: str | None) -> float:
    return weight.get(role or "", 1.0) if isinstance(weight, Mapping) else weight
