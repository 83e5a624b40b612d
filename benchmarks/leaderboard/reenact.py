"""Play a recorded episode again from its replies, without generating anything: does the environment tell
the same story?

The environment asks, the recording answers. Prompts, parsed values, outcome, metrics and credits are then the
environment's own, so whatever somebody changed in a trace shows as a difference that has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...agents.answers import ReplyMeta
from ...agents.failures import Ended, Infrastructure
from ...agents.roles import MAX_REPLY
from ...envs.core.arena import Arena
from ...envs.core.drivers import call_for, take
from ...envs.core.execution import Execution
from ...envs.core.trace import Trace
from ...envs.core.workflow import Node

if TYPE_CHECKING:
    from ...agents.policies import Policy

_COMPARED = ("env_id", "config", "code_hash", "task_id", "data", "ended", "outcome", "grade", "metrics")
OUTSIDE = ("model", "tool")
"""Reasons of an error that came from outside of the environment, which therefore cannot tell it again."""


class Mismatch(ValueError):
    """The recording answers another question than the environment asks."""


class ToolDown(RuntimeError):
    """A tool failed here that the recording could use: nothing follows about the recording."""


def reenact(
    arena: Arena,
    recorded: Mapping[str, Any],
    *,
    tools_again: bool = False,
    players: Mapping[str, Policy] | None = None,
) -> Trace:
    """The trace that the environment makes of the recorded replies; tools are recalled, or called again.

    `players` are asked again, by agent: what they say must be what is recorded.
    """
    task = arena.task(str(recorded["task_id"]))
    execution = arena.start(task, int(recorded["seed"]))
    answers = {node["id"]: node for node in recorded["nodes"]}
    scorer = arena.scorer(task)
    try:
        while execution.ended is Ended.NO:
            pending = execution.pending
            missing = [node.id for node in pending if node.id not in answers]
            for node in pending:
                if node.id in answers and execution.ended is Ended.NO:
                    _answer(arena, execution, node, answers[node.id], tools_again, players or {})
            if missing and execution.ended is Ended.NO:
                _end_as_recorded(execution, recorded, missing)
            scorer.advance(execution.trace)
    finally:
        arena.toolbox.close(execution)
    trace = execution.trace
    scorer.advance(trace)
    if isinstance(execution.exception, Infrastructure) and recorded["ended"] != "error":
        raise ToolDown(str(trace.error))
    return arena.label(trace, int(recorded.get("sample", 0)))


def differences(recorded: Mapping[str, Any], again: Trace) -> Iterator[str]:
    """List where a recording and its re-enactment differ, each with both values."""
    ours = again.to_dict(volatile=False)
    if "score" not in (recorded.get("metrics") or {}):  # recorded before every episode had one
        ours["metrics"].pop("score", None)
    outside = ours["ended"] == "error" and ours["reason"] in OUTSIDE
    for name in (*_COMPARED, "reason", *(() if outside else ("error",))):
        yield from _difference(name, recorded.get(name), ours[name])
    theirs, mine = {n["id"]: n for n in recorded["nodes"]}, {n["id"]: n for n in ours["nodes"]}
    if len(theirs) < len(recorded["nodes"]):
        ids = [n["id"] for n in recorded["nodes"]]
        yield f"node {next(id for id in ids if ids.count(id) > 1)} stands there twice"
    for id in sorted(theirs.keys() ^ mine.keys()):
        yield f"node {id} is {'not asked by the environment' if id in theirs else 'missing'}"
    if list(theirs) != list(mine) and theirs.keys() == mine.keys():
        yield "its nodes do not stand in their order"
    for id in [id for id in mine if id in theirs]:
        for field in mine[id]:
            yield from _difference(f"node {id}, {field}", theirs[id].get(field), mine[id][field])
        for field in sorted(theirs[id].keys() - mine[id].keys() - {"meta"}):
            yield f"node {id} has {field!r:.60}, which no node has"
    for field in sorted(recorded.keys() - ours.keys() - {"tags"}):
        yield f"it has {field!r:.60}, which no trace has"


def _answer(
    arena: Arena,
    execution: Execution,
    node: Node,
    row: Mapping[str, Any],
    tools_again: bool,
    players: Mapping[str, Policy],
) -> None:
    if row["kind"] != node.kind:
        raise Mismatch(
            f"node {node.id} is recorded as {row['kind']!r}, but the environment asks for {node.kind!r}"
        )
    if node.kind == "act":
        from ...agents.policies import Answer

        if (player := players.get(node.agent or "")) is not None:
            _asked_again(execution, node, row, player)
        take(execution, node, Answer(row["reply"] or "", dict(row.get("meta") or {})))
    elif tools_again:
        arena.toolbox.call(execution, node)
    elif row["error"] is not None:
        node.meta = ReplyMeta(raised=ReplyMeta.of(row.get("meta")).raised)  # whether the tool was at fault
        execution.fail(node, row["error"])
    else:
        execution.give(node, row["result"], row["private"])


def _asked_again(execution: Execution, node: Node, row: Mapping[str, object], player: Policy) -> None:
    episode = f"{execution.task.id}#"
    reply = player.act(call_for(execution, node, episode, reference=getattr(player, "sees_reference", False)))
    if isinstance(reply, str) and reply[:MAX_REPLY] != row["reply"]:
        raise Mismatch(
            f"node {node.id}, reply: recorded {row['reply']!r:.60}, but {node.agent} as it is named says {reply!r:.60}"
        )


def _end_as_recorded(execution: Execution, recorded: Mapping[str, object], asked: list[str]) -> None:
    """A recording may stop before the environment does, when a deadline or a failing model ended it."""
    ended, reason = recorded["ended"], str(recorded.get("reason"))
    if ended == "truncated" and execution.budget.seconds is not None:
        execution.truncate(f"more than {execution.budget.seconds} s")
    elif ended == "error" and reason in OUTSIDE:
        execution.abort(RuntimeError(str(recorded.get("error"))), reason)
    else:
        raise Mismatch(
            f"the environment asks for node {asked[0]}, which a recording that ended as {ended!r} ({reason:.60}) lacks"
        )


def _difference(name: str, theirs: object, ours: object) -> Iterator[str]:
    if not _same(theirs, ours):
        yield f"{name}: recorded {theirs!r:.80}, recomputed {ours!r:.80}"


def _same(a: object, b: object) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b)) or (a != a and b != b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
