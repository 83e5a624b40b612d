"""MCP tools against a real server over stdin and stdout, written with the protocol's own library."""

import asyncio
import copy
import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import unitymas
from unitymas.agents.roles import Role
from unitymas.envs.core.workflow import Episode, Outcome, ToolError, Workflow
from unitymas.envs.registry import unregister
from unitymas.envs.tools.mcp import McpServer, mcp_tools
from unitymas.envs.tools.tool import Infrastructure, background

pytest.importorskip("mcp")

SERVER = '''
import os, time
try:
    from mcp.server.mcpserver import MCPServer as Server  # mcp 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # mcp 1

server = Server("test")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def greet(name: str) -> str:
    """Greet."""
    return f"hello {name}"

@server.tool()
def total(numbers: list[int], options: dict[str, int]) -> dict[str, int]:
    return {"total": sum(numbers) + sum(options.values()), "count": len(numbers)}

@server.tool()
def broken() -> str:
    raise ValueError("no such file")

@server.tool()
async def slow(seconds: float) -> str:
    import asyncio
    await asyncio.sleep(seconds)
    return "done"

@server.tool()
def process() -> int:
    return os.getpid()

@server.tool()
def die() -> str:
    os._exit(3)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path: Path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def server(command: list[str]) -> Iterator[McpServer]:
    one = McpServer(command=command, deadline=20)
    yield one
    one.close()


def call(server: McpServer, tool: str, **arguments: Any) -> Any:
    return background(server.call(tool, arguments)).result(90)


def test_results_are_plain_values(server: McpServer) -> None:
    assert call(server, "add", a=2, b=3) == 5
    assert call(server, "greet", name="Ünï") == "hello Ünï"
    assert call(server, "total", numbers=(1, 2), options={"x": 3}) == {"total": 6, "count": 2}


def test_tools_are_listed_with_their_parameters(server: McpServer) -> None:
    listed = {tool["name"]: tool for tool in server.list_tools()}
    assert listed["add"]["description"] == "Add two numbers."
    assert set(listed["add"]["parameters"]["properties"]) == {"a", "b"}


def test_what_the_tool_or_the_caller_did_wrong_is_a_tool_error(server: McpServer) -> None:
    with pytest.raises(ToolError, match="no such file|broken"):
        call(server, "broken")
    with pytest.raises(ToolError, match="did you mean greet"):
        call(server, "greeet", name="x")
    with pytest.raises(ToolError):
        call(server, "add", a="not a number", b=1)
    assert call(server, "add", a=1, b=1) == 2  # and the server lives on


def test_a_deadline_ends_the_call_and_not_the_server(command: list[str]) -> None:
    quick = McpServer(command=command, deadline=4.0)
    quick.list_tools()
    started = time.monotonic()
    with pytest.raises(ToolError, match="no answer within 4 s"):
        call(quick, "slow", seconds=90)
    assert time.monotonic() - started < 45
    assert call(quick, "add", a=1, b=1) == 2
    quick.close()


def test_one_server_serves_all_calls(server: McpServer) -> None:
    first = call(server, "process")
    time.sleep(2.5)
    assert call(server, "process") == first


def test_calls_run_side_by_side(server: McpServer) -> None:
    server.list_tools()
    started = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: call(server, "slow", seconds=1.5), range(8))) == {"done"}
    assert time.monotonic() - started < 9.0  # one after the other: 12


def test_the_rate_limit_spaces_calls(command: list[str]) -> None:
    limited = McpServer(command=command, per_second=10)
    limited.list_tools()
    started = time.monotonic()
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda n: call(limited, "add", a=n, b=0), range(6))) == list(range(6))
    assert time.monotonic() - started >= 0.5
    limited.close()


def test_a_server_that_dies_is_infrastructure_and_starts_anew(command: list[str]) -> None:
    mortal = McpServer(command=command, deadline=20)
    with pytest.raises(Infrastructure):
        call(mortal, "die")
    first = call(mortal, "process")
    os.kill(first, signal.SIGKILL)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            assert call(mortal, "process") != first
            break
        except Infrastructure:
            time.sleep(0.2)
    else:
        pytest.fail("the server was not started again")
    mortal.close()


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(Infrastructure, match="cannot be reached"):
        call(McpServer(command=[str(tmp_path / "nothing")]), "add")
    with pytest.raises(Infrastructure, match="cannot be reached"):
        call(McpServer(url="http://127.0.0.1:9/mcp"), "add")
    with pytest.raises(ValueError, match="either a command or a url"):
        McpServer()


def test_a_call_that_was_cancelled_leaves_no_error_behind(tmp_path: Path) -> None:
    """A server that fails later than its caller waits: asyncio would print the error at some garbage collection."""
    told: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        server = McpServer([str(tmp_path / "absent")])
        asking = asyncio.ensure_future(server.tools())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert server._connection is not None
        asking.cancel()
        await asyncio.wait({asking, server._connection.ended})
        del server, asking
        gc.collect()

    asyncio.run(run())
    assert not told


def test_copies_and_pickles_connect_for_themselves(server: McpServer) -> None:
    mine = call(server, "process")
    for other in (copy.deepcopy(server), pickle.loads(pickle.dumps(server))):
        assert other == server and call(other, "process") != mine
        other.close()


class Sums(Workflow):
    """Adds with a server's tool, and asks one that does not exist."""

    roles = (Role("solver"),)
    tools = ("mcp",)

    async def run(self, ep: Episode) -> Outcome:
        found = await ep.use("mcp:sums/total", numbers=[1, 2, ep.task.extra], options={"x": 4})
        trouble = ""
        try:
            await ep.use("mcp:nowhere/add", a=1, b=2)
        except ToolError as error:
            trouble = str(error)
        reply = await ep.act("solver", f"The total is {found['total']}. {trouble}")
        return Outcome(answer=reply.text)


def test_from_a_workflow_on_both_faces(server: McpServer) -> None:
    unitymas.register("test-mcp-sums", workflow=Sums)
    try:
        rows = [{"id": "t", "question": "?", "answers": ["10"], "extra": 3}]
        env = unitymas.make("test-mcp-sums", tasks=rows, tools={"mcp": mcp_tools(sums=server)})
        env.reset(seed=0)
        prompt = env.last()[0]["messages"][-1]["content"]
        assert prompt == 'The total is 10. there is no MCP tool "mcp:nowhere/add"; the servers are mcp:sums/…'
        env.step("10")
        trace = env.unwrapped.trace
        assert trace.outcome["answer"] == "10"
        used = [node for node in trace.nodes if node.kind == "use"]
        assert used[0].tool == "mcp:sums/total" and used[0].result == {"total": 10, "count": 3}
        (rolled,) = unitymas.rollout(env, lambda agent, messages: "10")
        assert [node.result for node in rolled.nodes] == [node.result for node in trace.nodes]
    finally:
        unregister("test-mcp-sums")
