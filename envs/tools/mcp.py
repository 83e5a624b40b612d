"""Tools of any MCP server in a workflow: ``await ep.use("mcp:files/read_file", path="a.txt")``.

    files = McpServer(command=["npx", "-y", "@modelcontextprotocol/server-filesystem", "."], deadline=10, per_second=5)
    search = McpServer(url="http://localhost:8000/mcp")
    env = unitymas.make("my-env", tools={"mcp": mcp_tools(files=files, search=search)})

A server is started, or connected to, at its first call, and stays open on the background loop of all tools. Calls run
concurrently, at most ``per_second`` of them each second, each with its own ``deadline``. An error that the tool reports, an
unknown tool and a missed deadline raise a ``ToolError``, which the workflow can catch. A server that cannot be reached, or
that dies, is an ``Infrastructure`` failure: the episode is never trained, and the next call starts the server again. This
module needs the package ``mcp``: ``pip install 'unitymas[mcp]'``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...agents.basics.failures import ToolError, ToolFault
from ...agents.basics.hints import nearest
from ...agents.basics.json_types import JsonObject
from ...agents.text.reply_readers import is_shallow
from . import mcp_pipe
from .tool import About, Infrastructure, Tool, ToolKind, background

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.types import CallToolResult
    from mcp.types import Tool as ServerTool

START_SECONDS = 60.0  # a command such as npx may install the server first
LONGEST_ANSWER = 1_000_000  # characters of one result
LONGEST_LINE = 16 << 20  # bytes of one message of a server by `command`; longer ones end it
LONGEST_SCHEMA = 20_000  # characters of a tool's description, of its parameters, or of an error
MOST_TOOLS = 1000


@dataclass(slots=True)
class McpServer:
    """MCP server, with a ``command`` (it uses stdin and stdout) or a ``url`` (streamable HTTP)."""

    command: Sequence[str] | None = None
    url: str | None = None
    env: Mapping[str, str] | None = None
    deadline: float = 30.0
    """Seconds that one call may take, without the wait for ``per_second``."""
    per_second: float | None = None
    """Largest number of calls per second. Further calls wait."""
    _connection: _ServerConnection | None = field(default=None, init=False, repr=False, compare=False)
    _next_turn: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("an McpServer has either a command or a url")
        if self.deadline <= 0 or (self.per_second is not None and self.per_second <= 0):
            raise ValueError("deadline and per_second must be above zero")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the settings only. A copy opens its own connection."""
        return McpServer, (self.command, self.url, self.env, self.deadline, self.per_second)

    async def call(self, tool: str, arguments: Mapping[str, object]) -> object:
        """Call a tool. Return its structured content if there is any, else its text."""
        connection = await self._connected()
        if tool not in connection.tools:
            raise ToolError(
                f"{self.name} has no tool {tool!r}; {nearest(tool, sorted(connection.tools), 'it has', most=3)}"
            )
        await self._turn()
        answer = asyncio.ensure_future(connection.session.call_tool(tool, _thawed(arguments)))
        done, _ = await asyncio.wait(
            {answer, connection.ended}, timeout=self.deadline, return_when=asyncio.FIRST_COMPLETED
        )
        if answer not in done:
            answer.cancel()
            if connection.ended in done:
                raise Infrastructure(f"{self.name} died while it answered {tool!r}")
            raise ToolFault(f"{self.name}/{tool}: no answer within {self.deadline:g} s")
        try:
            return _content(answer.result(), tool)
        except ToolError:
            raise
        except Exception as error:
            if _is_answer(error):
                raise ToolError(f"{self.name}/{tool}: {error}") from error
            connection.give_up()
            raise Infrastructure(f"{self.name} failed at {tool!r}: {_innermost(error)}") from error

    async def tools(self) -> list[About]:
        """Return the server's tools as {name, description, parameters}, for a prompt or a chat template."""
        connection = await self._connected()
        return [connection.tools[name] for name in sorted(connection.tools)]

    def list_tools(self) -> list[About]:
        """Return the result of ``tools``, for code without an event loop."""
        return background(self.tools()).result(START_SECONDS + self.deadline)

    def close(self) -> None:
        """Stop the server. A later call starts it again."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.usable:
            background(connection.close()).result(self.deadline)

    @property
    def name(self) -> str:
        """Name of the server in messages: its address or its command."""
        return f"the MCP server {self.url or ' '.join(self.command or ())}"

    async def _connected(self) -> _ServerConnection:
        """Return the open connection. A dead connection, or one of the parent process, is replaced."""
        if self._connection is None or not self._connection.usable:
            self._connection = _ServerConnection(self)
        connection = self._connection
        try:
            await asyncio.wait_for(asyncio.shield(connection.ready), START_SECONDS)
        except (Exception, asyncio.TimeoutError) as error:
            raise Infrastructure(f"{self.name} cannot be reached: {_innermost(error)}") from error
        return connection

    async def _turn(self) -> None:
        """Wait until the previous call is at least 1 / per_second seconds ago."""
        if self.per_second is not None:
            now = asyncio.get_running_loop().time()
            mine = max(now, self._next_turn)
            self._next_turn = mine + 1 / self.per_second
            await asyncio.sleep(mine - now)


class _ServerConnection:
    """Open session, in a task of its own, because the protocol's library closes a session only in the task that opened it."""

    def __init__(self, server: McpServer) -> None:
        loop = asyncio.get_running_loop()
        self.session: ClientSession
        self.tools: dict[str, About] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self._closing = asyncio.Event()
        self._process = os.getpid()
        self.ended = loop.create_task(self._hold(server))

    @property
    def usable(self) -> bool:
        return self._process == os.getpid() and not self._closing.is_set() and not self.ended.done()

    def give_up(self) -> None:
        """Drop a server that no longer answers. ``_hold`` closes its session."""
        self._closing.set()

    async def close(self) -> None:
        self.give_up()
        await asyncio.wait({self.ended})

    async def _hold(self, server: McpServer) -> None:
        try:
            async with _session(server) as self.session:
                await self.session.initialize()
                self.tools = {tool.name: _described(tool) for tool in await _all_tools(self.session)}
                self.ready.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
                self.ready.exception()  # read here, because the call that waited for it may have been cancelled
        finally:
            if not self.ready.done():
                self.ready.cancel()


