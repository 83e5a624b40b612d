"""Checks of entries from strangers, in separate processes with limits of time and memory.

    with Guard(seconds=300, memory_mb=4096) as guard:
        verdict = guard.check(folder, verify=True)

A server process loads the package once and forks a child for every entry. If a child exceeds its limits, or the system kills
it, only its own entry fails. The server neither reads nor plays entries, has no threads and opens no tools, so no entry can
harm it. It needs `os.fork`, so Linux or macOS.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import IO, TypedDict

from ...agents.basics.json_types import JsonObject
from ...envs.registry import list_envs, make_arena, spec
from ..evaluation import identity
from .checks import Inspection, inspect
from .entry_page import write_traces

SECONDS = 300.0
MEMORY_MB = 4096
_LARGEST_ANSWER = 64 << 20
_STARTING = 120.0  # seconds for the server to load the package on a busy machine


class Order(TypedDict):
    """Request to check one entry."""

    folder: str
    verify: bool
    page: str | None
    memory_mb: int
    seconds: float


class Guard:
    """Guard that checks entries one after the other, each within `seconds` and `memory_mb` (besides the package itself)."""

    def __init__(self, *, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> None:
        if not seconds > 0 or memory_mb < 256:
            raise ValueError(f"an entry needs time and at least 256 MB, got {seconds} s and {memory_mb} MB")
        self.seconds, self.memory_mb = seconds, memory_mb
        self._server: subprocess.Popen[bytes] | None = None

    def check(self, folder: Path, *, verify: bool, page: Path | None = None) -> Inspection:
        """Check one entry. If it has no problems, write the page of its episodes to `page`."""
        request: Order = {
            "folder": str(folder.absolute()), "verify": verify, "page": None if page is None else str(page.absolute()),
            "seconds": self.seconds, "memory_mb": self.memory_mb,
        }  # fmt: skip
        answer = self._ask(request)
        return Inspection(**answer) if isinstance(answer, dict) else Inspection([answer])

    def close(self) -> None:
        """End the server; another check starts it again."""
        if self._server is not None:
            for pipe in (self._server.stdin, self._server.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(5)
            if self._server.poll() is None:
                self._server.kill()
                self._server.wait()
            self._server = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Order) -> JsonObject | str:
        """Return the server's answer, or a text about its failure."""
        server = self._started()
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
            line = _line(server.stdout, time.monotonic() + self.seconds + _STARTING)
        except OSError:
            line = b""
        try:
            answer: JsonObject | str = json.loads(line)
        except ValueError:
            self.close()
            return "checking it ended the process that checks"
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            self.close()
            # not in the current folder: Python would import files from there, and it may be an entry
            self._server = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, *_paths()], cwd=os.sep, env=_environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return self._server


_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; from unitymas.benchmarks.leaderboard.guard import serve; serve()"
)
_shared: tuple[dict[str, str], Guard] | None = None


def shared() -> Guard:
    """Return the guard with default limits, which all calls share. It ends with this process."""
    global _shared
    around = _environment()
    if _shared is not None and _shared[0] != around:
        _shared[1].close()
        _shared = None
    if _shared is None:
        _shared = (around, Guard())
        atexit.register(_shared[1].close)
    return _shared[1]


def _environment() -> dict[str, str]:
    """Return the server's environment variables: those of this process, with absolute paths and one thread."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if around.get("UNITYMAS_HOME"):
        around["UNITYMAS_HOME"] = str(Path(around["UNITYMAS_HOME"]).expanduser().absolute())
    return {**around, "OPENBLAS_NUM_THREADS": "1"}


def _paths() -> list[str]:
    """Return the import path, with Python's own folders first, so that no file beside a script replaces a module."""
    own = tuple({sys.base_prefix, sys.prefix})
    every = [os.path.abspath(path) for path in sys.path if path]
    return sorted(every, key=lambda path: not path.startswith(own))


def _line(pipe: IO[bytes], deadline: float) -> bytes:
    """Return one line from a pipe, or the part of it that arrived before the deadline."""
    parts: list[bytes] = []
    size, waiting = 0, select.poll()  # `select.select` does not support descriptors above 1023
    waiting.register(pipe, select.POLLIN | select.POLLHUP)
    while time.monotonic() < deadline and size <= _LARGEST_ANSWER:
        if waiting.poll(1000 * max(0.0, min(1.0, deadline - time.monotonic()))):
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                break
            parts.append(part)
            size += len(part)
            if part.endswith(b"\n"):
                break
    return b"".join(parts)


# in the server ----------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests, a line of JSON each, until there are no more."""
    import zstandard  # noqa: F401 (what every child needs is loaded once, before the forks)

    list_envs()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not become an answer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request["verify"]:
            _warm()
        answers.write(_forked(request) + b"\n")
        answers.flush()


@cache
def _warm() -> None:
    """Make the mini world and its indexes once, for all children."""
    for id in {spec(id).kind: id for id in list_envs() if spec(id).tasks is None}.values():
        # an environment of a broken plug-in; an entry on it gets the error later
        with contextlib.suppress(Exception):
            identity.world(make_arena(id, split="test", data="mini"))  # this reads its sources, too
    gc.collect()
    gc.freeze()  # a child that collects garbage would copy all of this


def _forked(request: Order) -> bytes:
    """Return a child's answer to one request. After the time limit, end the child and all its children."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        _limit(request)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(_answer(request) + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        line = _line(pipe, time.monotonic() + request["seconds"])
    late = not line.endswith(b"\n")
    for end in (os.killpg, os.kill):  # it, and what it started
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not late:
        return line.rstrip(b"\n")
    how = (
        f"was ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended without an answer"
    )
    return json.dumps(f"checking it took more than {request['seconds']:g} s, or {how}").encode()


def _limit(request: Order) -> None:
    """Limit this process's memory, beyond that of the loaded package, and its processor time."""
    import resource

    told = Path("/proc/self/statm")
    now = int(told.read_text().split()[0]) * resource.getpagesize() if told.exists() else 0
    most = now + (request["memory_mb"] << 20)
    wanted = ((resource.RLIMIT_AS, most), (resource.RLIMIT_CPU, int(request["seconds"]) + 10))
    for kind, limit in wanted:
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses a limit of memory
            resource.setrlimit(kind, (soft, hard))


def _answer(request: Order) -> bytes:
    """Return the verdict on one entry as JSON. Any error in the check is a problem of the entry."""
    try:
        folder = Path(request["folder"])
        verdict = inspect(folder, verify=request["verify"])
        if request["page"] and not verdict.problems:
            write_traces(folder, verdict.metadata, verdict.results, Path(request["page"]))
        return json.dumps(verdict.to_dict()).encode()
    except MemoryError:
        answer = f"checking it took more than {request['memory_mb']} MB of memory"
    except Exception as error:
        answer = f"checking it failed ({type(error).__name__}: {str(error)[:200]})"
    return json.dumps(answer).encode()
