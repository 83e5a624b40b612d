"""Substitutes: the reward that an act would earn with another reply.

The episode is replayed up to the act, with the replies and tool results of its trace. Then the act gets the substitute as
its reply, and a team plays the rest. This gives any trainer a reward function for the text of a role: the reward that
the whole team earns after it (`Trace.reward_of`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ..agents.basics.failures import Ended, WorkflowError
from ..agents.basics.hints import nearest, say_once
from ..agents.team import BoundTeam, Team, TeamLike
from .core.arena import Arena
from .core.branch import Branch
from .core.drivers import EnvLike, arena_of, run_sync, take
from .core.execution import Execution
from .core.records import Credit, Node
from .core.tasks import Task
from .core.trace import Trace, jsonable

Of = Literal["node", "role", "team"]
_number = itertools.count()


def reward_of(trace: Trace, node: str, text: str | Sequence[str], **how: Any) -> float | list[float]:
    """Return the result of `Trace.reward_of`: one number for a text, a list for several texts."""
    rewards = run_sync(areward_of(trace, node, [text] if isinstance(text, str) else text, **how))
    return rewards[0] if isinstance(text, str) else rewards


async def areward_of(
    trace: Trace,
    node: str,
    texts: Sequence[str],
    *,
    team: TeamLike | None = None,
    env: EnvLike | None = None,
    of: Of = "node",
    component: str | None = None,
) -> list[float]:
    """Return the reward of each text in place of the node's reply, as `Trace.reward_of` describes it."""
    if of not in ("node", "role", "team"):
        raise ValueError(f"of={of!r}: use 'node', 'role' or 'team'")
    if (
        isinstance(texts, Mapping)
        or not isinstance(texts, Iterable)
        or not all(isinstance(t, str) for t in texts)
    ):
        raise TypeError(f"reward_of takes a text or a list of texts, got {texts!r:.60}")
    asked = trace.node(node)
    if asked.kind != "act":
        raise WorkflowError(
            f"node {node} is a use of the tool {asked.tool!r}; only replies can be substituted"
        )
    arena, players = _where(trace, env), _who(trace, team)
    bound = players.bind(arena.roles, expert=arena.expert)

    async def one(text: str) -> float:
        branch = await _played(trace, asked, text, arena, bound)
        if branch.play.ended is Ended.ERROR:
            raise WorkflowError(f"after {text!r:.60} at node {node} the episode failed: {branch.trace.error}")
        paid = [c for c in branch.scorer.booked if component is None or c.component == component]
        if component is not None and not paid:
            names = dict.fromkeys(c.component for c in (*trace.credits, *branch.scorer.booked))
            if component not in names:  # perhaps it is rare, so the caller's work goes on
                say_once(
                    f"reward_of(component={component!r}): no such reward was paid; {nearest(component, names, 'paid were')}"
                )
        return float(sum(c.amount for c in paid if _counts(c, asked, branch.trace, of)))

    async with bound:
        return list(await asyncio.gather(*map(one, texts)))


def _where(trace: Trace, env: EnvLike | None) -> Arena:
    if env is not None:
        return arena_of(env)
    if trace.origin is None:
        raise ValueError(
            f"this trace of {trace.env_id} does not tell where it was played, for it was read, or played in another process; "
            "say where: reward_of(…, env=…, team=…)"
        )
    arena: Arena = trace.origin[0]
    return arena


def _who(trace: Trace, team: TeamLike | None) -> Team:
    if team is None and (trace.origin is None or trace.origin[1] is None):  # a step at a time, by the user
        raise ValueError("say who plays on after the substitute: reward_of(…, team=…)")
    return Team.of(trace.origin[1] if team is None else team)


def _counts(credit: Credit, asked: Node, trace: Trace, of: Of) -> bool:
    if of == "role":
        return trace.node(credit.node).role == asked.role
    return of == "team" or credit.node == asked.id


async def _played(trace: Trace, asked: Node, text: str, arena: Arena, bound: BoundTeam) -> Branch:
    """Play the episode to its end, with `text` as the reply of the node `asked`."""
    task = _task(trace, arena)
    play = arena.start(task, trace.seed)
    recorded = {n.id: n for n in trace.nodes if n.round <= asked.round and n is not asked}
    while pending := [n for n in play.pending if n.id in recorded]:
        for node in pending:
            _recall(play, node, recorded[node.id], trace)
    try:
        node = next(n for n in play.pending if n.id == asked.id)
    except StopIteration:
        raise _diverged(trace, asked) from None
    _compare(trace, node, asked)
    # each substitute has its own name, because an engine stores tokens by episode and node
    branch = Branch(
        arena, bound, play, arena.scorer(task), f"{task.id}#{trace.sample}/{asked.id}/{next(_number)}"
    )
    take(play, node, text)
    return await branch.finish()


def _task(trace: Trace, arena: Arena) -> Task:
    if trace.origin is not None and trace.origin[0] is arena and trace.origin[2] is not None:
        task: Task = trace.origin[2]
        return task
    return arena.task(trace.task_id)


def _recall(play: Execution, node: Node, known: Node, trace: Trace) -> None:
    _compare(trace, node, known)
    if node.kind == "act":
        take(play, node, known.text or "")
    elif known.error is not None:
        play.fail(node, known.error)
    else:
        play.give(node, known.result, known.private)


def _compare(trace: Trace, node: Node, known: Node) -> None:
    same = node.agent == known.agent and node.tool == known.tool
    if (
        not same
        or jsonable(node.messages) != jsonable(known.messages)
        or jsonable(node.args) != jsonable(known.args)
    ):
        raise _diverged(trace, known)


def _diverged(trace: Trace, node: Node) -> WorkflowError:
    return WorkflowError(
        f"the environment does not ask node {node.id} as the trace of task {trace.task_id!r} holds it; "
        f"was it made with other arguments or data than {trace.env_id} then?"
    )
