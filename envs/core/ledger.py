"""The ledger of rewards: every amount belongs to a node and a component.

A *rule* is a pure function of the episode. `on_node(trace, node, task)` returns credits after each round, and
`on_end(trace, task)` when the episode is over. A plain function is an `on_end`. The `Scorer` applies rules round by
round, to the trace at the end of each round. So the AEC interface, a collector, a fork and a rescored trace book the
same credits, for any order of the branches of an `ep.all` and of their answers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ...agents.basics.failures import RewardError as RewardError
from ...own import at, defined
from .records import Credit as Credit
from .records import Node, totals_by_node
from .tasks import Task
from .trace import Trace


@runtime_checkable
class Rule(Protocol):
    """Reward rule: a name, and credits after each round or at the end. A subclass implements the methods that it needs.

    A rule may also have `metrics(trace, task) -> dict[str, float]`: figures that are reported and not rewarded. A rule
    without it has one metric with its own name: the mean reward of an act, averaged over the agents that it
    rewarded.
    """

    name: str

    def on_node(self, trace: Trace, node: Node, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the node's round is answered."""
        return ()

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the credits that are known when the episode is over."""
        return ()


class FunctionRule(Rule):
    """Rule made of a plain function `(trace, task)`.

    The function may return credits, a mapping from node id (or agent) to amount, or one number for every act.
    """

    def __init__(self, fn: Callable[[Trace, Task], object], name: str | None = None) -> None:
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__).strip("_<>")
        if inspect.iscoroutinefunction(fn):
            raise RewardError(
                f"reward {self.name!r} is an `async def`; rewards only compute: ask judges and tools in "
                f"`async def grade` of the workflow{at(defined(fn))}"
            )
        _check_call(fn, ("trace", "task"), self.name)

    def on_end(self, trace: Trace, task: Task) -> Iterable[Credit]:
        """Return the result of the function as credits."""
        payment = self.fn(trace, task)
        acts = trace.acts()
        if isinstance(payment, bool | int | float):
            return [Credit(n.id, self.name, float(payment)) for n in acts]
        if isinstance(payment, Mapping):
            names = {n.id for n in acts} | {n.agent for n in acts} | {n.role for n in acts}
            odd = [key for key in payment if key not in names]
            if odd:
                raise RewardError(
                    f"reward {self.name!r} names {odd[0]!r}, which is no act, agent or role of the trace{at(defined(self.fn))}"
                )
            return [
                Credit(n.id, self.name, payment[key])
                for n in acts
                for key in dict.fromkeys((n.id, n.agent, n.role))
                if key in payment
            ]
        if payment is None or isinstance(payment, str) or not isinstance(payment, Iterable):
            raise RewardError(
                f"reward {self.name!r} gave {payment!r:.80}; give a number, a dict by node, agent or role, or Credits{at(defined(self.fn))}"
            )
        return payment


def _check_call(fn: Callable[..., object], args: Sequence[str], name: str) -> None:
    """Refuse, before an episode is played, a reward function whose signature does not fit."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        called = f"{getattr(fn, '__name__', name)}({', '.join(args)})"
        raise RewardError(f"reward {name!r} is called as {called}: {error}{at(defined(fn))}") from None
    except ValueError:  # a built-in function without a signature
        pass


def as_rule(reward: object) -> Rule:
    """Make a rule of a rule or a plain function. Anything else is an error that says what is accepted."""
    if hasattr(reward, "on_end") or hasattr(reward, "on_node"):
        for half, args in (("on_node", ("trace", "node", "task")), ("on_end", ("trace", "task"))):
            if callable(method := getattr(reward, half, None)):
                _check_call(method, args, getattr(reward, "name", type(reward).__name__))
        return reward  # type: ignore[return-value]
    if callable(reward):
        return FunctionRule(reward)
    raise RewardError(
        f"{reward!r} is no reward: give a function (trace, task), or an object with on_node / on_end"
    )


