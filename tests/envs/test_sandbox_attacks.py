"""The attack suite: what a program may try to see, break or outlive, and that it fails.

Each attack prints ESCAPED where it gets through. `docs/sandbox.md` lists them by the names here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from unitymas.envs.tools.sandbox.runner import Limits, ProgramResult, SandboxError, resolve, run_python

LIMITS = Limits(time_limit=1.0, wall_limit=6.0, memory_mb=256)


@pytest.fixture(params=["bubblewrap", "namespaces"])
def level(request: pytest.FixtureRequest) -> str:
    try:
        return resolve(request.param)
    except SandboxError as error:
        pytest.skip(str(error))


def attack(program: str, level: str, limits: Limits = LIMITS) -> ProgramResult:
    """Run it; nothing may escape, and the next program must find everything in order."""
    result = run_python(program, "input\n", limits=limits, sandbox=level)
    assert "ESCAPED" not in result.stdout, result.stdout
    after = run_python("print(input())", "fine\n", sandbox=level)
    assert (after.ended, after.stdout) == ("finished", "fine\n")
    return result


TRY = """
import os, sys
def attempt(name, action):
    try:
        outcome = action()
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        print("failed", name, type(error).__name__)
    else:
        print("ESCAPED", name, str(outcome)[:200])
"""

CALL = (
    TRY
    + """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    print("ESCAPED" if result >= 0 else "failed", number, result, ctypes.get_errno())
"""
)


# --- seeing ---------------------------------------------------------------------------------------------


def test_read_host_files(level: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    tmp_path.chmod(0o755)
    paths = [str(secret), __file__, "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/self/maps",
             "/sys/kernel/uevent_seqnum", "/var/log/dpkg.log", "/dev/mem", "/dev/sda", "/dev/vda"]  # fmt: skip
    attack(TRY + f"for path in {paths!r}: attempt(path, lambda: open(path, 'rb').read(9))", level)


def test_find_answers_of_an_installed_package(level: str) -> None:
    """The package under training carries data sets with answers: it must be nowhere in there."""
    attack(TRY + "attempt('import', lambda: __import__('unitymas'))", level)
    walk = """
    for folder, _, names in os.walk("/"):
        if "unitymas" in folder or any("unitymas" in name or name == "pytest" for name in names):
            print("ESCAPED", folder)
    """
    attack(TRY + "if True:\n" + walk, level, Limits(time_limit=10.0))


def test_read_the_environment(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    result = attack(
        "import os, ctypes; print(dict(os.environ)); print(ctypes.CDLL(None).getenv(b'API_KEY'))", level
    )
    assert "hunter2" not in result.stdout and "API_KEY" not in result.stdout and result.stdout.endswith("0\n")


def test_see_other_processes(level: str) -> None:
    result = attack(
        "import os; print(os.getpid(), os.getppid(), os.path.exists('/proc/2'), os.listdir('/proc'))", level
    )
    assert result.stdout == "1 0 False ['self']\n"


def test_find_an_earlier_programs_input(level: str) -> None:
    """The fork server never reads a case, so no later program inherits it; nor is a file left."""
    run_python(
        "open('/tmp/left', 'w').write('hunter2'); open('/dev/shm/left', 'w').write('x')",
        "hunter2",
        sandbox=level,
    )
    search = """
import gc, os
print(os.path.exists("/tmp/left"), os.path.exists("/dev/shm/left"))
needle = "hunter" + "2"
print(sum(needle in o for o in gc.get_objects() if isinstance(o, (str, bytes)) for needle in [needle]))
"""
    assert attack(search, level).stdout == "False False\n0\n"


def test_symlinks_and_links_out(level: str) -> None:
    attack(
        TRY + "os.symlink('/etc/passwd', '/tmp/a'); attempt('symlink', lambda: open('/tmp/a').read())\n"
        "os.symlink('/../../..', '/tmp/b'); attempt('root', lambda: open('/tmp/b/etc/passwd').read())\n"
        "attempt('hard link', lambda: os.link(sys.executable, '/tmp/c'))\n"
        "attempt('proc root', lambda: open('/proc/self/root/etc/passwd').read())\n"
        "attempt('proc cwd', lambda: os.listdir('/proc/self/cwd'))",
        level,
    )


# --- changing -------------------------------------------------------------------------------------------


def test_write_anywhere_but_its_own_tmp(level: str) -> None:
    program = (
        TRY
        + """
for folder, folders, _ in os.walk("/"):
    if not folder.startswith(("/tmp", "/dev/shm")):
        try:
            open(folder + "/mark", "w").close()
            print("ESCAPED", folder)
        except OSError:
            pass
