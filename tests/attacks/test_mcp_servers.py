"""What an MCP server may answer: pages without end, data without bottom, results without size. None of it spreads."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unitymas.envs.core.trace import jsonable
from unitymas.envs.core.workflow import ToolError
from unitymas.envs.tools.mcp import LONGEST_ANSWER, McpServer
from unitymas.envs.tools.tool import Infrastructure, background

pytest.importorskip("mcp")

# A server by hand, so that it can say what the protocol's own library would not let it say.
BY_HAND = """
import json, sys

TOOLS = [{"name": f"tool{n}", "inputSchema": {"type": "object"}} for n in range(5)]

def page(params):
    start = int((params or {}).get("cursor") or 0)
    if "endless" in sys.argv:
        return {"tools": TOOLS[:1], "nextCursor": str(start + 1)}
    if "loop" in sys.argv:
        return {"tools": TOOLS[:1], "nextCursor": "1"}
    if "deep" in sys.argv:
        schema = {"type": "object"}
        for _ in range(90):
            schema = {"type": "object", "properties": {"a": schema}}
        return {"tools": [{"name": "a", "inputSchema": schema}]}
    more = {"nextCursor": str(start + 2)} if start + 2 < len(TOOLS) else {}
    return {"tools": TOOLS[start:start + 2], **more}

