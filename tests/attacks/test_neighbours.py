"""One program cannot change what another finds, has or is told: in the same room after it, or in another beside it."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unitymas.envs.tools.sandbox import runner as sandbox
from unitymas.envs.tools.sandbox.kernel import NOBODY
from unitymas.envs.tools.sandbox.launch import _own_user
from unitymas.envs.tools.sandbox.runner import Limits, Program, SandboxError, resolve, run_python

try:
    LEVEL = resolve("auto")
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

privileged = pytest.mark.skipif(os.geteuid() != 0, reason="rooms of an ordinary user are that user's")

HOARD = """
import ctypes, mmap, os, select, time
libc = ctypes.CDLL(None, use_errno=True)
def pipes(): kept.append(os.pipe())
def watches():
    if libc.inotify_init1(0) < 0: raise OSError
def memory():
    kept.append(mmap.mmap(-1, 1 << 16))
    if libc.mlock(ctypes.byref(ctypes.c_char.from_buffer(kept[-1])), 1 << 16): raise OSError
def timers():
    if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())): raise OSError
kept = []
for hoard in (pipes,) * 11 + (watches, memory, timers):
    if os.fork() == 0:
        try:
            while True: hoard()
        except OSError:
            time.sleep(1.5)
            os._exit(0)
time.sleep(1.5)
"""
ASK = """
import ctypes, fcntl, mmap, os
libc = ctypes.CDLL(None)
print([fcntl.fcntl(os.pipe()[1], 1032) for _ in range(20)])
print([libc.inotify_init1(0) >= 0 for _ in range(4)])
block = mmap.mmap(-1, 1 << 20)
print(libc.mlock(ctypes.byref(ctypes.c_char.from_buffer(block)), 1 << 20))
print([libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) for _ in range(4)])
read, write = os.pipe()
print(os.write(write, b"x" * 65536), len(os.read(read, 65536)))  # with a smaller pipe it would wait for itself
"""


@privileged
def test_what_other_rooms_hoard_is_not_missing_here() -> None:
    """Pipes, watches, locked memory and timers are counted by user: each room is a user of its own."""
    rooms = sandbox._Rooms(LEVEL)
    rooms.size = 3
    try:
        alone = run_python(ASK)
        assert alone.ok, alone
        hoarders = [rooms.submit(Program(HOARD), Limits(20.0, open_files=512)) for _ in range(2)]
        asked = 0
        while asked == 0 or not all(one.done() for one in hoarders):
            beside = run_python(ASK, limits=Limits(wall_limit=2.0))
            assert (beside.ended, beside.stdout) == ("finished", alone.stdout), beside
            asked += 1
        assert [one.result().ended for one in hoarders] == ["finished"] * 2
    finally:
        rooms.close()


@privileged
def test_rooms_are_users_of_their_own(tmp_path: Path) -> None:
    """Also where a container has few users; where it has one, that one."""
    (tmp_path / "all").write_text("0 0 4294967295\n")
    (tmp_path / "few").write_text("0 100000 65536\n")
    (tmp_path / "one").write_text("1000 1000 1\n")
    users = {_own_user(tmp_path / "all") for _ in range(50)}
    assert len(users) > 40 and all(1 << 30 < user < 1 << 31 for user in users)
    assert all(60_000 < _own_user(tmp_path / "few") < 65_535 for _ in range(50))
    assert _own_user(tmp_path / "one") == _own_user(tmp_path / "none") == NOBODY
    rooms = [sandbox._Room(LEVEL), sandbox._Room(LEVEL)]
    try:
        assert len({_user_of(room) for room in rooms} - {0, NOBODY}) == 2
    finally:
        for room in rooms:
            room.close()


def _user_of(room: sandbox._Room) -> int:
    """User of the innermost process of a room: its server."""
    assert room._process is not None
    at = room._process.pid
    while children := Path(f"/proc/{at}/task/{at}/children").read_text().split():
        at = int(children[0])
    return Path(f"/proc/{at}").stat().st_uid


HOGS = {
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "pages": "b = bytearray(300 << 20)\nwhile True:\n    for i in range(0, len(b), 4096): b[i] ^= 1",
    "output": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "disk": "n = 0\nwhile True:\n    try: open(f'/tmp/{n}', 'w').write('x' * 100000); n += 1\n    except OSError: pass",
    "folders": "import os\nwhile True:\n    try: os.mkdir('d'); os.chdir('d')\n    except OSError: pass",
    "loops": "import os\nfor _ in range(14):\n    if os.fork() == 0: break\nwhile True: pass",
    "forks": "import os\nwhile True:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError:\n        try: os.wait()\n        except OSError: pass",
    "pipes": "import os\na, b = os.pipe()\nwhile True: os.write(b, b'x' * 60000); os.read(a, 60000)",
    "maps": "import mmap\nwhile True:\n    m = mmap.mmap(-1, 1 << 24); m[::4096] = b'x' * 4096; m.close()",
    "signals": "import os, signal\nsignal.signal(10, lambda *_: 0)\nwhile True: os.kill(os.getpid(), 10)",
    "sockets": "import socket\nkept = []\nwhile True:\n    try: kept.append(socket.socketpair()); kept[-1][0].setblocking(0); kept[-1][0].send(b'x' * 10**6)\n    except OSError: pass",
    "syncs": "import os\nf = open('/tmp/a', 'w')\nwhile True: f.write('x'); f.flush(); os.fsync(f.fileno())",
    "ranks": "import os\ntry: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\nexcept OSError: pass\nwhile True: pass",
    "locks": "import fcntl\nf = open('/tmp/a', 'w')\ni = 0\nwhile True:\n    fcntl.lockf(f, fcntl.LOCK_EX, 1, i); i += 2",
    "watches": "import select, os\nkept = []\nwhile True:\n    try:\n        e = select.epoll(); kept.append(e); [e.register(f, 1) for f in os.pipe()]\n    except OSError: pass",
}  # fmt: skip
HONEST = {
    "print(sum(range(10**6)))": "499999500000\n",
    "import os\nr, w = os.pipe()\nif os.fork() == 0:\n    os.write(w, b'y' * 65536); os._exit(0)\nos.wait(); print(len(os.read(r, 70000)))": "65536\n",
    "print(len(bytearray(300 << 20)))": "314572800\n",
    "print(open('/tmp/a', 'w').write('x' * (50 << 20)))": "52428800\n",
    "import threading\nt = [threading.Thread(target=sum, args=([1],)) for _ in range(10)]\n[x.start() for x in t]; [x.join() for x in t]; print('t')": "t\n",
}  # fmt: skip


def test_hogs_beside_it_change_no_verdict(fuzz: int) -> None:
    """Honest programs, while two other rooms are full of one kind of hog after the other; `--fuzz 3000` tries them all."""
    rooms = sandbox._Rooms(LEVEL)
    try:
        for name in random.Random(0).sample(sorted(HOGS), min(len(HOGS), max(1, fuzz // 150))):
            hogs = [rooms.submit(Program(HOGS[name]), Limits(0.5, wall_limit=2.0)) for _ in range(2)]
            for program, printed in HONEST.items():
                result = rooms.submit(Program(program), Limits(2.0)).result()
                assert (result.ended, result.stdout) == ("finished", printed), (name, result)
            assert {hog.result().ended for hog in hogs} <= {"time_limit", "memory_limit", "output_limit"}
    finally:
        rooms.close()


LEFT = "import sys; print('num' + 'py' in sys.modules, len(sys.modules))"


def test_no_program_finds_what_another_has_imported() -> None:
    rooms = sandbox._Rooms(LEVEL)
    try:
        before = rooms.submit(Program(LEFT), Limits()).result().stdout
        while len({id(place) for place in rooms._free.queue if place}) == 0:
            time.sleep(0.01)
        for _ in range(rooms.size * 2):  # every room that there is
            rooms.submit(Program("import numpy; numpy.left = 1"), Limits(5.0)).result()
            assert rooms.submit(Program(LEFT), Limits()).result().stdout == before
        used = rooms.submit(Program("import numpy; print(hasattr(numpy, 'left'))"), Limits(5.0)).result()
        assert used.stdout == "False\n" or "No module" in used.error
    finally:
        rooms.close()


LEAVE = """
import ctypes, os, signal, sys, tempfile, time
for folder in ("/tmp", "/dev/shm", os.getcwd()):
    try: open(f"{folder}/left", "w").write("x" * 1000)
    except OSError: pass
