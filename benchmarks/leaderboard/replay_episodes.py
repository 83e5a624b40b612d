"""Replay of a recorded episode from its replies, without generation, and comparison with the recording.

The environment makes the prompts, and the recording has the replies. Prompts, parsed values, outcome, metrics and credits are
computed by the environment. So any change of a trace becomes a named difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...agents.answers import Answer, ReplyMeta
from ...agents.basics.failures import Ended, Infrastructure
from ...agents.roles import MAX_REPLY
from ...agents.text.role_prompt import shortened
from ...envs.core.arena import Arena
from ...envs.core.drivers import call_for, take
from ...envs.core.execution import Execution
from ...envs.core.trace import Trace, dumps
from ...envs.core.workflow import Node
from ..evaluation.result_types import NodeJson, TraceJson

if TYPE_CHECKING:
    from ...agents.policies import Policy

_PLACE = re.compile(r" \([\w.<>-]{1,100}:[0-9]{1,9}\)\Z")
LAST_DIGITS = 1e-12
"""Largest relative difference of a number that another machine has computed."""
OUTSIDE = ("model", "tool")
"""Causes of errors from outside of the environment, which a replay cannot reproduce."""


class Mismatch(ValueError):
    """Raised when the recording does not have the act that the environment asks for."""


class ToolDown(RuntimeError):
    """Raised when a tool fails here but not in the recording. Nothing follows about the recording."""


def reenact(
    arena: Arena,
    recorded: TraceJson,
    *,
    tools_again: bool = False,
    players: Mapping[str, Policy] | None = None,
) -> Trace:
    """Return the trace that the environment makes from the recorded replies. Tools are recalled, or called again.

    `players`, by agent, are asked again. Their replies must equal the recorded ones.
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


def written(again: Trace, tags: Mapping[str, object]) -> TraceJson:
    """Return a replayed episode in the form of an entry, with JSON types only."""
    again.tags = dict(tags)
    plain: TraceJson = json.loads(dumps(Trace.from_dict(again.to_dict())))
    return plain


def differences(recorded: TraceJson, ours: TraceJson) -> Iterator[str]:
    """Yield the differences between a recording and its replay, with both values. Tags are not compared.

    Types and the order of keys count. Numbers may differ in their last digits, as they do between machines.
    """
    outside = ours["ended"] == "error" and ours["reason"] in OUTSIDE
    for name in ours.keys() - {"nodes", "tags"} - ({"error"} if outside else set()):
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
        yield from _unlike(f"node {id}", theirs[id], mine[id])
    for field in sorted(recorded.keys() - ours.keys()):
        yield f"it has {field!r:.60}, which no trace has"


def _unlike(name: str, theirs: Mapping[str, object], mine: Mapping[str, object]) -> Iterator[str]:
    """Yield the fields in which a node differs."""
    for field in mine:
        if field == "meta" and mine["kind"] == "use":
            yield from _difference(f"{name}, meta", *map(_placeless, (theirs.get("meta"), mine["meta"])))
        else:
            yield from _difference(f"{name}, {field}", theirs.get(field), mine[field])
    for field in sorted(theirs.keys() - mine.keys()):
        yield f"{name} has {field!r:.60}, which no node has"


def _placeless(meta: object) -> object:
    """Return the metadata of a tool call without the line of code where it failed, which differs between versions."""
    if isinstance(meta, Mapping) and isinstance(raised := meta.get("raised"), str):
        return {**meta, "raised": _PLACE.sub("", raised)}
    return meta


def _answer(
    arena: Arena,
    execution: Execution,
    node: Node,
    row: NodeJson,
    tools_again: bool,
    players: Mapping[str, Policy],
) -> None:
    if row["kind"] != node.kind:
        raise Mismatch(
            f"node {node.id} is recorded as {row['kind']!r}, but the environment asks for {node.kind!r}"
        )
    if node.kind == "act":
        answer = Answer(row["reply"] or "", dict(row.get("meta") or {}))
        if (player := players.get(node.agent or "")) is not None:
            answer = _asked_again(execution, node, row, player) or answer
        elif answer.meta.prompt_cut is not None:
            _could_be_cut(execution, node, answer.meta.prompt_cut)
        take(execution, node, answer)
    elif tools_again:
        arena.toolbox.call(execution, node)
    elif row["error"] is not None:
        # this says whether the tool was at fault
        node.meta = ReplyMeta(raised=ReplyMeta.of(row.get("meta")).raised)
        execution.fail(node, row["error"])
    else:
        execution.give(node, row["result"], row["private"])


def _asked_again(
    execution: Execution, node: Node, row: Mapping[str, object], player: Policy
) -> Answer | None:
    """Return the answer of a player that comes with unitymas, which must equal the recorded one; None if it is async."""
    episode = f"{execution.task.id}#"
    reply = player.act(call_for(execution, node, episode, reference=getattr(player, "sees_reference", False)))
    if not isinstance(reply, str):
        return None
    if reply[:MAX_REPLY] != row["reply"]:
        raise Mismatch(
            f"node {node.id}, reply: recorded {row['reply']!r:.60}, but {node.agent} as it is named says {reply!r:.60}"
        )
    return Answer(reply)


def _could_be_cut(execution: Execution, node: Node, cut: Mapping[str, object]) -> None:
    """Raise an error for a claimed cut of a prompt that its role's fields do not allow."""
    messages = call_for(execution, node, "").messages
    whole = sum(n for n in cut.values() if type(n) is int)
    # the least that may have been asked for: more characters never leave out fewer
    low, high = 1, max(1, whole)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if sum(shortened(messages, middle)[1].values()) >= whole else (middle + 1, high)
        )
    if list(cut.items()) != list((ours := shortened(messages, low)[1]).items()):
        raise Mismatch(
            f"node {node.id}, meta.prompt_cut: {dict(cut)!r:.80}, but so much of this prompt is cut as {ours!r:.80}"
        )


def _end_as_recorded(execution: Execution, recorded: Mapping[str, object], asked: list[str]) -> None:
    """End the replay where the recording ended, because of a deadline or a failed model."""
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
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b) or (a != b and abs(a - b) <= LAST_DIGITS * max(abs(a), abs(b)))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b
