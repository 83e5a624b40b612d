"""Rewards of learned orchestration: the quality of the answer, less the cost of the calls that led to it.

Both are placed so that a router's reward-to-go is what its choice can still change. The outcome is paid to its last
act alone, because paid to every act, the sum over an episode would grow with its length. The cost of each call is
paid to the act that chose it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..envs.core.ledger import Credit, Rule
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node
from .metrics import exact_match, f1
from .outcome import answer_of


class RoutedF1(Rule):
    """F1 of the answer: paid to the router's last act, and in full to every act of the other roles."""

    name = "outcome"

    def __init__(self, role: str = "router") -> None:
        self.role = role

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Give the credits that are known when the episode is over."""
        score = f1(answer_of(trace), task.reference["answers"])
        paid = [act for act in trace.acts() if act.role != self.role] + trace.acts(self.role)[-1:]
        return [Credit(act.id, self.name, score) for act in paid]

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        gold, answer = task.reference["answers"], answer_of(trace)
        return {"f1": f1(answer, gold), "em": exact_match(answer, gold)}


class CallCost(Rule):
    """Cost of calls, paid to the router's act before the call: `each` for a call of another role or a tool, `own` for its own.

    Metrics: `calls` are those of other roles and of tools, `router_calls` the router's.
    """

    name = "calls"

    def __init__(self, role: str = "router", each: float = 0.02, own: float = 0.005) -> None:
        if each < 0 or own < 0:
            raise ValueError(f"each and own are costs and must not be negative, got {each} and {own}")
        self.role, self.each, self.own = role, each, own

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Give the credits that are known once the node's round is answered."""
        if node.role == self.role:
            yield Credit(node.id, self.name, -self.own)
            return
        before = [act for act in trace.acts(self.role) if act.round < node.round]
        if before:
            yield Credit(before[-1].id, self.name, -self.each)

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        own = len(trace.acts(self.role))
        return {"calls": float(len(trace.nodes) - own), "router_calls": float(own)}
