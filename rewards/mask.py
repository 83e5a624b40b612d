"""Rewards of M-ASK as published: F1 for the plan and the answers, and the gain of F1 for the acts between them.

    planner    F1 of its own final answer
    answer_t   F1(a_t)
    search_t, summary_t, update_t    F1(a_t) − F1(a_{t−1})

Acts of a turn without an answer earn nothing, such as a search act that ends the episode. The reward of the format is a
separate component (`FormatReward`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ..envs.core.ledger import Credit, Rule
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node
from .metrics import exact_match, f1


class MaskCredit(Rule):
    """Rule with the rewards of the module's docstring. Credits are given as soon as an answer is known."""

    name = "mask"

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        gold, turn = task.reference["answers"], node.turn
        if node.role == "planner":
            return [Credit(node.id, "plan", f1(node.value["final"], gold))]
        if node.role != "answerer":
            return []
        score = f1(node.value, gold)
        credits = [Credit(node.id, "answer", score)]
        if turn:
            before = _answer(trace, turn - 1)
            gain = score - (f1(before.value, gold) if before is not None else 0.0)
            for other in trace.nodes:
                if other.turn == turn and other.role in ("searcher", "summarizer", "updater"):
                    credits.append(Credit(other.id, "gain", gain))
        return credits

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        gold = task.reference["answers"]
        scores = [f1(n.value, gold) for n in trace.acts("answerer")]
        plans = [f1(n.value["final"], gold) for n in trace.acts("planner")]
        final = str((trace.outcome or {}).get("answer") or "")
        reached = f1(final, gold)
        gains = [b - a for a, b in pairwise(scores)]
        filings = [n.value["kind"] for n in trace.acts("updater")]
        return {
            "f1": reached,
            "em": exact_match(final, gold),
            "plan_f1": plans[0] if plans else 0.0,
            "answer0_f1": scores[0] if scores else 0.0,
            "gain_over_plan": reached - (plans[0] if plans else 0.0),
            "gain_per_turn": sum(gains) / len(gains) if gains else 0.0,
            "searches": float(len(trace.uses("retrieve"))),
            "ended_by_searcher": float(bool((trace.outcome or {}).get("ended_by_searcher"))),
            "updates": float(filings.count("update")),
            "adds": float(filings.count("add")),
        }


def _answer(trace: Trace, turn: int) -> Node | None:
    return next((n for n in trace.nodes if n.role == "answerer" and n.turn == turn), None)
