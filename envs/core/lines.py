"""Branches of an episode: the coroutine of `run`, and those of each `ep.all`."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterator
from types import CoroutineType
from typing import Any

from ...agents.basics.failures import WorkflowError
from ...own import defined, foreign
from .fast import new_use
from .records import ANSWERED, EMPTY, Node, RunCoroutine

START = new_use("", EMPTY)  # marks a branch that has not started; sending None starts it
START.state = ANSWERED


class Line:
    """One branch: the whole of `run`, or one coroutine of an `ep.all`."""

    __slots__ = ("cancelled", "coroutine", "count", "index", "join", "node", "prefix", "tails")

    def __init__(self, coroutine: RunCoroutine, prefix: str, tails: tuple[str, ...]) -> None:
        self.coroutine = coroutine
        self.prefix = prefix  # of the ids of its nodes
        self.tails = tails  # ids of the nodes that the branch's next node follows
        self.count = 0
        self.cancelled = False
        self.node: Node = START  # what it waits for
        self.join: OpenJoin | None = None  # the join it is an arm of
        self.index = 0

    def outward(self) -> Iterator[Line]:
        """Return this branch, and the branches in which it stands, from the inside out."""
        line: Line | None = self
        while line is not None:
            yield line
            line = None if line.join is None else line.join.parent


class OpenJoin:
    """`ep.all` whose branches are running."""

    __slots__ = ("arms", "left", "owners", "parent", "results")

    def __init__(self, parent: Line, width: int) -> None:
        self.parent = parent
        self.results: list[object] = [None] * width
        self.left = width
        self.arms: list[Line] = []
        self.owners: dict[str, int] = {}  # agent -> the branch in which it acts


def begun(method: Any, *args: object) -> RunCoroutine:
    """Return the coroutine of `run` or `grade`. A plain function is refused with advice."""
    made: object = None
    broken: Exception | None = None
    try:
        made = method(*args)
    except Exception as error:
        broken = error
    if type(made) is CoroutineType or isinstance(made, Coroutine):
        return made
    name = type(method.__self__).__name__
    refused = WorkflowError(f"{name}.{method.__name__} must be an `async def`")
    refused.where = defined(method)
    raise refused from broken


def place_of(branch: Line) -> str:
    """Return the file and line where a branch waits."""
    for line in branch.outward():
        coroutine: Any = line.coroutine
        places = []
        while getattr(coroutine, "cr_frame", None) is not None:
            places.append((coroutine.cr_frame.f_code.co_filename, coroutine.cr_frame.f_lineno))
            coroutine = coroutine.cr_await
        own = [(file, line) for file, line in places if not foreign(file)]
        if own:
            return f"{os.path.basename(own[-1][0])}:{own[-1][1]}"
    return ""


def close(coroutine: RunCoroutine) -> None:
    """End a coroutine in any state."""
    try:
        coroutine.close()
    except RuntimeError:  # it awaits in a `finally`, which no driver answers: it is dropped
        pass
    except ValueError:  # the coroutine itself is running (an ending was raised inside it)
        pass
