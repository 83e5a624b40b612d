"""Rewards of learned orchestration: the quality of the answer, less the cost of the calls that led to it.

A router's reward-to-go contains only what its choice can still change. The cost of a call is charged to the router's act
that chose it. The reward of the outcome is paid to the router's last act alone: if every act received it, the sum over an
episode would grow with the number of acts.
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
    """Reward of the answer's F1, paid to the router's last act and, in full, to every act of the other roles."""

    name = "outcome"

    def __init__(self, role: str = "router") -> None:
        self.role = role

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        score = f1(answer_of(trace), task.reference["answers"])
        paid = [act for act in trace.acts() if act.role != self.role] + trace.acts(self.role)[-1:]
        return [Credit(act.id, self.name, score) for act in paid]

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        gold, answer = task.reference["answers"], answer_of(trace)
        return {"f1": f1(answer, gold), "em": exact_match(answer, gold)}


class CallCost(Rule):
    """Cost of calls: `own` for each act of the router, `each` for each act of another role and each tool call.

    The router's latest act before a call pays for that call. The metric `calls` counts acts of other roles and tool calls,
    `router_calls` the router's acts.
    """

    name = "calls"

    def __init__(self, role: str = "router", each: float = 0.02, own: float = 0.005) -> None:
        if each < 0 or own < 0:
            raise ValueError(f"each and own are costs and must not be negative, got {each} and {own}")
        self.role, self.each, self.own = role, each, own

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
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
