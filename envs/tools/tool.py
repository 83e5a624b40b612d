"""Tools: what a workflow may use, how they are called, and what a failure means.

A tool is a function with a kind: `pure` (the journal answers on replay), `session` (a simulator with
state: opened per episode, and rebuilt from the journal when an episode is forked or restored) or
`unforkable` (an episode that used it cannot be forked, and says so). Async tools run on one background
loop, whoever drives; blocking ones in a bounded thread pool when the driver is asynchronous.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...agents.threads import contained, contained_async
from ...own import told
from ..core.execution import Execution
from ..core.workflow import TOOLS, Node, ToolError, WorkflowError, unknown

Kind = Literal["pure", "session", "unforkable"]


class Infrastructure(RuntimeError):
    """A failure nobody in the team caused (a server is down). It ends the episode and never trains."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's result in two parts: `run` sees the public one, rewards and the trace both."""

    public: Any
    private: Any = None


class Session(Protocol):
    """A simulator: made by the tool's function as `fn(task, seed)`, then called once a use."""

    def call(self, **args: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tool:
    """A function that workflows may use. `task=True` passes the whole task, reference included."""

    fn: Callable[..., Any]
    name: str = ""
    kind: Kind = "pure"
    blocking: bool = True  # in an asynchronous driver: call it in a thread
    task: bool = False
    deadline: float | None = None  # seconds a call may take
    about: Any = None  # what a model is told of it: a `schemas.About`, or a function of the rest of the name to several
    _is_async: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"tool {self.name!r}: {self.fn!r} cannot be called")
        target = self.fn if inspect.isroutine(self.fn) else type(self.fn).__call__
        object.__setattr__(self, "_is_async", inspect.iscoroutinefunction(target))
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
    about: Any = None,
) -> Any:
    """Mark a function as a tool: `@tool`, `@tool(blocking=False)`."""
    make = functools.partial(
        Tool, name=name, kind=kind, blocking=blocking, task=task, deadline=deadline, about=about
    )
    return make if fn is None else make(fn)


class Toolbox:
    """The tools of an environment by name; answers an execution's `use` nodes."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self.tools: dict[str, Tool] = {}
        for name, given in tools.items():
            if name == TOOLS:
                raise WorkflowError(
                    f"{TOOLS!r} is the name of the tool that tells of the others; choose another"
                )
            self.tools[name] = given if isinstance(given, Tool) else Tool(given, name)
        asks_servers = any(callable(found.about) for found in self.tools.values())
        self._teller = Tool(self.about, TOOLS, blocking=asks_servers)

    def check(self, wanted: tuple[str, ...], workflow: str) -> None:
        """Every tool a workflow declares must be here."""
        for name in wanted:
            if name not in self.tools:
                raise WorkflowError(
                    f"{workflow} uses the tool {name!r}, which nobody gave; pass tools={{{name!r}: …}} to make"
                )

    def forkable(self, execution: Execution) -> str | None:
        """The name of a used tool that forbids forks, or None."""
        for node in execution.nodes:
            if node.kind == "use" and self.find(node).kind == "unforkable":
                return node.tool
        return None

    def find(self, node: Node) -> Tool:
        """The tool a node asks for."""
        return self._teller if node.tool == TOOLS else self._named(node.tool or "")

    def _named(self, name: str) -> Tool:
        found = self.tools.get(name) or self.tools.get(name.partition(":")[0])
        if found is None:
            raise unknown("tool", name, self.tools)
        return found

    def about(self, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """What a model is told of these tools. It is asked for and journalled like any other answer."""
        from .signatures import about

        return [told for name in names for told in about(self._named(name), name)]

    # the two faces -------------------------------------------------------------------------------

    def call(self, execution: Execution, node: Node) -> None:
        """Answer one use node, blocking."""
        found = self.find(node)
        try:
            call, args = self._bound(found, execution, node)
            if found._is_async:
                given = background(call(**args)).result(found.deadline)
            else:
                given = call(**args)
        except Exception as error:
            _fail(found, execution, node, error)
        else:
            _give(execution, node, given)

    async def acall(self, execution: Execution, node: Node) -> None:
        """Answer one use node from an event loop."""
        found = self.find(node)
        try:
            call, args = self._bound(found, execution, node)
            if found._is_async:
                waiting = asyncio.wrap_future(background(call(**args)))
                given = await asyncio.wait_for(waiting, found.deadline)
            elif found.blocking:
                loop = asyncio.get_running_loop()
                waiting = loop.run_in_executor(_threads(), functools.partial(contained(call), **args))
                given = await asyncio.wait_for(waiting, found.deadline)
            else:
                given = call(**args)
        except Exception as error:
            _fail(found, execution, node, error)
        else:
            _give(execution, node, given)

    def _bound(
        self, found: Tool, execution: Execution, node: Node
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        args: dict[str, Any] = dict(node.args or {})
        if found.kind == "session":
            return self._session(found, execution, node).call, args
        if found.task:
            args["task"] = execution.task
        if ":" in (node.tool or "") and found.name != node.tool:
            args["_name"] = (node.tool or "").partition(":")[2]
        return found.fn, args

    def _session(self, found: Tool, execution: Execution, node: Node) -> Session:
        """The episode's simulator; on a fork or after a restore it is played up to here first."""
        opened = execution.sessions.get(found.name)
        if opened is None:
            opened = execution.sessions[found.name] = found.fn(execution.task, execution.seeds[0][1])
            for earlier in execution.canonical():
                if earlier.kind == "use" and earlier is not node and self.find(earlier) is found:
                    opened.call(**dict(earlier.args or {}))
        return opened  # type: ignore[no-any-return]

    def close(self, execution: Execution) -> None:
        """Close the episode's simulators."""
        for session in execution.sessions.values():
            session.close()
        execution.sessions.clear()


def _give(execution: Execution, node: Node, given: Any) -> None:
    if isinstance(given, Result):
        execution.give(node, given.public, given.private)
    else:
        execution.give(node, given)


def _fail(found: Tool, execution: Execution, node: Node, error: Exception) -> None:
    """What nobody in the team caused ends the episode; every other failure is the tool's answer."""
    if isinstance(error, Infrastructure):
        execution.abort(error, "tool")
    else:
        if not isinstance(error, ToolError | TimeoutError | asyncio.TimeoutError):
            node.meta = {"raised": told(error)}
        execution.fail(node, _message(found, error))


def _message(found: Tool, error: BaseException) -> str:
    if isinstance(error, ToolError):
        return str(error)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"{found.name}: no answer within {found.deadline} s"
    return f"{found.name}: {type(error).__name__}: {error}"


# one background loop and one bounded pool a process, made at first use and anew after a fork ----------

_lock = threading.Lock()
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
_pool: tuple[int, ThreadPoolExecutor] | None = None


def background(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the process's background loop; gives a concurrent Future."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="unitymas-tools", daemon=True).start()
            _loop = (os.getpid(), loop)
        return asyncio.run_coroutine_threadsafe(contained_async(work), _loop[1])


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            size = min(32, (os.cpu_count() or 2) * 4)
            _pool = (os.getpid(), ThreadPoolExecutor(size, thread_name_prefix="unitymas-tool"))
        return _pool[1]
