"""The fork server inside of the sandbox: one process, in namespaces of its own, for each judged program.

    host ── room (bubblewrap or namespaces: no network, read-only root)
              └─ server: warm interpreter; reads one byte per order and never a program or its input
                   └─ keeper: reads one case; own user, mount, pid and ipc namespaces, empty /tmp
                        └─ program: process 1 in there; rlimits, no capabilities, seccomp

The keeper stays outside of the program's pid namespace: the program cannot see, signal or trace it.
Time and output are measured by the keeper alone, so nothing that the program does to its own clocks,
alarms or streams matters. When process 1 ends, the kernel kills whatever else is left in there.
The server never reads a case, so no program finds another's input in its inherited memory.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

from . import sandbox_kernel as kernel
from .sandbox_program import PROGRAM_FILE, Channel, run
from .sandbox_seccomp import build_filter

CASE, PRELOAD, READY = b"c", b"p", b"r"
_MEGABYTE = 1 << 20
_CONNECTION = 60  # a descriptor out of the way
_CHANNEL = 3
_INSIDE = 1000  # the program's user and group in its own namespace
_LINUX = sys.platform == "linux"


def main(config: dict[str, Any]) -> None:
    """Enter the room if the launcher has not built it, then serve until the host hangs up."""
    os.dup2(0, _CONNECTION, inheritable=False)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    if config["level"] == "namespaces":
        kernel.enter_room(config["binds"], config["links"], config["masks"], config["privileged"])
    if config["level"] != "unsafe" and config["privileged"]:
        kernel.become_nobody()
    sys.path[:] = config["path"]
    unsafe = config["level"] == "unsafe"
    if unsafe:
        import shutil  # noqa: F401  (for `_remove`, once; the other levels stay small, and fork fast)
    config["filter"] = build_filter(os.uname().machine, config["threads_only"], unsafe) if _LINUX else None
    gc.collect()
    gc.freeze()
    os.write(_CONNECTION, READY)
    while order := os.read(_CONNECTION, 1):
        if order == PRELOAD:
            _preload()
            continue
        keeper = os.fork()
        if keeper == 0:
            _keep(config)
            os._exit(0)
        _, status = os.waitpid(keeper, 0)
        if status:
            sys.exit(f"the keeper of a case ended with status {status}")


def _preload() -> None:
    """numpy, once for all cases that use it; without it they fail by themselves, with its own error."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        print(error, file=sys.stderr)
    gc.freeze()


def _keep(config: dict[str, Any]) -> None:
    case = json.loads(_read_exactly(struct.unpack("I", _read_exactly(4))[0]))
    try:
        report = _Case(case, config).judge()
    except OSError as error:
        report = {"failure": f"{type(error).__name__}: {error}"}
    reply = json.dumps(report).encode()
    with open(_CONNECTION, "wb", closefd=False) as connection:
        connection.write(struct.pack("I", len(reply)) + reply)


