"""A case is its whole tree of processes: its time and memory are counted together, and touch no other case."""

from __future__ import annotations

import os
import threading

import pytest

from unitymas.envs.tools.sandbox.runner import Limits, SandboxError, resolve, run_python

try:
    resolve("auto")
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

WORK = """
import os, signal, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
"""


@pytest.mark.parametrize("level", ["bubblewrap", "namespaces"])
@pytest.mark.parametrize(
    "hiding",
    [
        "if os.fork() == 0: work(9); os._exit(0)\nos.wait()",
        "if os.fork() == 0:\n    if os.fork(): os._exit(0)\n    os.setsid(); work(9); os._exit(0)\ntime.sleep(9)",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(99):\n    if os.fork() == 0: work(0.03); os._exit(0)\n    time.sleep(0.04)",
        "import threading\n[threading.Thread(target=work, args=(9,)).start() for _ in range(3)]",
        "for _ in range(3): os.fork()\nwork(9)",
    ],
)
def test_work_of_children_is_the_programs_own(hiding: str, level: str) -> None:
    """Children, orphans of a double fork, children that nobody waits for, threads."""
    result = run_python(WORK + hiding, limits=Limits(0.3, wall_limit=60.0), sandbox=level)
    assert result.ended == "time_limit" or "Resource temporarily unavailable" in result.error
    assert 0.25 < result.cpu < 1.5


def test_children_that_were_waited_for_count_at_the_end() -> None:
    program = WORK + "for _ in range(6):\n    if os.fork() == 0: work(0.1); os._exit(0)\n    os.wait()"
    result = run_python(program, limits=Limits(0.5))
    assert result.ended == "time_limit" and result.cpu > 0.45
    assert run_python(program, limits=Limits(5.0)).ended == "finished"


HOLD = """
import os, socket, time
for _ in range({children}):
    if os.fork() == 0: break
{hold}
time.sleep(60)
"""
SOCKETS = """
kept = []
for _ in range(28):
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        try:
            while True: end.send(bytes(65536))
        except BlockingIOError: pass
    kept.append(pair)
"""


@pytest.mark.parametrize("level", ["bubblewrap", "namespaces"])
@pytest.mark.parametrize(
    "hold",
    [
        "kept = bytearray(24 << 20)\nfor i in range(0, len(kept), 4096): kept[i] = 1",
        "import mmap; kept = mmap.mmap(-1, 24 << 20); kept.write(bytes(24 << 20))",
        SOCKETS,
        "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # its pages cannot be read any more\n"
        "kept = bytearray(24 << 20)\nfor i in range(0, len(kept), 4096): kept[i] = 1",
        "import mmap; kept = mmap.mmap(-1, 24 << 20)\n"
        "for i in range(24): kept.write(bytes(1 << 20)); kept.madvise(mmap.MADV_DONTNEED)  # kept, and shown by nobody",
    ],
)
def test_memory_of_the_whole_tree_is_bounded(hold: str, level: str) -> None:
    """Each process stays below the limit, or keeps its bytes in the kernel; together they are past it."""
    limits = Limits(9.0, memory_mb=32)
    result = run_python(HOLD.format(children=10, hold=hold), limits=limits, sandbox=level)
    assert (result.ended, result.wall < 30) == ("memory_limit", True), result


def test_children_that_share_memory_are_counted_once() -> None:
    program = "import os\nx = bytes(range(256)) * (60 << 12)\nfor _ in range(8):\n    if os.fork() == 0:\n        import time; time.sleep(0.3); os._exit(len(x) & 0)\nfor _ in range(8): os.wait()\nprint('shared')"
    assert run_python(program, limits=Limits(5.0, memory_mb=128)).stdout == "shared\n"


def test_memory_that_is_shared_without_a_file_is_no_fault() -> None:
    """Neither a little of it in a program that works with much memory, nor much of it in one that keeps to its limit."""
    little = "import mmap\nm = mmap.mmap(-1, 13); m.write(b'Hello world!'); m.seek(0)\nfor _ in range(9): bytes(8 << 20)\nprint(m.read(5))"
    assert run_python(little, limits=Limits(5.0, memory_mb=128)).stdout == "b'Hello'\n"
    much = "import mmap\nm = mmap.mmap(-1, 48 << 20); m.write(bytes(48 << 20)); print('held')"
    assert run_python(much, limits=Limits(5.0, memory_mb=128)).stdout == "held\n"


def test_who_waits_for_a_vfork_waits() -> None:
    """Its state is that of waiting for the disk, which is not counted: it held its room ten times as long."""
    sleeper = "import ctypes, time\nif ctypes.CDLL(None).syscall({}, 0x4000 | 17, 0, 0, 0, 0) == 0: time.sleep(60)\ntime.sleep(60)"
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    result = run_python(sleeper.format(number), limits=Limits(0.5, wall_limit=0.5))
    assert (result.ended, result.wall < 4) == ("time_limit", True), result


@pytest.mark.parametrize(
    "growing",
    [
        "import fcntl; a, b = os.pipe(); fcntl.fcntl(b, 1031, 1 << 20)",
        "import socket; socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
        "import socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
    ],
)
def test_kernel_buffers_stay_small(growing: str) -> None:
    assert run_python(f"import os\n{growing}").error.startswith("PermissionError")


def test_a_pipe_takes_no_pages_of_a_program() -> None:
    """`vmsplice` put a page of 2 MB into each place of a pipe, and nobody counts it there."""
    number = {"x86_64": 278, "aarch64": 75}[os.uname().machine]
    program = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall({number}, os.pipe()[1], 0, 0, 0)\nprint(ctypes.get_errno())"
    assert run_python(program).stdout == "38\n"


def test_loops_in_other_rooms_cost_an_honest_program_nothing() -> None:
    """Fifteen endless processes at a time in two rooms, while a program works for two thirds of its limit."""
    loops = "import os\nfor _ in range(14):\n    if os.fork() == 0: break\nwhile True: pass"
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            assert run_python(loops, limits=Limits(0.5)).ended == "time_limit"

    attackers = [threading.Thread(target=attack) for _ in range(2)]
    for thread in attackers:
        thread.start()
    try:
        for _ in range(2):
            result = run_python(WORK + "work(0.3); print('honest')", limits=Limits(0.5, wall_limit=0.7))
            assert (result.ended, result.stdout) == ("finished", "honest\n"), result
    finally:
        over.set()
        for thread in attackers:
            thread.join()
