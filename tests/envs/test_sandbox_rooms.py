"""The rooms themselves: refusal, recovery, ordinary users, forks, and a fuzzer of system calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unitymas.envs.tools.sandbox import runner as sandbox
from unitymas.envs.tools.sandbox.runner import Limits, Program, SandboxError, resolve, run_python

try:
    resolve("auto")
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_the_best_level_is_chosen() -> None:
    assert resolve("auto") == ("bubblewrap" if shutil.which("bwrap") else "namespaces")


def test_refuses_where_no_isolation_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_obstacle", lambda level: "the kernel forbids it")
    with pytest.raises(
        SandboxError, match=r"bubblewrap: the kernel forbids it; namespaces: .* sandbox='unsafe'"
    ):
        run_python("print(1)")
    assert run_python("print(1)", sandbox="unsafe").sandbox == "unsafe"


def test_a_room_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such room')"]
    monkeypatch.setattr(sandbox, "room_command", lambda level: command)
    with pytest.raises(SandboxError, match="no such room"):
        sandbox._Room("namespaces")


def test_a_killed_room_is_replaced() -> None:
    """An operator's kill, the kernel's memory killer: the case runs again in a new room."""
    rooms = sandbox._Rooms(resolve("auto"))
    assert rooms.submit(Program("print(1)"), Limits()).result().ok
    (room,) = (room for place in rooms._free.queue for room in place.values())
    assert room._process is not None
    room._process.kill()
    room._process.wait()
    assert rooms.submit(Program("print(2)"), Limits()).result().stdout == "2\n"
    rooms.close()


def test_nothing_is_left_of_closed_rooms() -> None:
    rooms = sandbox._Rooms(resolve("auto"))
    assert rooms.submit(Program("print(1)"), Limits()).result().ok
    processes = [room._process for place in rooms._free.queue for room in place.values()]
    rooms.close()
    assert processes and all(process is not None and process.returncode is not None for process in processes)


def test_a_dead_host_leaves_no_program_behind() -> None:
    """Killed in mid-case, so that nothing can be cleaned up: the keeper notices, and kills."""
    code = (
        "from unitymas.envs.tools.sandbox.runner import *; import os\n"
        "resolve(); print('go', flush=True)\n"
        "run_python('''import ctypes, time; ctypes.CDLL(None).prctl(15, b'orphan-case'); time.sleep(100)''',"
        " limits=Limits(90))"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert host.stdout is not None and host.stdout.readline() == b"go\n"
    assert _eventually(lambda: "orphan-case\n" in _process_names())
    host.kill()
    host.wait()
    host.stdout.close()
    assert _eventually(lambda: "orphan-case\n" not in _process_names())


def _process_names() -> list[str]:
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.append(path.read_text(errors="replace"))
        except OSError:
            continue  # it has just ended
    return names


def _eventually(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_forked_host_makes_its_own_rooms() -> None:
    run_python("print(1)")
    child = os.fork()
    if child == 0:
        os._exit(0 if run_python("print(2)").stdout == "2\n" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run_python("print(3)").stdout == "3\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("level", ["bubblewrap", "namespaces"])
def test_as_an_ordinary_user(level: str) -> None:
    """Root steps down to a user of its own and judges again; needs an interpreter that others may read."""
    python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(p)), None)
    code = f"""
import sys
from unitymas.envs.tools.code.verify import verify_code
tests = [["1", "1"], ["2", "3"]]
print(verify_code("print(input())", tests, sandbox={level!r}).verdicts == ["accepted", "wrong_answer"])
for program in ("import os, time\\nfor _ in range(99):\\n    if os.fork() == 0: time.sleep(9)", "open('/etc/passwd')", "open(__file__ + '/../../x', 'w')", "x = bytes(1 << 30)"):
    print(*verify_code(program, [["", ""]], sandbox={level!r}).verdicts)
"""
    packages = sysconfig.get_path("purelib")
    source = Path(__file__).resolve().parents[2] / "src"
    process = subprocess.run(
        [python or sys.executable, "-c", code],
        env={"PYTHONPATH": f"{source}:{packages}", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        user=12345, group=12345, extra_groups=[], capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    if "Error" in process.stderr and ("ModuleNotFound" in process.stderr or "ImportError" in process.stderr):
        pytest.skip("no interpreter that another user may run has our dependencies")
    assert process.stdout.split() == [
        "True",
        "runtime_error",
        "runtime_error",
        "runtime_error",
        "memory_limit",
    ], process


def test_old_kernels_and_unsafe_allow_threads_only() -> None:
    """Where processes cannot be counted, there are none to count."""
    assert "Operation not permitted" in run_python("import os\nos.fork()", sandbox="unsafe").error
    threads = "import threading\nt = threading.Thread(target=print, args=('t',))\nt.start()"
    assert run_python(threads, sandbox="unsafe").stdout == "t\n"


SYSTEM_CALLS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(b"/tmp/../etc/passwd" + bytes(4096))
values = {{"buffer": ctypes.addressof(buffer)}}
for number, arguments in {calls!r}:
    libc.syscall(number, *(ctypes.c_long(values.get(a, a)) for a in arguments))
"""
ARGUMENTS = st.one_of(
    st.sampled_from(["buffer", 0, 1, 2, -1, -100, 0x10000000, 0x20000, 4096, 1 << 31, 0xFFFFFFFF]),
    st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 470), st.lists(ARGUMENTS, max_size=6)), min_size=1, max_size=12))
def test_fuzzed_system_calls(calls: list[tuple[int, list[int | str]]]) -> None:
    """Whatever a program asks of the kernel: it ends in time, and the next one finds a clean room."""
    result = run_python(SYSTEM_CALLS.format(calls=calls), limits=Limits(0.3, wall_limit=0.6, memory_mb=64))
    assert result.wall < 5
    after = run_python("import os; print(os.listdir('/tmp'), input())", "still here")
    assert after.stdout == "['program.py'] still here\n"


STATEMENTS = [
    "import os; os.closerange(0, 300)",
    "import os; os.fork()",
    "import sys; sys.stdout = None",
    "import sys; sys.modules.clear()",
    "import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15, 17, 25)]",
    "import os; os.kill(0, 19)",
    "import os; os.chdir('/dev/shm'); open('x', 'w').write('x' * 999)",
    "import threading; [threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start() for _ in range(9)]",
    "import gc; [setattr(o, 'x', 1) for o in gc.get_objects() if type(o).__name__ == 'Channel']",
    "import builtins; builtins.exec = builtins.print = builtins.open = None",
    "import atexit, os; atexit.register(os.abort)",
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "import os; os.rename('program.py', 'moved'); os.rmdir('/tmp')",
    "raise KeyboardInterrupt",
    "import os; os._exit(255)",
    "import sys; sys.exit(10**30)",
    "import ctypes; ctypes.memset(id(None), 0, 64)",
    "x = [b'x' * 99999 for _ in range(99999)]",
    "class B(BaseException):\n    def __str__(self): raise self\nraise B",
]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=5), st.booleans())
def test_fuzzed_mischief(statements: list[str], swallow: bool) -> None:
    """Hostile statements in any order and company: one result each, in time, and a clean room after."""
    program = "\n".join(
        f"try:\n    exec({statement!r})\nexcept BaseException: pass" if swallow else f"exec({statement!r})"
        for statement in statements
    )
    result = run_python(program, limits=Limits(0.2, wall_limit=0.4, memory_mb=128))
    assert result.wall < 5 and result.ended in sandbox.ProgramEnd.__args__
    after = run_python("import os; print(os.listdir('/tmp'), input())", "still here")
    assert after.stdout == "['program.py'] still here\n"
