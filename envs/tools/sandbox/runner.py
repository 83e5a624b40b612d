"""Runner of Python programs in the sandbox: `run_python`, and its pool of warm rooms.

There are three levels. `bubblewrap` and `namespaces` isolate equally; the second makes the namespaces itself. Programs have
no network, see a read-only interpreter and nothing else of the host, and get a clean environment. Each program has its own
user, pid, mount and ipc namespaces, its own empty /tmp, rlimits, no capabilities, and a seccomp filter. `unsafe` has limits
and filter, but sees the host's files; it is used only if the caller names it. Each result names its level
(docs/sandbox.md).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

from ....agents.basics.failures import Infrastructure
from .cgroups import CaseGroup
from .launch import PACKAGES, SandboxLevel, room_command, room_environment

ProgramEnd = Literal[
    "finished",
    "time_limit",
    "memory_limit",
    "runtime_error",
    "output_limit",
    "compile_error",
    "sandbox_violation",
]
LEVELS: tuple[SandboxLevel, ...] = ("bubblewrap", "namespaces")  # those that "auto" may choose
_ADVICE = (
    "Install bubblewrap, or allow unprivileged user namespaces (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns; in a container: --security-opt seccomp=unconfined). "
    "sandbox='unsafe' runs programs with limits but without isolation: only for programs that you trust."
)
STARVED = 10  # times `wall`: limit on time by the clock, with the wait for a processor
_START_SECONDS = 30.0
_GRACE_SECONDS = 30.0  # time after a case's own limits until its room counts as stuck


class SandboxError(Infrastructure):
    """Raised when the sandbox itself fails, or when no level works here. A judged program never causes it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program. Memory is the address space of each process, beyond that of the idle interpreter."""

    time_limit: float = 1.0  # seconds of processor time
    # seconds by the clock; None: 4 * time_limit + 2, for a busy machine's sake
    wall_limit: float | None = None
    memory_mb: int = 512
    processes: int = 16  # threads count
    open_files: int = 64
    output_mb: int = 16
    disk_mb: int = 64  # all of /tmp, and any one file

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"Limits.{name} is {value!r}; a limit is a number above 0")

    @property
    def wall(self) -> float:
        """Limit on a program's time by the clock, in seconds."""
        return 4 * self.time_limit + 2 if self.wall_limit is None else self.wall_limit

    @property
    def longest(self) -> float:
        """Limit on time by the clock for a busy machine, where a program mostly waits for a processor, in seconds."""
        return STARVED * self.wall


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of one program. `value` is the return value of the called function, as `values.encode` writes it."""

    ended: ProgramEnd
    error: str
    stdout: str
    stderr: str
    exit_code: int
    cpu: float
    wall: float
    sandbox: SandboxLevel
    value: str | None = None

    @property
    def ok(self) -> bool:
        """Flag: the program ended without an error."""
        return self.ended == "finished"


@dataclass(frozen=True, slots=True)
class Program:
    """Program to run: a script with its input, or with `fn_name` a call with `arguments`, an encoded list."""

    source: str
    stdin: str = ""
    fn_name: str | None = None
    arguments: str = '[["list", 0]]'


def run_python(
    source: str, stdin: str = "", *, limits: Limits = Limits(), sandbox: str = "auto"
) -> ProgramResult:
    """Run a program as `python program.py < stdin` in the sandbox."""
    return submit(Program(source, stdin), limits, sandbox).result()


async def arun_python(
    source: str, stdin: str = "", *, limits: Limits = Limits(), sandbox: str = "auto"
) -> ProgramResult:
    """Run a program as `run_python` does, without blocking the event loop."""
    return await asyncio.wrap_future(submit(Program(source, stdin), limits, sandbox))


def submit(program: Program, limits: Limits, sandbox: str = "auto") -> Future[ProgramResult]:
    """Queue a program for the next free room."""
    return _rooms(resolve(sandbox)).submit(program, limits)


def resolve(sandbox: str = "auto") -> SandboxLevel:
    """Return the level that will be used, after a test on this machine. Raise `SandboxError` if it does not work."""
    if sandbox == "unsafe":
        return "unsafe"
    if sandbox not in (*LEVELS, "auto"):
        raise ValueError(
            f"sandbox={sandbox!r}; levels are 'auto', {', '.join(map(repr, LEVELS))} and 'unsafe'"
        )
    reasons = []
    for level in LEVELS:
        if sandbox in ("auto", level):
            reason = _obstacle(level)
            if reason is None:
                return level
            reasons.append(f"{level}: {reason}")
    raise SandboxError(f"no sandbox is possible here ({'; '.join(reasons)}). {_ADVICE}")


@cache
def _obstacle(level: SandboxLevel) -> str | None:
    """Return the reason why this level does not work here, or None. The test runs a program."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        result = _rooms(level).submit(Program("print(1)"), Limits(time_limit=5.0)).result()
    except SandboxError as error:
        return str(error)
    return None if result.stdout == "1\n" else f"a trial program {result.ended}: {result.error}"


@cache
def _rooms(level: SandboxLevel) -> _Rooms:
    rooms = _Rooms(level)
    _opened.append(rooms)
    return rooms


_opened: list[_Rooms] = []


