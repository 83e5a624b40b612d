"""Lines of control of an episode: the coroutines of `run` and of the arms of each `ep.all`."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from types import CoroutineType
from typing import Any

from ...agents.basics.failures import WorkflowError
from ...own import defined, foreign
from .fast import new_use
from .records import ANSWERED, EMPTY, Node, Program

START = new_use("", EMPTY)  # what a branch that nobody has run waits for; its result is None
START.state = ANSWERED


class Line:
    """One line of control: the whole of `run`, or one arm of an `ep.all`."""

    __slots__ = ("cancelled", "coroutine", "count", "index", "join", "node", "prefix", "tails")

    def __init__(self, coroutine: Program, prefix: str, tails: tuple[str, ...]) -> None:
        self.coroutine = coroutine
        self.prefix = prefix  # of the ids of its nodes
        self.tails = tails  # ids of the nodes that its next node follows
        self.count = 0
        self.cancelled = False
        self.node: Node = START  # what it waits for
        self.join: OpenJoin | None = None  # the join it is an arm of
        self.index = 0


class OpenJoin:
    """An `ep.all` whose arms run."""

    __slots__ = ("arms", "left", "owners", "parent", "results")

    def __init__(self, parent: Line, width: int) -> None:
        self.parent = parent
        self.results: list[object] = [None] * width
        self.left = width
        self.arms: list[Line] = []
        self.owners: dict[str, int] = {}  # agent -> the arm it stands in


def begun(method: Any, *args: object) -> Program:
    """The coroutine of `run` or `grade`; a plain function is refused with advice."""
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
    """File and line where a branch waits."""
    at: Line | None = branch
    while at is not None:
        coroutine: Any = at.coroutine
        places = []
        while getattr(coroutine, "cr_frame", None) is not None:
            places.append((coroutine.cr_frame.f_code.co_filename, coroutine.cr_frame.f_lineno))
            coroutine = coroutine.cr_await
        own = [(file, line) for file, line in places if not foreign(file)]
        if own:
            return f"{os.path.basename(own[-1][0])}:{own[-1][1]}"
        at = at.join.parent if at.join is not None else None
    return ""


def close(coroutine: Program) -> None:
    """End a coroutine, whatever it is at."""
    try:
        coroutine.close()
    except RuntimeError:  # it awaits in a `finally`: nobody answers any more, and it is dropped
        pass
    except ValueError:  # it is the one that is running (an ending raised from inside)
        pass
