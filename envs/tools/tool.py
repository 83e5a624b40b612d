"""Tools: what a workflow may use, and what a tool may be.

A tool is a function with a kind: `pure` (the journal answers on replay), `session` (a simulator with
state: opened per episode, and rebuilt from the journal when an episode is forked or restored) or
`unforkable` (an episode that used it cannot be forked, and says so). Async tools run on one background
loop, whoever drives; blocking ones in a bounded thread pool when the driver is asynchronous.
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
from ...agents.basics.threads import Background

Kind = Literal["pure", "session", "unforkable"]

About: TypeAlias = JsonView
"""Description of a tool for a model: its name, what it does, and the JSON schema of its arguments."""
Teller: TypeAlias = About | Callable[[str], Iterable[About]] | None
"""Description of a tool, or a function that describes several by the rest of their name."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's result in two parts: `run` sees the public one, rewards and the trace both."""

    public: object
    private: object = None


class Session(Protocol):
    """A simulator: made by the tool's function as `fn(task, seed)`, then called once a use."""

    def call(self, **args: object) -> object:
        """Make one step with these arguments. Return its result."""

    def close(self) -> None:
        """Let go of what the simulator holds."""


@dataclass(frozen=True)
class Tool:
    """A function that workflows may use. `task=True` passes the whole task, reference included."""

    fn: Callable[..., Any]
    name: str = ""
    kind: Kind = "pure"
    blocking: bool = True  # in an asynchronous driver: call it in a thread
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
    kind: Kind = "pure",
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


# one background loop and one bounded pool a process, made at first use and anew after a fork ----------

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