@asynccontextmanager
async def _session(server: McpServer) -> AsyncIterator[ClientSession]:
    try:
        import mcp
    except ImportError as error:
        raise Infrastructure("MCP tools need the package mcp: pip install 'unitymas[mcp]'") from error
    if server.url is not None:
        from mcp.client import streamable_http

        names = ("streamable_http_client", "streamablehttp_client")  # mcp 2, mcp 1
        connect = next(getattr(streamable_http, name) for name in names if hasattr(streamable_http, name))
        transport = connect(server.url)
    else:
        piped = ["-I", "-S", mcp_pipe.__file__, str(LONGEST_LINE), *(server.command or ())]
        env = None if server.env is None else dict(server.env)
        transport = mcp.stdio_client(mcp.StdioServerParameters(command=sys.executable, args=piped, env=env))
    async with transport as streams, mcp.ClientSession(streams[0], streams[1]) as session:
        yield session


async def _all_tools(session: ClientSession) -> list[ServerTool]:
    """Return every tool, page by page. A server with endless pages is refused."""
    page = await session.list_tools()
    tools, seen = list(page.tools), set[str]()
    while cursor := _either(page, "next_cursor", "nextCursor"):
        if cursor in seen or len(tools) > MOST_TOOLS or len(seen) > MOST_TOOLS:
            raise RuntimeError(f"its list of tools does not end ({len(tools)} so far)")
        seen.add(cursor)
        page = await session.list_tools(**_page(session, cursor))
        tools.extend(page.tools)
    return tools


def _page(session: ClientSession, cursor: str) -> dict[str, object]:
    """Return the arguments that ask for a page: `params` in version 2 of the library, `cursor` in version 1."""
    if "cursor" in inspect.signature(session.list_tools).parameters:
        return {"cursor": cursor}
    from mcp.types import PaginatedRequestParams

    return {"params": PaginatedRequestParams(cursor=cursor)}


