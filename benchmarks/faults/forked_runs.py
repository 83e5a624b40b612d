"""Processes of runs with kills: forked from a process that has imported all packages, and checked for leftovers.

The harness adopts orphans (`PR_SET_CHILD_SUBREAPER`), so the children of a killed process stay among its descendants.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
EARLY = {
    "accelerate", "gymnasium", "huggingface_hub", "pettingzoo", "safetensors", "sympy", "tokenizers", "torch",
    "transformers", "unitymas",
}  # fmt: skip
"""Packages that each process needs, and that take seconds to import."""


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system has no sub-reapers; the harness needs Linux")


def begin(work: Callable[[], None], log: Path) -> int:
    """Fork a process that does `work` and writes its output to `log`. Return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)  # a Ctrl-C at the terminal is for the harness
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def import_early(modules: Iterable[str]) -> None:
    """Import the modules that a process imported, so that the next ones start at once. Ray and vLLM would start threads."""
    for name in modules:
        if name.partition(".")[0] in EARLY and name not in sys.modules:
            with suppress(Exception):  # some modules are made by others and have no file
                importlib.import_module(name)


def ended(pid: int) -> int | None:
    """Return a process's exit code, negative for a signal, or None while it runs. Collect the exit codes of orphans."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return None if done == 0 else os.waitstatus_to_exitcode(status)


def lasts(pid: int, seconds: float) -> int | None:
    """Wait for the end of a process, at most this long. Return its exit code, or None if it still runs."""
    until = time.monotonic() + seconds
    while (code := ended(pid)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return code


def family(root: int) -> dict[int, str]:
    """Return the running descendants of a process, with the command of each."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if fields[0] != "Z":
                parents[int(entry)] = int(fields[1])
    living: dict[int, str] = {}
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            living[pid] = title(pid)
    return living


def title(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def survivors(seconds: float = 120.0) -> list[str]:
    """Wait until no descendant of this process runs. After the limit, return those that still run, and end them."""
    until = time.monotonic() + seconds
    while (living := family(os.getpid())) and time.monotonic() < until:
        bury()
        time.sleep(0.05)
    bury()
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return [f"{pid} {words}" for pid, words in living.items()]


def bury() -> None:
    """Collect the exit codes of orphans that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