attempt("overwrite", lambda: open(os.__file__, "r+"))
attempt("chmod", lambda: os.chmod(os.__file__, 0o777))
attempt("unlink", lambda: os.unlink(os.__file__))
attempt("device", lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(254, 0)))
"""
    )
    result = attack(program, level, Limits(time_limit=10.0))
    assert result.ended == "finished"


def test_fill_the_disk(level: str) -> None:
    fill = "for i in range(60): attempt(i, lambda: open(f'/tmp/{i}', 'wb').write(bytes(1 << 24)) and None)"
    result = run_python(TRY.replace("ESCAPED", "wrote") + fill, limits=Limits(3.0, disk_mb=32), sandbox=level)
    assert result.stdout.count("wrote") <= 2 and result.stdout.count("failed") >= 58


# --- talking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opening",
    [
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_INET6)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_UNIX).connect('\\0abstract')",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair(socket.AF_INET)",
        "socket.create_connection(('127.0.0.1', 80))",
        "socket.getaddrinfo('example.com', 80)",
    ],
)
def test_open_a_socket(level: str, opening: str) -> None:
    result = attack(f"import socket\n{opening}\nprint('ESCAPED')", level)
    assert result.ended == (
        "runtime_error" if "pair" in opening and "INET" not in opening else "sandbox_violation"
    )


# --- taking ---------------------------------------------------------------------------------------------


def test_fork_bomb(level: str) -> None:
    program = """
import os
for _ in range(40):
    try:
        os.fork()
    except OSError:
        pass
while True: pass
"""
    started = time.monotonic()
    result = attack(program, level, Limits(time_limit=0.5, wall_limit=1.5))
    assert result.ended == "time_limit" and time.monotonic() - started < 10


def test_number_of_processes_is_exact(level: str) -> None:
    program = """
import os, time
children = 0
try:
    while os.fork():
        children += 1
    time.sleep(9)
except OSError:
    print(children)
