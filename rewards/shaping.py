"""Rules that shape scores: turn deltas, team and local rewards mixed, influence, propagation along the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from ..envs.core.ledger import Credit, Rule, as_rule
from ..envs.core.records import totals_by_node
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node
from .rules import weight_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EpisodeScore = Callable[[Trace, Task], float]
NodeScore = Callable[[Trace, Node, Task], "float | None"]


InfluenceKind = Literal["quality", "margin"]
INFLUENCE_KIND: InfluenceKind = "margin"
INFLUENCE_ALPHA = 0.5
X = TypeVar("X", float, "NDArray[np.float64]")


def influence(own: X, earlier: X, kind: InfluenceKind = INFLUENCE_KIND) -> X:
    """Return how much an act changed, from its score R (`own`) and the mean score Q of the acts before it (`earlier`).

    Both scores lie between 0 and 1. `margin` is R − Q. `quality` is QR − (1−Q)(1−R), which is positive if Q + R > 1
    (MAPoRL, MARTI).
    """
    return own - earlier if kind == "margin" else earlier * own - (1.0 - earlier) * (1.0 - own)


class TurnDelta(Rule):
    """Reward of the change of a score from turn to turn.

    The acts of the role `measure` are scored with `score(trace, node, task)`. The difference between an act's score and
    that of the agent's previous act is paid to every act of `roles` since then. The first act of all is compared with 0.
    If the role has several instances, an instance that acts for the first time is compared with the mean score of the
    latest acts of the others.
    """

    def __init__(self, score: NodeScore, measure: str, roles: tuple[str, ...], name: str = "delta") -> None:
        self.score, self.measure, self.roles, self.name = score, measure, roles, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
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


class Mixed(Rule):
    """Reward of α × team score + β × the act's own score: `Mixed(team, local, alpha={"planner": 1.0}, beta=1.0)`.

    α and β may differ by role. A role that a mapping does not name has the weight 1.
    """

    def __init__(
        self,
        team: EpisodeScore,
        local: NodeScore,
        alpha: float | Mapping[str, float] = 1.0,
        beta: float | Mapping[str, float] = 1.0,
        name: str = "mixed",
    ) -> None:
        self.team, self.local, self.alpha, self.beta, self.name = team, local, alpha, beta, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        own = self.local(trace, node, task) if node.kind == "act" else None
        if own is not None:
            yield Credit(node.id, f"{self.name}/local", weight_of(self.beta, node.role, 1.0) * own)

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        shared = self.team(trace, task)
        return [
            Credit(n.id, f"{self.name}/team", weight_of(self.alpha, n.role, 1.0) * shared)
            for n in trace.acts()
        ]


class Influence(Rule):
    """Reward shaping as in MAPoRL: `alpha` × `influence` of each act.

    An act's score is compared with the mean score of the earlier acts. `roles` names the roles whose acts count and are
    paid; None means all roles. An act without earlier acts gets nothing.
    """

    def __init__(
        self,
        score: NodeScore,
        kind: InfluenceKind = INFLUENCE_KIND,
        alpha: float = INFLUENCE_ALPHA,
        roles: tuple[str, ...] | None = None,
        name: str = "influence",
    ) -> None:
        if kind not in get_args(InfluenceKind):
            raise ValueError(f"kind={kind!r}: use 'quality' or 'margin'")
        self.score, self.kind, self.alpha, self.roles, self.name = score, kind, alpha, roles, name

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "act" or not self._counts(node):
            return
        own = self.score(trace, node, task)
        earlier = [n for n in trace.acts() if n.round < node.round and self._counts(n)]
        scores = [s for s in (self.score(trace, n, task) for n in earlier) if s is not None]
        if own is None or not scores:
            return
        yield Credit(node.id, self.name, self.alpha * influence(own, sum(scores) / len(scores), self.kind))

    def _counts(self, node: Node) -> bool:
        return self.roles is None or node.role in self.roles


class Propagated(Rule):
    """Propagation of a rule's credits backwards along the graph's edges, with a discount.

    Each parent of an act gets `discount` × the act's amount / number of parents, and so on to the roots. A tool call
    passes its amount to its parents without a discount. The act itself keeps its full amount.
    """

    def __init__(
        self, rule: Rule | Callable[[Trace, Task], object], discount: float = 0.9, name: str = "propagated"
    ) -> None:
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount={discount}: must lie between 0 and 1")
        self.rule, self.discount, self.name = as_rule(rule), discount, name

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        early = (self.rule.on_node(trace.until(node.round), node, task) for node in trace.nodes)
        amount = totals_by_node(chain(chain.from_iterable(early), self.rule.on_end(trace, task)))
        kinds = {n.id: n.kind for n in trace.nodes}
        for node in sorted(trace.nodes, key=lambda n: -n.round):
            have, parents = amount.get(node.id, 0.0), [p for p in node.parents if p in kinds]
            passed = have if node.kind == "use" else self.discount * have
            for parent in parents:
                amount[parent] = amount.get(parent, 0.0) + passed / len(parents)
        return [
            Credit(id, self.name, value) for id, value in amount.items() if kinds.get(id) == "act" and value
        ]