@atexit.register
def close_rooms() -> None:
    """End every warm room. The next program starts new ones."""
    _rooms.cache_clear()
    while _opened:
        _opened.pop().close()


class _Rooms:
    """Pool of warm rooms of one level. Rooms start when they are needed, and each place runs one case at a time.

    There is one more place than processors, because the kernel needs time to clean up after a case. Each place has a room for
    plain programs, and one for programs that use PACKAGES, in which these are already imported.
    """

    def __init__(self, level: SandboxLevel) -> None:
        self.level = level
        affinity = hasattr(os, "sched_getaffinity")
        self.size = 1 + (len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1)
        self._free: queue.LifoQueue[dict[bool, _Room]] = queue.LifoQueue()
        for _ in range(self.size):
            self._free.put({})
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix=f"sandbox-{level}")

    def submit(self, program: Program, limits: Limits) -> Future[ProgramResult]:
        return self._threads.submit(self._run, program, limits)

    def close(self) -> None:
        """Wait for the running programs, then end the rooms."""
        self._threads.shutdown()
        for _ in range(self.size):
            for room in self._free.get().values():
                room.close()

    def _run(self, program: Program, limits: Limits) -> ProgramResult:
        """Run a program. If its room dies, run it in a new one. If that dies too, the program counts as failed."""
        place, kind = self._free.get(), any(name in program.source for name in PACKAGES)
        try:
            for _ in range(2):
                if kind not in place:
                    place[kind] = _Room(self.level, with_packages=kind)
                try:
                    return place[kind].run(program, limits)
                except _RoomDied as death:
                    place.pop(kind).close()
                    reason = str(death)
            error = f"the sandbox died twice under this program: {reason}"
            return ProgramResult("sandbox_violation", error, "", "", -1, 0.0, 0.0, self.level)
        except BaseException:
            if kind in place:
                place.pop(kind).close()
            raise
        finally:
            self._free.put(place)


class _RoomDied(Exception):
    """Raised when the fork server ends or stops responding during a case."""


class _Room:
    """Room: one sandbox with a fork server in it (`room`), connected by a socket."""

    def __init__(self, level: SandboxLevel, *, with_packages: bool = False) -> None:
        self.level = level
        self.group: CaseGroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._held = contextlib.ExitStack()
        try:
            self._start()
            self._receive(1)
            if with_packages:  # their import takes longer than most programs, so the server imports them once
                self._socket.sendall(b"p")
        except (_RoomDied, OSError) as error:
            reason = (self._last_words() if self._process is not None else "") or error
            self.close()
            raise SandboxError(f"a {level} room did not start: {reason}") from error

    def _start(self) -> None:
        """Start the server. After a failure, `close` closes everything that is open."""
        self._socket, theirs = socket.socketpair()
        self._held.callback(self._socket.close)
        with theirs:
            log = tempfile.TemporaryFile(prefix="unitymas-room-")  # noqa: SIM115 (`close` closes it)
            self._log = self._held.enter_context(log)
            self.group = CaseGroup.make() if self.level != "unsafe" else None
            inherited = self.group.descriptors if self.group is not None else []
            self._process = subprocess.Popen(
                room_command(self.level),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,  # a pipe, as programs have; nothing is written to it
                stderr=self._log,
                env=room_environment(self.level, inherited),
                close_fds=True,
                pass_fds=inherited,
            )
        self._socket.settimeout(_START_SECONDS)

    def run(self, program: Program, limits: Limits) -> ProgramResult:
        case = {
            "program": program.source,
            "stdin": program.stdin,
            "fn_name": program.fn_name,
            "arguments": program.arguments,
            "limits": asdict(limits) | {"wall_limit": limits.wall, "longest": limits.longest},
        }
        payload = json.dumps(case).encode()
        if self.group is not None:
            self.group.limit((limits.memory_mb + limits.disk_mb) << 20, limits.processes)
        self._socket.settimeout(limits.longest + _GRACE_SECONDS)
        try:
            self._socket.sendall(b"c" + struct.pack("I", len(payload)) + payload)
            reply = json.loads(self._receive(struct.unpack("I", self._receive(4))[0]))
        except (OSError, ValueError) as error:
            raise _RoomDied(f"{error} {self._last_words()}".strip()) from error
        if "failure" in reply:
            raise SandboxError(f"the {self.level} sandbox could not isolate a program: {reply['failure']}")
        return ProgramResult(sandbox=self.level, **reply)

    def close(self) -> None:
        """Shut the socket down, on which the server exits. A mere close is not enough, as forks of ours may hold it."""
        if self._process is not None:
            with contextlib.suppress(OSError):  # the server closed it first
                self._socket.shutdown(socket.SHUT_RDWR)
        self._held.close()
        if self._process is not None:
            if self._process.stdout is not None:
                self._process.stdout.close()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self.group is not None:
            self.group.close()

    def _receive(self, length: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < length:
            chunk = self._socket.recv(min(length - len(chunks), 1 << 20))
            if not chunk:
                raise _RoomDied("the fork server hung up")
            chunks += chunk
        return bytes(chunks)

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-600:].decode(errors="replace").strip()


def _forget_rooms() -> None:
    """Forget all rooms, in a forked process: they belong to its parent, and it makes its own."""
    _rooms.cache_clear()
    _opened.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_rooms)
