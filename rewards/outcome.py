"""Outcome rewards of the published teams: F1 of the answer (RAG), accuracy (math), gains of the pass rate (code)."""

from __future__ import annotations

from collections.abc import Iterable

from ..envs.core.ledger import Credit, Rule
from ..envs.core.tasks import Task
from ..envs.core.trace import Trace
from ..envs.core.workflow import Node
from ..envs.tools.math.equal import math_equal
from .metrics import exact_match, f1
from .rules import FormatReward, TrajectoryReward, TurnReward


def answer_of(trace: Trace, name: str = "answer") -> str:
    """Return a field of the outcome as text; empty if the episode ended without an outcome."""
    value = (trace.outcome or {}).get(name)
    return "" if value is None else str(value)


def answer_f1(trace: Trace, task: Task) -> float:
    """Return the F1 of the outcome's answer."""
    return f1(answer_of(trace), task.reference["answers"])


def answer_em(trace: Trace, task: Task) -> float:
    """Return the exact match of the outcome's answer: 1 or 0."""
    return exact_match(answer_of(trace), task.reference["answers"])


def answer_right(trace: Trace, task: Task) -> float:
    """Return 1 if the outcome's answer and the task's answer are mathematically equal, else 0."""
    return float(_equals(answer_of(trace), task))


def _equals(answer: str, task: Task) -> bool:
    gold = task.reference["answer"]
    return any(math_equal(answer, str(g)) for g in (gold if isinstance(gold, tuple) else (gold,)))


class AnswerF1(TrajectoryReward):
    """Reward of the final answer's F1, paid in full to every act (the published default of RAG)."""

    def __init__(self) -> None:
        super().__init__(answer_f1, name="outcome")

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        gold, answer = task.reference["answers"], answer_of(trace)
        return {"f1": f1(answer, gold), "em": exact_match(answer, gold)}


class Accuracy(TrajectoryReward):
    """Reward of 1 for a right final answer, paid in full to every act (the published default of math)."""

    def __init__(self) -> None:
        super().__init__(answer_right, name="outcome")

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        return {"accuracy": answer_right(trace, task)}


class AnswerEM(TrajectoryReward):
    """Reward of the final answer's exact match, paid in full to every act (Dr. MAS's search team)."""

    def __init__(self) -> None:
        super().__init__(answer_em, name="outcome")

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        gold, answer = task.reference["answers"], answer_of(trace)
        return {"f1": f1(answer, gold), "em": exact_match(answer, gold), "calls": float(len(trace.acts()))}


class OwnAccuracy(TurnReward):
    """Reward of 1 for each act whose own boxed answer is right (MARTI's debate and chain)."""

    def __init__(self) -> None:
        super().__init__(_own_right, name="own")

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        return {"accuracy": answer_right(trace, task)}


def _own_right(trace: Trace, node: Node, task: Task) -> float:
    return float(node.value is not None and _equals(str(node.value), task))


class DrMasFormat(FormatReward):
    """Penalty of 0.1 for a malformed call of Dr. MAS's math team."""

    def __init__(self) -> None:
        super().__init__(0.1)


class SearchFormat(FormatReward):
    """Penalty of 0.01 for a malformed call of Dr. MAS's search team."""

    def __init__(self) -> None:
        super().__init__(0.01)


class CodeCredit(Rule):
    """Rule of the reflective code team, from R_t: the share of *hidden* tests that the program of turn t passes.

    planner_t, coder_t    R_0 in the first turn, then R_t − R_{t−1}
    reflector_t           R_{t+1} − R_t, paid when the next program is verified.
    """

    name = "code"

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "use" or node.tool != "verify":
            return
        rates = [pass_rate(n) for n in trace.uses("verify")]
        rates = rates[: trace.uses("verify").index(node) + 1]
        t = len(rates) - 1
        gain = rates[t] - (rates[t - 1] if t else 0.0)
        for other in trace.nodes:
            paid = t - 1 if other.role == "reflector" else t  # its advice shows in the next program
            if other.kind == "act" and other.turn == paid:
                yield Credit(other.id, "progress", gain)

    def metrics(self, trace: Trace, task: Task) -> dict[str, float]:
        """Return the figures to report."""
        rates = [pass_rate(n) for n in trace.uses("verify")]
        last = rates[-1] if rates else 0.0
        return {
            "pass_rate": last,
            "all_passed": float(last == 1.0),
            "turns": float(len(rates)),
            "first_pass_rate": rates[0] if rates else 0.0,
            "visible_passed": float(bool((trace.outcome or {}).get("visible_passed"))),
        }


def pass_rate(node: Node) -> float:
    """Return the share of hidden tests that the program passed; 0 if the verifier itself failed."""
    return float((node.private or {}).get("pass_rate", 0.0))


class CoderTesterCredit(CodeCredit):
    """Rule of Stronger-MAS's code team, for each turn whose program is verified.

    The coder earns 2 × the pass rate. The tester earns the golden rate plus the pass rate. The golden rate is the share of
    the tester's tests that the task's reference solution passes. It is 0 for a task without a reference solution.
    """

    name = "coder_tester"

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known once the round of this node is answered."""
        if node.kind != "use" or node.tool != "verify":
            return
        turn = trace.uses("verify").index(node)
        golden = float((node.private or {}).get("golden", 0.0))
        for other in trace.nodes:
            if other.turn == turn and other.role == "coder":
                yield Credit(other.id, "passes", 2.0 * pass_rate(node))
            elif other.turn == turn and other.role == "tester":
                yield Credit(other.id, "golden", golden)
                yield Credit(other.id, "passes", pass_rate(node))
