"""Play a recorded episode again from its replies, without generating anything: does the environment tell
the same story?

The environment asks, the recording answers. Prompts, parsed values, outcome, metrics and credits are then the
environment's own, so whatever somebody changed in a trace shows as a difference that has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..envs.arena import Arena
from ..envs.drivers import take
from ..envs.execution import Ended, Execution
from ..envs.trace import Trace
from ..envs.workflow import Node

_COMPARED = ("ended", "outcome", "grade", "metrics", "nodes")


class Mismatch(ValueError):
    """The recording answers another question than the environment asks."""


def reenact(arena: Arena, recorded: Mapping[str, Any], *, tools_again: bool = False) -> Trace:
    """The trace that the environment makes of the recorded replies; tools are recalled, or called again."""
    task = arena.task(str(recorded["task_id"]))
    execution = arena.start(task, int(recorded["seed"]))
    answers = {node["id"]: node for node in recorded["nodes"]}
    scorer = arena.scorer(task)
    try:
        while execution.ended is Ended.NO:
            pending = execution.pending
            if any(node.id not in answers for node in pending):
                _end_as_recorded(execution, recorded, [n.id for n in pending if n.id not in answers])
                break
            for node in pending:
                _answer(arena, execution, node, answers[node.id], tools_again)
            scorer.advance(execution.trace)
    finally:
        arena.toolbox.close(execution)
    trace = execution.trace
    scorer.advance(trace)
    trace = arena.label(trace, int(recorded.get("sample", 0)))
    return trace


def differences(recorded: Mapping[str, Any], again: Trace) -> Iterator[str]:
    """Where a recording and its re-enactment differ, each with both values."""
    ours = again.to_dict(volatile=False)
    for name in _COMPARED:
        if name != "nodes":
            yield from _difference(name, recorded.get(name), ours[name])
    theirs, mine = {n["id"]: n for n in recorded["nodes"]}, {n["id"]: n for n in ours["nodes"]}
    for id in sorted(theirs.keys() ^ mine.keys()):
        yield f"node {id} is {'not asked by the environment' if id in theirs else 'missing'}"
    for id in theirs.keys() & mine.keys():
        for field in mine[id]:
            yield from _difference(f"node {id}, {field}", theirs[id].get(field), mine[id][field])


def _answer(
    arena: Arena, execution: Execution, node: Node, row: Mapping[str, Any], tools_again: bool
) -> None:
    if row["kind"] != node.kind:
        raise Mismatch(
            f"node {node.id} is recorded as {row['kind']!r}, but the environment asks for {node.kind!r}"
        )
    if node.kind == "act":
        from ..agents.policies import Answer

        take(execution, node, Answer(row["reply"] or "", dict(row.get("meta") or {})))
    elif tools_again:
        arena.toolbox.call(execution, node)
    elif row["error"] is not None:
        execution.fail(node, row["error"])
    else:
        execution.give(node, row["result"], row["private"])


def _end_as_recorded(execution: Execution, recorded: Mapping[str, Any], asked: list[str]) -> None:
    """A recording may stop before the environment does, when a deadline or a failing model ended it."""
    if recorded["ended"] == "truncated":
        execution.truncate(str(recorded.get("reason") or "recorded"))
    elif recorded["ended"] == "error":
        execution.abort(RuntimeError(str(recorded.get("error"))), str(recorded.get("reason") or "recorded"))
    else:
        raise Mismatch(
            f"the environment asks for node {asked[0]}, which the recording of a finished episode lacks"
        )


def _difference(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    if not _same(theirs, ours):
        yield f"{name}: recorded {theirs!r:.80}, recomputed {ours!r:.80}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b)) or (a != a and b != b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