libc = ctypes.CDLL(None)
for number in (29, 64, 68): libc.syscall(number, 42, 4096, 0o1666)
os.umask(0); os.nice(5); signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.builtin_left = 1
for target in (-1, 0, 1, os.getppid()):
    for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT):
        try: os.kill(target, number) if target or number == signal.SIGCONT else None
        except OSError: pass
if os.fork() == 0:
    while True: time.sleep(1)
"""
LOOK = """
import ctypes, os, signal, sys
print([os.path.exists(f"{folder}/left") for folder in ("/tmp", "/dev/shm", os.getcwd())], sorted(os.listdir("/dev/shm")))
libc = ctypes.CDLL(None)
print([libc.syscall(number, 42, 4096, 0) for number in (29, 64, 68)])
print(os.umask(0o22), os.nice(0), signal.getsignal(signal.SIGTERM), hasattr(sys, "builtin_left"), os.getpid(), os.getppid())
"""


def test_nothing_of_a_program_is_there_for_the_next() -> None:
    """Files, segments, semaphores, queues, masks, priorities, handlers and processes end with it; signals stay inside."""
    rooms = sandbox._Rooms(LEVEL)
    rooms.size = 1
    try:
        before = rooms.submit(Program(LOOK), Limits()).result()
        assert before.ok, before
        for _ in range(4):
            rooms.submit(Program(LEAVE), Limits(wall_limit=1.0)).result()
            assert rooms.submit(Program(LOOK), Limits()).result().stdout == before.stdout
    finally:
        rooms.close()


def test_a_host_that_may_open_no_more_leaks_nothing() -> None:
    """Rooms that cannot start close what they have opened, and the next ones start when there is room again."""
    code = (
        "import os, resource\n"
        "from unitymas.envs.tools.sandbox import runner\n"
        f"assert runner.run_python('print(1)', sandbox={LEVEL!r}).ok\n"
        "runner.close_rooms()\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "def held(): return len(os.listdir('/proc/self/fd'))\n"
        "begin, failed = held(), 0\n"
        "for spare in range(1, 10):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (begin + spare, hard))\n"
        "    try: runner._Room('" + LEVEL + "').close()\n"
        "    except runner.SandboxError as error: failed += 1; kept = error\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))\n"
        "print(failed > 3, held() - begin, runner.run_python('print(2)').stdout)\n"
    )
    host = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert host.stdout == "True 0 2\n\n", (host.stdout, host.stderr[-2000:])


def test_a_host_with_many_open_files_hands_none_to_programs(tmp_path: Path) -> None:
    """Descriptors of a room's group, above those that a program would close by itself."""
    code = (
        "import os, resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 5000), hard))\n"
        "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(1200)]\n"
        "from unitymas.envs.tools.sandbox import cgroups, runner\n"
        "from pathlib import Path\n"
        "class Group(cgroups.CaseGroup):\n"
        "    @classmethod\n"
        "    def make(cls): return cls(Path(" + repr(str(tmp_path)) + "))\n"
        "cgroups.CaseGroup.__dict__; runner.CaseGroup = Group\n"
        "program = 'import os\\nfor d in range(3, 5000):\\n    try: os.fstat(d); print(d)\\n    except OSError: pass'\n"
        f"print(repr(runner.run_python(program, sandbox={LEVEL!r}).stdout))\n"
    )
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cpu.stat").write_text("usage_usec 0\n")
    tmp_path.chmod(0o777)
    (tmp_path / "cgroup.procs").chmod(0o666)
    host = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert host.stdout == "'3\\n'\n", (host.stdout, host.stderr[-2000:])


def test_an_answer_is_read_from_any_descriptor() -> None:
    """`select` would refuse a number above 1023, which a host with many open files has."""
    from unitymas.benchmarks.leaderboard.guard import _line

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2000), hard), hard))
    reading, writing = os.pipe()
    try:
        high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1500)
        os.write(writing, b"{}\n")
        with os.fdopen(high, "rb") as pipe:
            assert _line(pipe, time.monotonic() + 30) == b"{}\n"
    finally:
        os.close(reading)
        os.close(writing)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