class Scorer:
    """Scorer of one episode: it applies the rules and books their credits, in the same way for every driver."""

    __slots__ = ("booked", "ended", "headline", "ids", "metrics", "paid", "rules", "seen", "task")

    def __init__(self, rules: Sequence[Rule], task: Task, headline: str = "score") -> None:
        self.rules, self.task, self.headline = rules, task, headline
        self.booked: list[Credit] = []
        self.paid: dict[str, list[Credit]] = {r.name: [] for r in rules if not hasattr(r, "metrics")}
        self.metrics: dict[str, float] = {}
        self.seen: set[str] = set()
        self.ids: set[str] = set()
        self.ended = False

    def fork(self) -> Scorer:
        """Copy the booked credits, for a fork of the episode."""
        twin = Scorer(self.rules, self.task, self.headline)
        twin.paid = {name: list(credits) for name, credits in self.paid.items()}
        twin.booked, twin.metrics = list(self.booked), dict(self.metrics)
        twin.seen, twin.ids, twin.ended = set(self.seen), set(self.ids), self.ended
        return twin

    def advance(self, trace: Trace, asking: int | None = None) -> list[Credit]:
        """Book the rounds that were completed since the last call. Return only their credits.

        `asking` is the round whose requests are still open. An episode that failed earns nothing more.
        """
        self.show(trace)
        ended = str(trace.ended)
        if ended == "error" or self.ended:
            return []
        before = len(self.booked)
        rounds: dict[int, list[Node]] = {}
        for node in trace.nodes:
            if node.id not in self.seen and (ended != "no" or asking is None or node.round < asking):
                rounds.setdefault(node.round, []).append(node)
        for number in sorted(rounds) if len(rounds) > 1 else rounds:
            self._round(trace.until(number), rounds[number])
        if ended != "no":
            self.ended = True
            self._end(trace)
        return self.booked[before:]

    def _round(self, trace: Trace, nodes: list[Node]) -> None:
        """Book a round. All of its nodes are answered before a rule gets one of them."""
        for node in nodes:
            self.seen.add(node.id)
            if node.kind == "act":
                self.ids.add(node.id)
        fresh: list[Credit] = []
        self.show(trace)
        for node in nodes:
            for rule in self.rules:
                if hasattr(rule, "on_node") and (credits := rule.on_node(trace, node, self.task)):
                    self._book(rule, credits, fresh)
        self.booked.extend(fresh)

    def _end(self, trace: Trace) -> None:
        fresh: list[Credit] = []
        for rule in self.rules:
            if hasattr(rule, "on_end"):
                self._book(rule, rule.on_end(trace, self.task), fresh)
        for rule in self.rules:
            if rule.name in self.paid:
                self.metrics[rule.name] = _per_agent(trace, self.paid[rule.name])
            else:
                self.metrics.update(rule.metrics(trace, self.task))  # type: ignore[attr-defined]
        first = next(iter(self.metrics.values()), 0.0)
        self.metrics.setdefault("score", self.metrics.get(self.headline, first))
        self.booked.extend(fresh)

    def show(self, trace: Trace) -> Trace:
        """Write the booked credits into a trace of this episode."""
        trace.credits, trace.metrics = self.booked, self.metrics
        return trace

    def _book(self, rule: Rule, credits: Iterable[Credit] | None, fresh: list[Credit]) -> None:
        before = len(fresh)
        for credit in credits or ():
            if not isinstance(credit, tuple) or len(credit) != 3:
                raise RewardError(
                    f"reward {rule.name!r} gave {credit!r:.80}, which is no Credit(node, component, amount){_at(rule)}"
                )
            node, component, amount = credit
            if node not in self.ids:
                raise RewardError(
                    f"reward {rule.name!r} credits node {node!r}, which is no answered act of the trace{_at(rule)}"
                )
            plain = type(amount) is float
            number = plain or (isinstance(amount, int | float) and not isinstance(amount, bool))
            if not number or not math.isfinite(amount):
                raise RewardError(
                    f"reward {rule.name!r} gave {amount!r:.60} to node {node!r} as {component!r}; "
                    f"an amount must be a finite number{_at(rule)}"
                )
            booked = plain and type(credit) is Credit  # a copy would be equal
            fresh.append(credit if booked else Credit(node, component, float(amount)))
        if rule.name in self.paid:
            self.paid[rule.name] += fresh[before:]


def _at(rule: object) -> str:
    """Return the place of a rule in its file."""
    methods = (getattr(type(rule), name, None) for name in ("on_end", "on_node"))
    own = (method for method in methods if method not in (None, Rule.on_end, Rule.on_node))
    return at(defined(getattr(rule, "fn", None) or next(own, type(rule))))


def _per_agent(trace: Trace, paid: Iterable[Credit]) -> float:
    """Return the mean reward of an act: first the mean over each agent's acts, then the mean over the rewarded
    agents.
    """
    totals = totals_by_node(paid)
    by_agent: dict[str | None, list[float]] = {}
    for node in trace.nodes:
        if node.id in totals:
            by_agent.setdefault(node.agent, []).append(totals[node.id])
    means = [math.fsum(amounts) / len(amounts) for amounts in by_agent.values()]
    return math.fsum(means) / len(means) if means else 0.0


def check_names(rules: Sequence[Rule]) -> None:
    """Refuse two rules with the same name, because the same reward would count twice."""
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"two rewards are called {name!r}; give one of them another name")