def _read_exactly(length: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = os.read(_CONNECTION, min(length - len(chunks), _MEGABYTE))
        if not chunk:
            os._exit(0)  # the host is gone
        chunks += chunk
    return bytes(chunks)


class _Case:
    """One program, from its empty /tmp to its report."""

    def __init__(self, case: dict[str, Any], config: dict[str, Any]) -> None:
        self.case, self.limits = case, case["limits"]
        self.isolated = config["level"] != "unsafe"
        self.filter: bytes | None = config["filter"]
        self.count_processes = self.isolated and not config["threads_only"]
        self.killed = ""  # why the keeper killed it
        self.captured: dict[str, bytearray] = {
            "stdout": bytearray(),
            "stderr": bytearray(),
            "channel": bytearray(),
        }

    def judge(self) -> dict[str, Any]:
        folder = self._isolated_folder() if self.isolated else _open_folder()
        try:
            os.chdir(folder)
            with open(PROGRAM_FILE, "w", errors="surrogatepass") as file:
                file.write(self.case["program"])
            return self._fork_and_watch(folder)
        finally:
            if not self.isolated:
                _remove(folder)

    def _isolated_folder(self) -> str:
        """New namespaces, with /tmp and shared memory of the program's own, and its input at /dev/stdin."""
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC)
        kernel.map_user(uid, gid, inside=_INSIDE)
        self.baseline = kernel.address_space()
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        disk = f"mode=755,nr_inodes=4096,size={self.limits['disk_mb']}m"
        kernel.mount("tmpfs", "/tmp", "tmpfs", flags, disk)
        kernel.mount("tmpfs", "/dev/shm", "tmpfs", flags, disk)
        stdin = _as_bytes(self.case["stdin"])
        kernel.mount("tmpfs", "/proc", "tmpfs", flags, f"mode=755,size={len(stdin) + _MEGABYTE}")
        os.makedirs("/proc/self/fd")
        self.stdin = self._input_file("/proc/self/fd/0", stdin)
        kernel.mount("none", "/proc", flags=kernel.MS_REMOUNT | kernel.MS_RDONLY | flags)
        return "/tmp"

    def _input_file(self, path: str, content: bytes) -> int:
        with open(path, "wb") as file:
            file.write(content)
        return os.open(path, os.O_RDONLY)

    def _fork_and_watch(self, folder: str) -> dict[str, Any]:
        if not self.isolated:
            self.baseline = kernel.address_space() if _LINUX else 0
            self.stdin = self._input_file("stdin", _as_bytes(self.case["stdin"]))
            os.unlink("stdin")
        key = os.urandom(16).hex().encode()
        pipes = {name: os.pipe() for name in self.captured}
        wake, signalled = os.pipe()
        for descriptor in (wake, signalled):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        started = time.monotonic()
        program = os.fork()
        if program == 0:
            self._become_program({name: ends[1] for name, ends in pipes.items()}, key, folder)
        for _, end in pipes.values():
            os.close(end)
        readers = {ends[0]: name for name, ends in pipes.items()}
        status, usage = self._watch(program, readers, wake, started)
        wall = time.monotonic() - started
        self._drain(readers)
        return self._report(status, usage.ru_utime + usage.ru_stime, wall, key)

    def _become_program(self, ends: dict[str, int], key: bytes, folder: str) -> None:
        """In the forked child, for good: descriptors, limits and filters first, then the program."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            channel = os.dup2(ends["channel"], 200)
            for descriptor, target in (
                (self.stdin, 0),
                (ends["stdout"], 1),
                (ends["stderr"], 2),
                (channel, _CHANNEL),
            ):
                os.dup2(descriptor, target)
            os.closerange(_CHANNEL + 1, 1024)
            os.environ["TMPDIR"] = folder
            for name in [name for name in sys.modules if name.startswith(f"{__package__}.")]:
                del sys.modules[name]
            facts = Channel(_CHANNEL, key)
            try:
                self._limit_and_seal()
            except (OSError, ValueError) as error:
                facts.tell(unsealed=str(error))
                return
            facts.tell(sealed="yes")
            case = self.case
            status = run(case["program"], case["fn_name"], case["arguments"], facts)
        finally:
            os._exit(status)

    def _limit_and_seal(self) -> None:
        limits = self.limits
        memory = self.baseline + limits["memory_mb"] * _MEGABYTE
        disk = limits["disk_mb"] * _MEGABYTE
        wanted = {
            "CORE": 0,
            "NOFILE": limits["open_files"],
            "FSIZE": disk,
            "CPU": int(limits["time_limit"]) + 2,
        }
        wanted["STACK"] = memory if _LINUX else resource.getrlimit(resource.RLIMIT_STACK)[0]
        if _LINUX:
            wanted["AS"] = memory
        if self.count_processes:
            wanted["NPROC"] = limits["processes"] + 1  # and the keeper
        for name, value in wanted.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        if self.isolated:
            kernel.drop_capabilities()
        if _LINUX:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.filter is not None:
            kernel.install_filter(self.filter)

    def _watch(self, program: int, readers: dict[int, str], wake: int, started: float) -> tuple[int, Any]:
        """Read its output and measure its time until it ends, or must."""
        poller = select.poll()
        for descriptor in (*readers, wake):
            poller.register(descriptor, select.POLLIN)
        poller.register(_CONNECTION, select.POLLHUP)
        while True:
            ended, status, usage = os.wait4(program, os.WNOHANG)
            if ended:
                return status, usage
            left = self._time_left(program, started)
            if left <= 0:
                self.killed = "time_limit"
            if self.killed:
                os.kill(program, signal.SIGKILL)
                _, status, usage = os.wait4(program, 0)
                return status, usage
            for descriptor, event in poller.poll(max(left, 0.002) * 1000):
                if descriptor == _CONNECTION:
                    self.killed = "abandoned"
                elif descriptor == wake:
                    os.read(wake, 512)
                elif not (event & select.POLLIN and self._read(readers[descriptor], descriptor)):
                    poller.unregister(descriptor)

    def _time_left(self, program: int, started: float) -> float:
        """Seconds until the nearer limit: processor time, or the wider one by the clock on the wall."""
        wall = self.limits["wall_limit"] - (time.monotonic() - started)
        if not _LINUX:
            return float(wall)  # RLIMIT_CPU alone watches the processor there
        try:
            used = time.clock_gettime((~program << 3) | 2)  # the processor clock of that process
        except OSError:  # it has just ended
            return float(wall)
        return float(min(wall, self.limits["time_limit"] - used))

    def _read(self, name: str, descriptor: int) -> bool:
        chunk = os.read(descriptor, _MEGABYTE)
        self.captured[name] += chunk
        if sum(map(len, self.captured.values())) > self.limits["output_mb"] * _MEGABYTE:
            self.killed = self.killed or "output_limit"
            return False
        return bool(chunk)

    def _drain(self, readers: dict[int, str]) -> None:
        """What lies in the pipes after the end; every writer is dead by now."""
        for descriptor, name in readers.items():
            while self._read(name, descriptor):
                pass

    def _report(self, status: int, cpu: float, wall: float, key: bytes) -> dict[str, Any]:
        code = os.waitstatus_to_exitcode(status)
        facts, honest = _facts(bytes(self.captured["channel"]), key)
        if "sealed" not in facts and not self.killed:  # no line of the program has run
            raise OSError(
                f"limits and filters could not be set: {facts.get('unsealed', f'exit status {code}')}"
            )
        if not self.killed and cpu > self.limits["time_limit"]:
            self.killed = "time_limit"
        ended, error = _classify(self.killed, code, facts, honest, self.case["fn_name"])
        return {
            "ended": ended,
            "error": error,
            "stdout": self.captured["stdout"][: _MEGABYTE // 16 if ended == "output_limit" else None].decode(
                errors="replace"
            ),
            "stderr": self.captured["stderr"][-16384:].decode(errors="replace"),
            "exit_code": code,
            "cpu": cpu,
            "wall": wall,
            "value": facts.get("value"),
        }


def _as_bytes(text: str) -> bytes:
    """Any text, also one that no file could have been read as: a test may hold a lone surrogate."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def _open_folder() -> str:
    """A folder for a program that is not isolated. By hand: a small server forks fast."""
    folder = f"/tmp/unitymas-case-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    return folder