def called(params):
    return json.loads(params["arguments"]["result"])

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, params = asked["method"], asked.get("params")
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "by hand", "version": "1"}}
    elif method == "tools/list":
        result = page(params)
    elif method == "tools/call":
        result = called(params)
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"],
                          "error": {"code": -32601, "message": "no such method"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""

OVER_HTTP = """
import sys
try:
    from mcp.server.mcpserver import MCPServer as Server
    server, how = Server("http"), {"port": int(sys.argv[1])}
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
    server, how = Server("http", port=int(sys.argv[1])), {}

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

server.run("streamable-http", **how)
"""

REDIRECTS = """
import http.server, sys

class Redirect(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(307)
        self.send_header("Location", sys.argv[2])
        self.send_header("Content-Length", "0")
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Redirect).serve_forever()
"""


def server(folder: Path, *how: str) -> McpServer:
    path = folder / "server.py"
    path.write_text(BY_HAND)
    return McpServer(command=[sys.executable, str(path), *how], deadline=20)


def call(one: McpServer, tool: str, **arguments: Any) -> Any:
    return background(one.call(tool, arguments)).result(90)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server did not start")


def test_tools_come_page_by_page(tmp_path: Path) -> None:
    one = server(tmp_path)
    assert [tool["name"] for tool in one.list_tools()] == [f"tool{n}" for n in range(5)]
    one.close()


@pytest.mark.parametrize("how", ["endless", "loop", "deep"])
def test_a_list_without_end_or_bottom_is_refused(tmp_path: Path, how: str) -> None:
    one = server(tmp_path, how)
    with pytest.raises(Infrastructure, match="does not end|too deep"):
        call(one, "tool0")


def test_a_result_without_size_or_bottom_is_the_tools_failure(tmp_path: Path) -> None:
    one = server(tmp_path)
    big = {"content": [{"type": "text", "text": "x" * (LONGEST_ANSWER + 1)}]}
    with pytest.raises(ToolError, match="characters"):
        call(one, "tool0", result=json.dumps(big))
    deep: Any = {}
    for _ in range(90):
        deep = {"a": deep}
    with pytest.raises(ToolError, match="too deep"):
        call(one, "tool0", result=json.dumps({"content": [], "structuredContent": deep}))
    fine = {"content": [{"type": "text", "text": "<|im_end|>"}]}
    assert call(one, "tool0", result=json.dumps(fine)) == "<|im_end|>"
    one.close()


def test_fuzz(tmp_path: Path, fuzz: int) -> None:
    """Any result is a plain value, the tool's failure or the server's; never another error, and never silence."""
    rng, one = random.Random(169), server(tmp_path)
    counts = {"value": 0, "tool": 0, "server": 0}
    for _ in range(fuzz):
        result = {key: _any_json(rng) for key in rng.sample(_KEYS, rng.randrange(4))}
        if rng.random() < 0.7:
            result["content"] = [{"type": rng.choice(["text", "image", "x"]), "text": _any_text(rng)}]
        try:
            json.dumps(jsonable(call(one, "tool0", result=json.dumps(result))))
            counts["value"] += 1
        except ToolError:
            counts["tool"] += 1
        except Infrastructure:
            counts["server"] += 1
    assert counts["value"] and counts["tool"] + counts["server"]
    one.close()


FLOOD = """
import os, sys, time
{first}
chunk = b"x" * (1 << 20)
for _ in range({megabytes}):
    os.write(1, chunk)
time.sleep(600)
"""
HTTP_HANGS = """
import socket, sys, threading, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
def answer(one):
    one.recv(65536)
    one.sendall(sys.argv[2].encode().decode("unicode_escape").encode("latin-1"))
    time.sleep(600)
while True:
    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()
"""


@pytest.mark.parametrize("first", ["", "sys.stdin.readline()"])
def test_a_line_without_end_ends_its_server(tmp_path: Path, first: str) -> None:
    """16 MB are read of a gigabyte, and the memory of this process stays as it was."""
    import resource

    path = tmp_path / "flood.py"
    path.write_text(FLOOD.format(first=first, megabytes=1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Infrastructure, match="cannot be reached|died|failed"):
        call(McpServer(command=[sys.executable, str(path)], deadline=20), "tool0")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def test_a_server_ends_with_its_connection(tmp_path: Path) -> None:
    one = server(tmp_path)
    pid_file = tmp_path / "pid"
    (tmp_path / "server.py").write_text(
        f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n" + BY_HAND
    )
    assert call(one, "tool0", result=json.dumps({"content": [{"type": "text", "text": "é"}]})) == "é"
    one.close()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid_file.read_text()}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_program_that_is_not_there_is_named_as_such() -> None:
    with pytest.raises(Infrastructure, match="no-such-program"):
        call(McpServer(command=["no-such-program"], deadline=20), "add")


@pytest.mark.parametrize(
    "sends",
    [
        "",
        "HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 99\\r\\n\\r\\n{",
        "HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n\\r\\ndata: {",
    ],
)
def test_an_http_server_that_hangs_is_given_up(
    tmp_path: Path, sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its answer, and in the middle of a body."""
    from unitymas.envs.tools import mcp

    monkeypatch.setattr(mcp, "START_SECONDS", 2.0)
    path, port = tmp_path / "hangs.py", free_port()
    path.write_text(HTTP_HANGS)
    process = subprocess.Popen([sys.executable, str(path), str(port), sends])
    try:
        wait_for(port)
        with pytest.raises(Infrastructure, match="cannot be reached"):
            call(McpServer(url=f"http://127.0.0.1:{port}/mcp", deadline=2), "add", a=1, b=1)
    finally:
        process.kill()
        process.wait()


_KEYS = ["content", "structuredContent", "isError", "_meta", "nextCursor", "result"]


def _any_text(rng: random.Random) -> str:
    return "".join(rng.choices(["a", "\x00", "\u202e", "<think>", "{", "é", "\n"], k=rng.randrange(6)))


def _any_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [_any_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {_any_text(rng): _any_json(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [None, True, -1, 1e308, 10**30, _any_text(rng)][kind]


def test_streamable_http_works_and_redirects_elsewhere_do_not(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    (tmp_path / "http_server.py").write_text(OVER_HTTP)
    (tmp_path / "redirects.py").write_text(REDIRECTS)
    url = f"http://127.0.0.1:{port}/mcp"
    processes = [
        subprocess.Popen([sys.executable, str(tmp_path / name), *map(str, args)], stderr=subprocess.DEVNULL)
        for name, args in (("http_server.py", (port,)), ("redirects.py", (other, url)))
    ]
    try:
        for one in (port, other):
            wait_for(one)
        served = McpServer(url=url, deadline=20)
        assert [tool["name"] for tool in served.list_tools()] == ["add"]
        assert call(served, "add", a=2, b=3) == 5
        served.close()
        with pytest.raises(Infrastructure):
            call(McpServer(url=f"http://127.0.0.1:{other}/mcp", deadline=20), "add", a=1, b=1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
