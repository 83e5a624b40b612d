"""Fork server inside the sandbox: each judged program gets its own process and its own namespaces.

    host ── room (bubblewrap or namespaces: no network, read-only root)
              └─ server: an interpreter stopped at its start (`start`); never reads a program or its input
                   └─ keeper: reads one case; own user, mount and pid namespaces, empty /tmp
                        └─ program: process 1 there; rlimits, no capabilities, seccomp; the interpreter runs it

The keeper is outside of the program's pid namespace, so the program cannot see, signal or trace it. The keeper alone
measures time and output, so the program's own clocks, alarms and streams do not matter. When process 1 ends, the kernel
kills all other processes of the namespace. The server never reads a case, so no program finds the input of another in its
memory.
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
from typing import TYPE_CHECKING

from . import kernel, program
from .accounting import ProcessTree, can_enter
from .program import PROGRAM_FILE, Channel
from .seccomp import build_filter

if TYPE_CHECKING:  # a room has only the modules that it runs
    from .orders import CaseOrder, RoomConfig

CASE, PRELOAD, READY = b"c", b"p", b"r"
_MEGABYTE = 1 << 20
_CONNECTION = 60  # descriptor of the connection to the host
_GROUP = 61  # first descriptor of the programs' control group
_ASIDE = 63
_CHANNEL = 3
_INSIDE = 1000  # the program's user and group in its own namespace
_LINUX = sys.platform == "linux"
_LOOK = 0.02  # seconds between two measurements of a program's processes


class _IsProgram(BaseException):
    """Raised in a program's process, to leave the server's frames and continue as a plain interpreter."""


def main(config: RoomConfig) -> None:
    """Serve until the host closes the connection, and exit. In each program's process, return, ready to run it."""
    try:
        _serve(config)
        os._exit(0)
    except _IsProgram:
        pass
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _serve(config: RoomConfig) -> None:
    os.dup2(0, _CONNECTION, inheritable=False)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    config["group"] = [kernel.moved(descriptor, _GROUP + i) for i, descriptor in enumerate(config["group"])]
    unsafe = config["level"] == "unsafe"
    if not unsafe and config["privileged"]:
        kernel.become_nobody(config["user"])
    config["folder"] = os.path.dirname(sys.argv[0])
    for name in ("PYTHONPATH", "PYTHONINSPECT", "UNITYMAS_ROOM"):
        del os.environ[name]
    sys.path[:] = config["path"]
    program.warm_up(not unsafe)
    if unsafe:
        import shutil  # noqa: F401  (for `_remove`, once; the other levels stay small, and fork fast)
    if not can_enter(config["group"]):
        config["group"] = []
    counted = bool(config["group"])
    machine = os.uname().machine
    config["filter"] = build_filter(machine, config["threads_only"], unsafe, counted) if _LINUX else None
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
    """Import numpy once, in a room for programs that use it. If this fails, each program fails with the same error."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        print(error, file=sys.stderr)
    gc.freeze()


def _keep(config: RoomConfig) -> None:
    case = json.loads(_read_exactly(struct.unpack("I", _read_exactly(4))[0]))
    try:
        report = _Case(case, config).judge()
    except Exception as error:
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
    """Case: one program, from its empty /tmp to its report."""

    def __init__(self, case: CaseOrder, config: RoomConfig) -> None:
        self.case, self.limits = case, case["limits"]
        self.config = config
        self.folder: str = config["folder"]
        self.isolated = config["level"] != "unsafe"
        self.filter: bytes | None = config["filter"]
        self.count_processes = self.isolated and not config["threads_only"]
        self.killed = ""  # why the keeper killed it
        self.used = self.waited = 0.0  # processor time of the tree; time that counts against the wall limit
        self.looked = self.started = time.monotonic()
        self.captured: dict[str, bytearray] = {
            "stdout": bytearray(),
            "stderr": bytearray(),
            "channel": bytearray(),
        }

    def judge(self) -> dict[str, object]:
        """Run the program and return its result. In the program's own process, raise `_IsProgram`."""
        if not self.isolated:
            os.mkdir(self.folder, 0o700)
            os.environ["TMPDIR"] = self.folder
        try:
            ends = self._isolate() if self.isolated else self._settle()
            os.chdir(self.folder)
            with open(PROGRAM_FILE, "w", errors="surrogatepass", newline="") as file:
                file.write(self.case["program"])
            report = self._fork_and_watch(ends)
        except Exception:
            self._remove()
            raise
        self._remove()
        return report

    def _remove(self) -> None:
        """Remove the program's files if the kernel does not do so. Files that the program has made unreadable stay."""
        if not self.isolated:
            import shutil

            shutil.rmtree(self.folder, ignore_errors=True)

    def _isolate(self) -> dict[str, tuple[int, int]]:
        """Enter new namespaces, with the program's own /tmp and /dev/shm, and only its three streams in /proc."""
        uid, gid = os.getuid(), os.getgid()
        self.tree: ProcessTree | None = ProcessTree(
            self.limits["memory_mb"] * _MEGABYTE, self.config["group"][1] if self.config["group"] else None
        )
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | self._own_ipc())
        kernel.map_user(uid, gid, inside=_INSIDE)
        self.baseline = kernel.address_space()
        stdin = _as_bytes(self.case["stdin"])
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        size = self.limits["disk_mb"] * _MEGABYTE + len(stdin) + _MEGABYTE
        kernel.mount("tmpfs", "/tmp", "tmpfs", flags, f"mode=755,nr_inodes=4096,size={size}")
        for folder in ("/tmp/tmp", "/tmp/shm", "/tmp/proc", "/tmp/proc/self", "/tmp/proc/self/fd"):
            os.mkdir(folder, 0o755)
        self.stdin = self._input_file("/tmp/proc/self/fd/0", stdin)
        ends = {"channel": os.pipe()}
        for number, name in ((1, "stdout"), (2, "stderr")):  # pipes with a name, so that /dev/stdout opens
            path = f"/tmp/proc/self/fd/{number}"
            os.mkfifo(path)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            ends[name] = reader, os.open(path, os.O_WRONLY)
        kernel.mount("/tmp/shm", "/dev/shm", flags=kernel.MS_BIND)
        kernel.mount("/tmp/proc", "/proc", flags=kernel.MS_BIND)
        kernel.mount("none", "/proc", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)
        kernel.mount("/tmp/tmp", "/tmp", flags=kernel.MS_BIND)
        for path in self.config["hidden"]:
            kernel.show_again(f"{self.config['room']}/stash{path}", path)
        return ends

    def _own_ipc(self) -> int:
        """Return the flag of a new ipc namespace; 0 with the filter, under which no program can reach an ipc object."""
        return 0 if self.filter is not None else kernel.CLONE_NEWIPC

    def _settle(self) -> dict[str, tuple[int, int]]:
        """Make a folder and pipes, without isolation."""
        self.tree = None
        self.baseline = kernel.address_space() if _LINUX else 0
        path = f"{self.folder}/stdin"
        self.stdin = self._input_file(path, _as_bytes(self.case["stdin"]))
        os.unlink(path)
        return {name: os.pipe() for name in self.captured}

    def _input_file(self, path: str, content: bytes) -> int:
        with open(path, "wb") as file:
            file.write(content)
        return os.open(path, os.O_RDONLY)

    def _fork_and_watch(self, pipes: dict[str, tuple[int, int]]) -> dict[str, object]:
        key = os.urandom(16).hex().encode()
        wake, signalled = os.pipe()
        for descriptor in (wake, signalled):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.looked = self.started = time.monotonic()
        program = os.fork()
        if program == 0:
            self._become_program({name: ends[1] for name, ends in pipes.items()}, key)
        for reader, end in pipes.values():
            os.close(end)
            os.set_blocking(reader, False)
        readers = {ends[0]: name for name, ends in pipes.items()}
        status, usage = self._watch(program, readers, wake)
        wall = time.monotonic() - self.started
        if self.tree is not None:
            self.used = max(self.used, self.tree.final_cpu())
        self._drain(readers)
        return self._report(status, max(self.used, usage.ru_utime + usage.ru_stime), wall, key)

    def _become_program(self, ends: dict[str, int], key: bytes) -> None:
        """Become the program, in the forked child: set descriptors, limits and filters, then leave to run it."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.config["group"]:
                os.write(self.config["group"][0], b"0")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            channel = os.dup2(ends["channel"], _ASIDE)
            places = ((self.stdin, 0), (ends["stdout"], 1), (ends["stderr"], 2), (channel, _CHANNEL))
            for descriptor, target in places:
                os.dup2(descriptor, target)
            os.closerange(_CHANNEL + 1, 1024)  # the server has none above
            facts = Channel(_CHANNEL, key)
            try:
                self._limit_and_seal()
            except (OSError, ValueError) as error:
                facts.tell(unsealed=str(error))
                os._exit(1)
            facts.tell(sealed="yes")
            program.prepare(self.case["fn_name"], self.case["arguments"], facts)
        except BaseException:
            os._exit(1)
        raise _IsProgram

    def _limit_and_seal(self) -> None:
        limits = self.limits
        memory = self.baseline + limits["memory_mb"] * _MEGABYTE
        disk = limits["disk_mb"] * _MEGABYTE
        bounds = {
            "CORE": 0,
            "NOFILE": limits["open_files"],
            "FSIZE": disk,
            "CPU": int(limits["time_limit"]) + 2,
        }
        if _LINUX:
            bounds["AS"] = memory
            bounds["SIGPENDING"] = 1024
            # the hard limit stays, as programs raise theirs; AS bounds the stack
            hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
            soft = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
            resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
        if self.count_processes:
            bounds["NPROC"] = limits["processes"] + 1  # and the keeper
        for name, value in bounds.items():
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

    def _watch(self, program: int, readers: dict[int, str], wake: int) -> tuple[int, resource.struct_rusage]:
        """Read the program's output and measure its use, until it ends or a limit ends it."""
        poller = select.poll()
        for descriptor in (*readers, wake):
            poller.register(descriptor, select.POLLIN)
        poller.register(_CONNECTION, select.POLLHUP)
        while True:
            ended, status, usage = os.wait4(program, os.WNOHANG)
            if ended:
                return status, usage
            if time.monotonic() - self.looked >= _LOOK:
                self._look(program)
            if self.killed:
                os.kill(program, signal.SIGKILL)
                _, status, usage = os.wait4(program, 0)
                return status, usage
            for descriptor, event in poller.poll(_LOOK * 1000):
                if descriptor == _CONNECTION:
                    self.killed = "abandoned"
                elif descriptor == wake:
                    os.read(wake, 512)
                elif not (event & select.POLLIN and self._read(readers[descriptor], descriptor)):
                    poller.unregister(descriptor)

    def _look(self, program: int) -> None:
        """Measure the program's processes. Time in which one of them waits for a busy machine does not count."""
        now, before = time.monotonic(), self.used
        use = self.tree.look() if self.tree is not None else None
        try:
            own = time.clock_gettime((~program << 3) | 2) if _LINUX else 0.0  # finer than /proc has it
        except OSError:  # it has just ended
            own = 0.0
        self.used = max(self.used, own, use.cpu if use is not None else 0.0)
        passed = now - self.looked
        self.waited += min(passed, self.used - before) if use is not None and use.waiting else passed
        self.looked = now
        limits = self.limits
        if (
            self.used >= limits["time_limit"]
            or self.waited >= limits["wall_limit"]
            or now - self.started >= limits["longest"]
        ):
            self.killed = "time_limit"
        elif self.tree is not None and use is not None and self.tree.is_too_large(use):
            self.killed = "memory_limit"

    def _read(self, name: str, descriptor: int) -> bool:
        """Read available output, and tell whether more can come."""
        try:
            chunk = os.read(descriptor, _MEGABYTE)
        except BlockingIOError:
            return True
        self.captured[name] += chunk
        if sum(map(len, self.captured.values())) > self.limits["output_mb"] * _MEGABYTE:
            self.killed = self.killed or "output_limit"
            return False
        return bool(chunk)

    def _drain(self, readers: dict[int, str]) -> None:
        """Read the rest of the pipes after the end, when every writer is dead."""
        for descriptor, name in readers.items():
            size = -1
            while size != len(self.captured[name]):
                size = len(self.captured[name])
                if not self._read(name, descriptor):
                    break

    def _report(self, status: int, cpu: float, wall: float, key: bytes) -> dict[str, object]:
        code = os.waitstatus_to_exitcode(status)
        facts, honest = _facts(bytes(self.captured["channel"]), key)
        if "sealed" not in facts and not self.killed:  # no line of the program has been executed
            raise OSError(
                f"limits and filters could not be set: {facts.get('unsealed', f'exit status {code}')}"
            )
        if not self.killed and cpu > self.limits["time_limit"]:
            self.killed = "time_limit"
        ended, error = _classify(self.killed, code, facts, honest, self.case["fn_name"])
        whole = ended == "finished" and self.case["fn_name"] is None  # otherwise it is not compared
        return {
            "ended": ended,
            "error": error,
            "stdout": self.captured["stdout"][: None if whole else _MEGABYTE // 16].decode(errors="replace"),
            "stderr": self._stderr(),
            "exit_code": code,
            "cpu": cpu,
            "wall": wall,
            "value": facts.get("value"),
        }

    def _stderr(self) -> str:
        """Return the end of stderr, with the program's file by its name only."""
        text = self.captured["stderr"][-16384:].decode(errors="replace")
        return text.replace(f'"{self.folder}/{PROGRAM_FILE}"', f'"{PROGRAM_FILE}"')


def _as_bytes(text: str) -> bytes:
    """Encode any text, also one with a lone surrogate, which a test may contain."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")


def _facts(channel: bytes, key: bytes) -> tuple[dict[str, str], bool]:
    """Return the facts that the program's process reported, and a flag: each line has the key, and no fact comes twice."""
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


def _texts(told: dict[str, object]) -> bool:
    return all(isinstance(text, str) for text in told.values())


_KILLED = {
    "time_limit": "ran past the time limit",
    "output_limit": "wrote too much",
    "memory_limit": "all its processes together are past the memory limit",
}


def _classify(
    killed: str, code: int, facts: dict[str, str], honest: bool, fn_name: str | None
) -> tuple[str, str]:
    """Return the program's ending and its reason in words. Facts from outside of the program come first."""
    if killed:
        return killed, _KILLED.get(killed, killed)
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