def _remove(folder: str) -> None:
    """Best effort: what a program has made unreadable stays behind."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _facts(channel: bytes, key: bytes) -> tuple[dict[str, str], bool]:
    """What the program's process told; not honest when a line lacks the key or is said twice."""
    facts: dict[str, str] = {}
    for line in channel.splitlines():
        try:
            told = json.loads(line[len(key) :]) if line.startswith(key) else None
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or facts.keys() & told.keys() or not _texts(told):
            return facts, False
        facts.update(told)
    return facts, True


def _texts(told: dict[str, Any]) -> bool:
    return all(isinstance(text, str) for text in told.values())


def _classify(
    killed: str, code: int, facts: dict[str, str], honest: bool, fn_name: str | None
) -> tuple[str, str]:
    """How it ended, and the reason in words. Facts from outside of the program come first."""
    if killed:
        return killed, {"time_limit": "ran past the time limit", "output_limit": "wrote too much"}.get(
            killed, killed
        )
    if code == -signal.SIGSYS:
        return "sandbox_violation", "made a forbidden system call"
    if not honest:
        return "sandbox_violation", "wrote to the judge's channel"
    if code == -signal.SIGKILL:
        return "memory_limit", "killed by the kernel, which was out of memory"
    if code < 0:
        return "runtime_error", f"killed by signal {-code} ({signal.strsignal(-code)})"
    if "compile" in facts:
        return "compile_error", facts["compile"]
    if facts.get("raised") == "MemoryError":
        return "memory_limit", "MemoryError: past the memory limit"
    if "raised" in facts:
        return "runtime_error", facts["raised"]
    if code:
        return "runtime_error", f"exit status {code}"
    if fn_name is not None and "value" not in facts:
        return "runtime_error", f"ended before {fn_name} returned"
    return "finished", ""
