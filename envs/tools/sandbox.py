"""Run model-written Python where it can do no harm: `run_python`, and the warm rooms behind it.

Levels, best first. `bubblewrap` and `namespaces` isolate alike (the second makes by itself what the
first is asked for): no network, a read-only interpreter and nothing else of the host, a scrubbed
environment, for each program its own user, pid, mount and ipc namespaces, its own empty /tmp, rlimits,
no capabilities and a seccomp filter. `unsafe` keeps limits and filter but sees the host's files; it has
to be asked for by name. Each result says which level it ran under. See docs/sandbox.md.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import os
import platform
import queue
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, Literal

from .base import Infrastructure

Level = Literal["bubblewrap", "namespaces", "unsafe"]
Ended = Literal[
    "finished",
    "time_limit",
    "memory_limit",
    "runtime_error",
    "output_limit",
    "compile_error",
    "sandbox_violation",
]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces")  # those that "auto" may choose
PACKAGES = ("numpy",)  # what programs may import beyond the standard library, where the host has it

_HERE = Path(__file__).parent
_ROOM_FILES = ("sandbox_kernel.py", "sandbox_program.py", "sandbox_room.py", "sandbox_seccomp.py")
_BOOT = (
    "import sys, types, json; room = types.ModuleType('room'); room.__path__ = [sys.argv[1]]; "
    "sys.modules['room'] = room; from room.sandbox_room import main; main(json.loads(sys.argv[2]))"
)
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program that prints a set has one verdict
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
_START_SECONDS = 30.0
_GRACE_SECONDS = 10.0  # past a case's own limits, before its room is taken to be stuck


class SandboxError(Infrastructure):
    """The sandbox itself failed, or none is possible here. Never the fault of a judged program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Memory is address space beyond that of the idle interpreter, per process."""

    time_limit: float = 1.0  # seconds of processor time
    wall_limit: float | None = (
        None  # seconds by the clock; None: 4 * time_limit + 2, for a busy machine's sake
    )
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
        return 4 * self.time_limit + 2 if self.wall_limit is None else self.wall_limit


@dataclass(frozen=True, slots=True)
class Result:
    """How one program ended. `value` is what the called function returned, as JSON text."""

    ended: Ended
    error: str
    stdout: str
    stderr: str
    exit_code: int
    cpu: float
    wall: float
    sandbox: Level
    value: str | None = None

    @property
    def ok(self) -> bool:
        return self.ended == "finished"


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a script with its input, or with `fn_name` a call with `arguments` (a JSON list)."""

    source: str
    stdin: str = ""
    fn_name: str | None = None
    arguments: str = "[]"


def run_python(source: str, stdin: str = "", *, limits: Limits = Limits(), sandbox: str = "auto") -> Result:
    """Run a program as `python program.py < stdin` in the sandbox."""
    return submit(Program(source, stdin), limits, sandbox).result()


async def arun_python(
    source: str, stdin: str = "", *, limits: Limits = Limits(), sandbox: str = "auto"
) -> Result:
    """`run_python` that waits without holding a thread."""
    return await asyncio.wrap_future(submit(Program(source, stdin), limits, sandbox))


def submit(program: Program, limits: Limits, sandbox: str = "auto") -> Future[Result]:
    """Queue a program for the next free room."""
    return _rooms(resolve(sandbox)).submit(program, limits)


def resolve(sandbox: str = "auto") -> Level:
    """The level that will judge, tried out on this machine; raises where it is not possible."""
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
    raise SandboxError(
        "no sandbox is possible here ("
        + "; ".join(reasons)
        + "). Install bubblewrap, or allow unprivileged user "
        "namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a "
        "container: --security-opt seccomp=unconfined). sandbox='unsafe' runs programs with limits but without "
        "isolation: only for programs that you trust."
    )


@cache
def _obstacle(level: Level) -> str | None:
    """Why this level does not work here, or None: found by judging a program in it."""
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
def _rooms(level: Level) -> _Rooms:
    return _Rooms(level)


