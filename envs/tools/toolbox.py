"""The tools of an environment: how they are called, and what a failure means."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...agents.failures import Boundary, Infrastructure, ToolError, WorkflowError
from ...agents.threads import contained
from ...own import told
from ..core.execution import Execution
from ..core.records import Node
from ..core.workflow import TOOLS, unknown
from .signatures import about
from .tool import Result, Session, Tool, background, threads


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
        return [told for name in names for told in about(self._named(name), name)]

    # the two faces -------------------------------------------------------------------------------

    def call(self, execution: Execution, node: Node) -> None:
        """Answer one use node, blocking."""
        found = self.find(node)
        try:
            call, args = self._bound(found, execution, node)
            if found.is_async:
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
            if found.is_async:
                waiting = asyncio.wrap_future(background(call(**args)))
                given = await asyncio.wait_for(waiting, found.deadline)
            elif found.blocking:
                loop = asyncio.get_running_loop()
                waiting = loop.run_in_executor(threads(), functools.partial(contained(call), **args))
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
        execution.abort(error, Boundary.TOOL)
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