"""
    assert attack(program, level, Limits(processes=5)).stdout == "4\n"


@pytest.mark.parametrize(
    "hoard",
    [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytes(1 << 20))",
        "x = 'a' * (10 ** 10)",
        "x = 1 << (1 << 33)",
        "import mmap; x = mmap.mmap(-1, 1 << 32)",
        "import ctypes; x = ctypes.create_string_buffer(1 << 31)",
    ],
)
def test_memory_bomb(level: str, hoard: str) -> None:
    result = attack(hoard + "\nprint('ESCAPED')", level, Limits(time_limit=5.0, memory_mb=128))
    assert result.ended == ("runtime_error" if "mmap" in hoard else "memory_limit"), result


def test_memory_outside_of_the_address_space(level: str) -> None:
    """memfd, System V segments: pages that RLIMIT_AS would not count."""
    attack(CALL + "call(319, b'x', 0)\ncall(29, 0, 1 << 20, 0o1600)\ncall(447, 0)", level)


@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output(level: str, stream: int) -> None:
    result = attack(f"import os\nwhile True: os.write({stream}, b'x' * 65536)", level, Limits(output_mb=2))
    assert result.ended == "output_limit" and len(result.stdout) < 1 << 20


@pytest.mark.parametrize(
    "leaving", ["raise SystemExit('x' * (1 << 26))", "raise ValueError('x' * (1 << 26))"]
)
def test_huge_exit_output(level: str, leaving: str) -> None:
    assert attack(leaving, level, Limits(5.0, output_mb=1, memory_mb=1024)).ended == "output_limit"


def test_open_files(level: str) -> None:
    result = attack("import os\nx = [os.open('/dev/null', 0) for _ in range(1000)]", level)
    assert result.ended == "runtime_error" and "Too many open files" in result.error


# --- outliving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "swallow",
    [
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, lambda *a: None)\n    except Exception: pass",
        "import signal; signal.alarm(0); signal.setitimer(signal.ITIMER_PROF, 0)",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\nexcept Exception: pass",
        "import time, sys\ntime.monotonic = time.time = time.perf_counter = lambda: 0.0\nsys.settrace(None)",
    ],
)
def test_swallow_the_time_limit(level: str, swallow: str) -> None:
    loop = "\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass"
    result = attack(swallow + loop, level, Limits(time_limit=0.3, wall_limit=5.0))
    assert result.ended == "time_limit" and result.cpu < 0.6


def test_sleep_past_the_time_limit(level: str) -> None:
    result = attack("import time\ntime.sleep(60)\nprint('ESCAPED')", level, Limits(0.2, wall_limit=0.5))
    assert result.ended == "time_limit" and result.wall < 3


def test_exceed_the_limit_in_the_last_moment(level: str) -> None:
    spin = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nprint('x')"
    assert run_python(spin, limits=Limits(time_limit=0.2), sandbox=level).ended == "time_limit"
    assert run_python(spin, limits=Limits(time_limit=2.0), sandbox=level).ended == "finished"


def test_outlive_the_case(level: str) -> None:
    """A daemon, twice forked, in a session of its own, deaf to signals: gone before the verdict is out."""
    marker = f"3{os.getpid()}.25"
    program = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in (1, 2, 3, 13, 15): signal.signal(s, signal.SIG_IGN)
        for fd in range(3): os.close(fd)
        import ctypes
        ctypes.CDLL(None).prctl(15, b"outliver", 0, 0, 0)
        time.sleep({marker})
    os._exit(0)
print("done")
"""
    result = attack(program, level)
    assert result.stdout == "done\n" and result.wall < 2
    names = [path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/comm") if path.exists()]
    assert "outliver\n" not in names


def test_kill_the_parent(level: str) -> None:
    program = (
        TRY
        + """
import signal
for pid in range(2, 3000):
    try:
        os.kill(pid, signal.SIGKILL)
        print("ESCAPED", pid)
    except ProcessLookupError:
        pass
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
print("alive")
"""
    )
    assert attack(program, level).stdout.endswith("alive\n")


@pytest.mark.parametrize("number", [4, 6, 9, 11, 15, 19, 31])
def test_signal_itself(level: str, number: int) -> None:
    """Whatever the signal, it spoils this case alone."""
    result = attack(f"import os\nos.kill(os.getpid(), {number})\nos.kill(0, {number})\nprint('on')", level)
    assert result.ended in ("finished", "runtime_error")


@pytest.mark.parametrize(
    "overflow",
    [
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        "x = []\nfor _ in range(10**6): x = [x]\nx == [x]\nrepr(x)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
    ],
)
def test_stack_overflow_and_crashes(level: str, overflow: str) -> None:
    """Unwinding a million frames without memory may also take the interpreter past the time limit."""
    assert attack(overflow, level, Limits(0.3)).ended in ("runtime_error", "memory_limit", "time_limit")


# --- the kernel -----------------------------------------------------------------------------------------

X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86-64")


@X86
@pytest.mark.parametrize(
    "number, arguments",
    [
        (41, "2, 1, 0"), (59, "b'/bin/sh', None, None"), (101, "0, 0, 0, 0"), (310, "1, 0, 0, 0, 0, 0"),
        (165, "b'none', b'/tmp', b'tmpfs', 0, None"), (166, "b'/proc', 2"), (161, "b'/tmp'"), (155, "b'/', b'/tmp'"),
        (272, "0x10000000"), (308, "0, 0"), (304, "0, 0, 0"), (246, "0, 0, 0, 0"), (321, "0, 0, 0"),
        (298, "0, 0, 0, 0, 0"), (323, "0"), (250, "0, 0"), (56, "0x10000000, 0, 0, 0, 0"), (438, "0, 0, 0"),
        (428, "0, b'/', 0"), (0x40000000 + 39, ""), (169, "0, 0, 0"), (53, "2, 1, 0, 0"),
    ],
)  # fmt: skip
def test_forbidden_system_calls_kill(level: str, number: int, arguments: str) -> None:
    result = attack(
        CALL + f"print('before', flush=True)\ncall({number}, {arguments})\nprint('ESCAPED')", level
    )
    assert (result.ended, result.stdout) == ("sandbox_violation", "before\n")


@X86
@pytest.mark.parametrize("number", [425, 435, 319, 29, 462, 900])
def test_missing_system_calls(level: str, number: int) -> None:
    assert "ESCAPED" not in attack(CALL + f"call({number}, 0, 0, 0)", level).stdout


@X86
def test_the_32_bit_gate(level: str) -> None:
    """int 0x80 reaches the i386 table, where numbers mean other calls: 20 there is getpid."""
    program = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, 20; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    assert attack(program, level).ended in ("sandbox_violation", "runtime_error")


def test_regain_privileges(level: str) -> None:
    attack(
        TRY + "attempt('setuid', lambda: os.setuid(0)); attempt('setgid', lambda: os.setgid(0))\n"
        "attempt('groups', lambda: os.setgroups([0])); attempt('chown', lambda: os.chown('/tmp', 0, 0))\n"
        "import resource\n"
        "for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):\n"
        "    attempt(kind, lambda: resource.setrlimit(kind, (1 << 40, 1 << 40)))",
        level,
    )


def test_run_a_program_file(level: str) -> None:
    result = attack(
        "import os, subprocess\nprint(os.system('echo ESCAPED'))\nsubprocess.run(['/bin/echo', 'ESCAPED'])",
        level,
    )
    assert result.stdout != "0\n"


# --- the judge ------------------------------------------------------------------------------------------


def test_talk_on_the_judges_channel(level: str) -> None:
    result = attack(
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"value": "1"}\\n\')\n    except OSError: pass',
        level,
    )
    assert result.ended == "sandbox_violation"


def test_close_every_descriptor(level: str) -> None:
    assert attack("import os\nos.closerange(0, 1024)", level).ended in ("finished", "runtime_error")