def _described(tool: ServerTool) -> About:
    parameters = _either(tool, "input_schema", "inputSchema") or {}
    if not is_shallow(parameters) or len(json.dumps(parameters)) > LONGEST_SCHEMA:
        raise RuntimeError(f"the parameters of its tool {tool.name[:60]!r} are too long or too deep")
    description = (tool.description or "")[:LONGEST_SCHEMA]
    return {"name": tool.name, "description": description, "parameters": parameters}


def _thawed(arguments: Mapping[str, object]) -> JsonObject:
    """Return the frozen arguments of a node as ordinary lists and dicts, which the protocol needs."""
    plain: JsonObject = json.loads(json.dumps(arguments))
    return plain


def _content(result: CallToolResult, tool: str) -> object:
    """Return the content of a result as JSON values, the only ones that ``run`` may see."""
    text = "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")
    if _either(result, "is_error", "isError"):
        raise ToolError(text[:LONGEST_SCHEMA] or f"{tool} failed without a message")
    structured = _either(result, "structured_content", "structuredContent")
    if isinstance(structured, dict):
        if not is_shallow(structured):
            raise ToolError(f"{tool} gave data that nest too deep")
        size = len(json.dumps(structured))
    else:
        size = len(text)
    if size > LONGEST_ANSWER:
        raise ToolError(f"{tool} gave {size:,} characters; at most {LONGEST_ANSWER:,} are taken")
    if isinstance(structured, dict):
        return structured["result"] if set(structured) == {"result"} else structured
    return text


def _either(thing: object, name: str, older: str) -> Any:
    """Return a field by its name in version 2 of the library, or else in version 1 (`older`)."""
    return getattr(thing, name, None) if hasattr(thing, name) else getattr(thing, older, None)


def _is_answer(error: Exception) -> bool:
    """Tell whether the server itself replied with an error of the protocol, such as for wrong arguments."""
    details = getattr(error, "error", None)
    closed = -32000  # the library's own code for "connection closed"
    return type(error).__name__ in ("MCPError", "McpError") and getattr(details, "code", closed) != closed


def _innermost(error: BaseException) -> str:
    """Describe the first cause inside nested exception groups."""
    while isinstance(getattr(error, "exceptions", None), tuple):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class _Tools:
    """Tools of several servers, called by the toolbox with the name "server/tool"."""

    servers: Mapping[str, McpServer]

    async def __call__(self, _name: str = "", **arguments: object) -> object:
        server, _, tool = _name.partition("/")
        if server not in self.servers or not tool:
            servers = ", ".join(f"mcp:{name}/…" for name in self.servers)
            raise ToolError(f'there is no MCP tool "mcp:{_name}"; the servers are {servers}')
        return await self.servers[server].call(tool, arguments)

    def about(self, name: str) -> list[About]:
        """Describe tools for a model: one tool ("server/tool"), all tools of a server ("server"), or all tools ("")."""
        server, _, tool = name.partition("/")
        if server and server not in self.servers:
            raise ToolError(f"there is no MCP server {server!r}; the servers are {', '.join(self.servers)}")
        descriptions: list[About] = [
            {**told, "name": f"mcp:{one}/{told['name']}"}
            for one in ([server] if server else self.servers)
            for told in self.servers[one].list_tools()
            if tool in ("", told["name"])
        ]
        if not descriptions:
            raise ToolError(f'there is no MCP tool "mcp:{name}"')
        return descriptions


def mcp_tools(*, kind: ToolKind = "pure", **servers: McpServer) -> Tool:
    """Return one tool for ``make(tools={"mcp": …})``, which offers the tools of these servers as "mcp:<server>/<tool>".

    A replay takes results from the journal. Use ``kind="unforkable"`` for servers that keep state in a session, because a
    fork would share this state.
    """
    tools = _Tools(servers)
    return Tool(tools, "mcp", kind=kind, blocking=False, about=tools.about)
