"""Toolbox of an environment: calls of tools, and the meaning of their failures."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...agents.answers import ReplyMeta
from ...agents.basics.failures import Boundary, Infrastructure, ToolError, ToolFault, WorkflowError
from ...agents.basics.threads import contained, ordinary
from ...own import told
from ..core.execution import Execution
from ..core.records import Node
from ..core.workflow import TOOLS, unknown
from .signatures import about
from .tool import About, Result, Session, Tool, background, threads


class Toolbox:
    """Tools of an environment, by name. The toolbox answers the `use` nodes of an execution."""

    def __init__(self, tools: Mapping[str, object]) -> None:
        self.tools: dict[str, Tool] = {}
        for name, source in tools.items():
            if name == TOOLS:
                raise WorkflowError(
                    f"{TOOLS!r} is the name of the tool that tells of the others; choose another"
                )
            self.tools[name] = source if isinstance(source, Tool) else Tool(source, name)  # type: ignore[arg-type]  # `Tool` refuses what cannot be called
        asks_servers = any(callable(one.about) for one in self.tools.values())
        self._teller = Tool(self.about, TOOLS, blocking=asks_servers)

    def check(self, needs: tuple[str, ...], workflow: str) -> None:
        """Raise an error if a tool that a workflow needs is missing."""
        for name in needs:
            if name not in self.tools:
                raise WorkflowError(
                    f"{workflow} uses the tool {name!r}, which nobody gave; pass tools={{{name!r}: …}} to make"
                )

    def forkable(self, execution: Execution) -> str | None:
        """Return the name of a tool that the episode has used and that forbids forks, or None."""
        for node in execution.nodes:
            if node.kind == "use" and self.find(node).kind == "unforkable":
                return node.tool
        return None

    def find(self, node: Node) -> Tool:
        """Return the tool of a node."""
        return self._teller if node.tool == TOOLS else self._named(node.tool or "")

    def _named(self, name: str) -> Tool:
        entry = self.tools.get(name) or self.tools.get(name.partition(":")[0])
        if entry is None:
            raise unknown("tool", name, self.tools)
        return entry

    def about(self, names: Sequence[str]) -> list[About]:
        """Describe these tools for a model. The journal holds the description, like any other result."""
        return [told for name in names for told in about(self._named(name), name)]

    # the two faces -------------------------------------------------------------------------------

    def call(self, execution: Execution, node: Node) -> None:
        """Answer one `use` node; return when the result is there."""
        entry = self.find(node)
        try:
            call, args = self._bound(entry, execution, node)
            if entry.is_async:
                result = background(call(**args)).result(entry.deadline)
            else:
                result = call(**args)
        except BaseException as error:
            _fail(entry, execution, node, ordinary(error))
        else:
            _give(execution, node, result)

    async def acall(self, execution: Execution, node: Node) -> None:
        """Answer one `use` node, from an event loop."""
        entry = self.find(node)
        try:
            call, args = self._bound(entry, execution, node)
            if entry.is_async:
                waiting = asyncio.wrap_future(background(call(**args)))
                result = await asyncio.wait_for(waiting, entry.deadline)
            elif entry.blocking:
                loop = asyncio.get_running_loop()
                waiting = loop.run_in_executor(threads(), functools.partial(contained(call), **args))
                result = await asyncio.wait_for(waiting, entry.deadline)
            else:
                result = call(**args)
        except BaseException as error:
            _fail(entry, execution, node, ordinary(error))
        else:
            _give(execution, node, result)

    def _bound(
        self, entry: Tool, execution: Execution, node: Node
    ) -> tuple[Callable[..., Any], dict[str, object]]:
        args: dict[str, object] = dict(node.args or {})
        if entry.kind == "session":
            return self._session(entry, execution, node).call, args
        if entry.task:
            args["task"] = execution.task
        if ":" in (node.tool or "") and entry.name != node.tool:
            args["_name"] = (node.tool or "").partition(":")[2]
        return entry.fn, args

    def _session(self, entry: Tool, execution: Execution, node: Node) -> Session:
        """Return the episode's simulator. After a fork or a restore, the earlier calls are replayed on a new one."""
        opened = execution.sessions.get(entry.name)
        if opened is None:
            opened = execution.sessions[entry.name] = entry.fn(execution.task, execution.seeds[0][1])
            for earlier in execution.canonical():
                if earlier.kind == "use" and earlier is not node and self.find(earlier) is entry:
                    opened.call(**dict(earlier.args or {}))
        return opened

    def close(self, execution: Execution) -> None:
        """Close the episode's simulators."""
        for session in execution.sessions.values():
            session.close()
        execution.sessions.clear()


def _give(execution: Execution, node: Node, result: object) -> None:
    if isinstance(result, Result):
        execution.give(node, result.public, result.private)
    else:
        execution.give(node, result)


def _fail(entry: Tool, execution: Execution, node: Node, error: Exception) -> None:
    """Handle a failure of a tool. A failure of the infrastructure ends the episode; any other one is the tool's answer."""
    if isinstance(error, Infrastructure):
        execution.abort(error, Boundary.TOOL)
        return
    message = _message(entry, error)
    if isinstance(error, ToolFault | TimeoutError | asyncio.TimeoutError):
        node.meta = ReplyMeta(raised=message)
    elif not isinstance(error, ToolError):
        node.meta = ReplyMeta(raised=told(error))
    execution.fail(node, message)


def _message(entry: Tool, error: BaseException) -> str:
    if isinstance(error, ToolError):
        return str(error)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"{entry.name}: no answer within {entry.deadline} s"
    return f"{entry.name}: {type(error).__name__}: {error}"