class _Rooms:
    """Warm rooms of one level, made when needed, one case at a time in each, as many as processors."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.size = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._free: queue.LifoQueue[_Room | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._free.put(None)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix=f"sandbox-{level}")
        atexit.register(self.close)

    def submit(self, program: Program, limits: Limits) -> Future[Result]:
        return self._threads.submit(self._run, program, limits)

    def close(self) -> None:
        while not self._free.empty():
            room = self._free.get_nowait()
            if room is not None:
                room.close()

    def _run(self, program: Program, limits: Limits) -> Result:
        """A room that dies is replaced. A program whose rooms die twice is at fault; a start that fails is not."""
        room = self._free.get()
        try:
            for _ in range(2):
                room = room or _Room(self.level)
                try:
                    return room.run(program, limits)
                except _RoomDied as death:
                    room.close()
                    room, reason = None, str(death)
            error = f"the sandbox died twice under this program: {reason}"
            return Result("sandbox_violation", error, "", "", -1, 0.0, 0.0, self.level)
        except BaseException:
            if room is not None:
                room.close()
                room = None
            raise
        finally:
            self._free.put(room)


class _RoomDied(Exception):
    """The fork server hung up or fell silent in the middle of a case."""


class _Room:
    """One sandbox with a fork server in it (`sandbox_room`), at the other end of a socket."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._preloaded: set[str] = set()
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(prefix="unitymas-room-")  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                _command(level),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=_ENVIRONMENT,
                close_fds=True,
            )
        self._socket.settimeout(_START_SECONDS)
        try:
            self._receive(1)
        except (_RoomDied, OSError) as error:
            self.close()
            raise SandboxError(f"a {level} room did not start: {self._last_words() or error}") from error

    def run(self, program: Program, limits: Limits) -> Result:
        case = {
            "program": program.source,
            "stdin": program.stdin,
            "fn_name": program.fn_name,
            "arguments": program.arguments,
            "limits": asdict(limits) | {"wall_limit": limits.wall},
        }
        payload = json.dumps(case).encode()
        self._socket.settimeout(limits.wall + _GRACE_SECONDS)
        try:
            self._preload(program.source)
            self._socket.sendall(b"c" + struct.pack("I", len(payload)) + payload)
            reply = json.loads(self._receive(struct.unpack("I", self._receive(4))[0]))
        except (OSError, ValueError) as error:
            raise _RoomDied(f"{error} {self._last_words()}".strip()) from error
        if "failure" in reply:
            raise SandboxError(f"the {self.level} sandbox could not isolate a program: {reply['failure']}")
        return Result(sandbox=self.level, **reply)

    def close(self) -> None:
        self._socket.close()  # the server leaves when its end hangs up; its keeper kills a running case
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _preload(self, source: str) -> None:
        """Packages take longer to import than most programs run: the server imports them, once."""
        for name in PACKAGES:
            if name in source and name not in self._preloaded:
                self._preloaded.add(name)
                self._socket.sendall(b"p")

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
    """A forked process must not talk into its parent's rooms: it makes its own."""
    _rooms.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_rooms)


# --- what a room is made of ---------------------------------------------------------------------------


def _command(level: Level) -> list[str]:
    view = _view()
    config: dict[str, Any] = {
        "level": level,
        "path": view.path,
        "binds": [[path, path] for path in view.binds],
        "links": view.links,
        "masks": view.masks,
        "privileged": _privileged(),
        "threads_only": level == "unsafe" or not _can_count_processes(),
    }
    python = [view.interpreter, "-s", "-S", "-B", "-X", "utf8", "-c", _BOOT]
    if level != "bubblewrap":
        return [*python, str(_HERE), json.dumps(config)]
    return [*_bubblewrap(view), "--", *python, "/room", json.dumps(config)]


def _bubblewrap(view: _View) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--new-session"]
    if _privileged():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    for folder in _ancestors([*view.binds, "/room/file"]):
        command += ["--perms", "0755", "--dir", folder]  # made in passing they would be closed to others
    for path in view.binds:
        command += ["--ro-bind", path, path]
        command += [word for mask in view.masks if mask.startswith(path + "/") for word in ("--tmpfs", mask)]
    command += [word for mask in view.masks for word in ("--remount-ro", mask)]
    for target, name in view.links:
        command += ["--symlink", target, name]
    for name in _ROOM_FILES:
        command += ["--ro-bind", str(_HERE / name), f"/room/{name}"]
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", "/dev/shm", "--dir", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


@dataclass(frozen=True, slots=True)
class _View:
    """The part of the host that programs see, read-only: interpreter, shared libraries, PACKAGES."""

    interpreter: str
    binds: list[str]
    links: list[list[str]]  # [target, name], as /lib -> usr/lib
    masks: list[str]  # third-party packages under a bind, hidden: an installed data set holds answers
    path: list[str]  # sys.path


@cache
def _view() -> _View:
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    folders = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", os.path.realpath(f"{sys.base_prefix}/lib")]
    links = [[os.readlink(path), path] for path in ("/lib", "/lib64") if os.path.islink(path)]
    binds = _outermost([path for path in folders if os.path.isdir(path) and not os.path.islink(path)])
    masks = [
        found
        for folder in binds
        for kind in ("site-packages", "dist-packages")
        for found in glob(f"{folder}/python*/{kind}") + glob(f"{folder}/python*/*/{kind}")
    ]
    packages, package_path = _packages()
    cache = ["/etc/ld.so.cache"] if os.path.exists("/etc/ld.so.cache") else []
    path = [stdlib, f"{stdlib}/lib-dynload", *package_path]
    return _View(interpreter, [*binds, interpreter, *cache, *packages], links, sorted(set(masks)), path)


def _packages() -> tuple[list[str], list[str]]:
    """Where PACKAGES lie, with the shared libraries that wheels put beside them; and their sys.path entries."""
    folders, path = [], []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folder = os.path.realpath(spec.submodule_search_locations[0])
            folders += [folder, *(libs for libs in (f"{folder}.libs",) if os.path.isdir(libs))]
            path.append(os.path.dirname(folder))
    return folders, list(dict.fromkeys(path))


def _outermost(paths: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return kept


def _ancestors(paths: Sequence[str]) -> list[str]:
    folders = {str(folder) for path in paths for folder in Path(path).parents}
    return sorted(folders - {"/", "/dev"})


@cache
def _privileged() -> bool:
    """May this process make namespaces and change its user as real root does?"""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    held = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    needed = (1 << 21) | (1 << 6) | (1 << 7)  # CAP_SYS_ADMIN, CAP_SETGID, CAP_SETUID
    return os.geteuid() == 0 and held & needed == needed


def _can_count_processes() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts per user namespace; it never binds the machine's root."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= (5, 14) and (os.geteuid() != 0 or _privileged())
