"""Tools of workflows.

A tool is a function with one of three kinds:

    pure         on replay, results come from the journal
    session      a simulator with state: each episode opens one, and a fork or a restored episode rebuilds it by replay
    unforkable   an episode that has used the tool cannot be forked; the error names the tool

Async tools run on one background loop, with any driver. In an asynchronous driver, blocking tools run in a bounded pool of
threads.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from ...agents.basics.failures import Infrastructure as Infrastructure
from ...agents.basics.json_types import JsonView
from ...agents.basics.renamed import renamed
from ...agents.basics.threads import Background

ToolKind = Literal["pure", "session", "unforkable"]
__getattr__ = renamed(__name__, {"Kind": "ToolKind"})

About: TypeAlias = JsonView
"""Description of a tool for a model: name, description, and JSON schema of the arguments."""
Teller: TypeAlias = About | Callable[[str], Iterable[About]] | None
"""Description of a tool, or a function that describes several tools. Its argument is the name after the colon."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a tool in two parts. `run` sees only the public part; rewards and the trace have both."""

    public: object
    private: object = None


class Session(Protocol):
    """Interface of a simulator. The tool's function makes it, `fn(task, seed)`; each use of the tool calls it."""

    def call(self, **args: object) -> object:
        """Make one step, and return its result."""

    def close(self) -> None:
        """Free the simulator's resources."""


@dataclass(frozen=True)
class Tool:
    """Tool: a function that workflows may use. With `task=True` it gets the whole task, including its reference."""

    fn: Callable[..., Any]
    name: str = ""
    kind: ToolKind = "pure"
    blocking: bool = True  # an asynchronous driver calls it in a thread
    task: bool = False
    deadline: float | None = None  # seconds a call may take
    about: Teller = None
    is_async: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"tool {self.name!r}: {self.fn!r} cannot be called")
        target = self.fn if inspect.isroutine(self.fn) else type(self.fn).__call__
        object.__setattr__(self, "is_async", inspect.iscoroutinefunction(target))
        if not self.name:
            object.__setattr__(self, "name", getattr(self.fn, "__name__", type(self.fn).__name__))


def tool(
    fn: Callable[..., Any] | None = None,
    *,
    name: str = "",
    kind: ToolKind = "pure",
    blocking: bool = True,
    task: bool = False,
    deadline: float | None = None,
    about: Teller = None,
) -> Any:
    """Mark a function as a tool: `@tool`, `@tool(blocking=False)`."""
    make = functools.partial(
        Tool, name=name, kind=kind, blocking=blocking, task=task, deadline=deadline, about=about
    )
    return make if fn is None else make(fn)


# each process has one background loop and one bounded pool, made at first use and again after a fork ----------

background = Background("unitymas-tools").run

_lock = threading.Lock()
_pool: tuple[int, ThreadPoolExecutor] | None = None


def threads() -> ThreadPoolExecutor:
    """Return the pool of threads for blocking tools."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            size = min(32, (os.cpu_count() or 2) * 4)
            _pool = (os.getpid(), ThreadPoolExecutor(size, thread_name_prefix="unitymas-tool"))
        return _pool[1]
