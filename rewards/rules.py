"""Reward rules for any workflow: format, trajectory, role and turn rewards.

A rule returns credits: `Credit(node, component, amount)`. The environment's ledger keeps them by component and node.
`rewards.wrappers` attaches rules to an environment that is already made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from ..agents.roles import entry_of
from ..envs.core.ledger import Credit, Rule
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node


def weight_of(weight: float | Mapping[str, float], role: str | None, otherwise: float) -> float:
    """Return the weight of a role. A number is the weight of every role.

    In a mapping, the role's entry is used, or else the entry `"*"`, or else `otherwise`.
    """
    if not isinstance(weight, Mapping):
        return weight
    own = entry_of(weight, role or "*")
    return otherwise if own is None else own


class FormatReward(Rule):
    """Reward of the format: `weight` × `legal` for a legal reply, `weight` × `illegal` for a malformed one.

    The weight may differ by role. A role without a weight gets 0.
    """

    name = "format"

    def __init__(
        self, weight: float | Mapping[str, float] = 1.0, legal: float = 0.0, illegal: float = -1.0
    ) -> None:
        self.weight, self.legal, self.illegal = weight, legal, illegal

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "act":
            return ()
        weight = weight_of(self.weight, node.role, 0.0)
        return (Credit(node.id, self.name, weight * (self.legal if node.ok else self.illegal)),)

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        acts = trace.acts()
        return {"format_ok": sum(bool(n.ok) for n in acts) / len(acts)} if acts else {}


class TrajectoryReward(Rule):
    """Reward of the whole episode: one number, paid to every act.

    With `share="full"` each act gets the whole number, with `"split"` an equal part of it. `roles` names the roles whose
    acts are paid; None pays all.
    """

    def __init__(
        self,
        score: Callable[[Trace, Task], float],
        name: str = "trajectory",
        share: Literal["full", "split"] = "full",
        weight: float = 1.0,
        roles: tuple[str, ...] | None = None,
    ) -> None:
        if share not in ("full", "split"):
            raise ValueError(f"share={share!r}: use 'full' or 'split'")
        self.score, self.name, self.share, self.weight, self.roles = score, name, share, weight, roles

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        acts = [n for n in trace.acts() if self.roles is None or n.role in self.roles]
        amount = self.weight * self.score(trace, task)
        part = amount / len(acts) if self.share == "split" and acts else amount
        return [Credit(n.id, self.name, part) for n in acts]


class RoleReward(Rule):
    """Reward by role: `{"planner": score, …}`. Each score is computed at the end and paid to every act of its role."""

    def __init__(self, scores: Mapping[str, Callable[[Trace, Task], float]], name: str = "role") -> None:
        self.scores, self.name = dict(scores), name

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        credits = []
        for role, score in self.scores.items():
            acts = trace.acts(role)
            if acts:
                amount = score(trace, task)
                credits += [Credit(n.id, self.name, amount) for n in acts]
        return credits


class TurnReward(Rule):
    """Reward of each act, `score(trace, node, task)`, paid once its round is answered. A score of None pays nothing."""

    def __init__(
        self,
        score: Callable[[Trace, Node, Task], float | None],
        name: str = "turn",
        roles: tuple[str, ...] | None = None,
    ) -> None:
        self.score, self.name, self.roles = score, name, roles

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "act" or (self.roles is not None and node.role not in self.roles):
            return ()
        amount = self.score(trace, node, task)
        return () if amount is None else (Credit(node.id, self.name, amount),)
