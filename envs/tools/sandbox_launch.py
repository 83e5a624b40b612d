"""How a room is started: the part of the host that it shows, and the command that makes it.

Programs see, read-only, the interpreter, the system's shared libraries and PACKAGES. Other installed
packages are hidden: a data set in one of them would hold the answers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, Literal

Level = Literal["bubblewrap", "namespaces", "unsafe"]
PACKAGES = ("numpy",)  # what programs may import beyond the standard library, where the host has it

_HERE = Path(__file__).parent
_ROOM_FILES = (
    "sandbox_kernel.py",
    "sandbox_program.py",
    "sandbox_room.py",
    "sandbox_seccomp.py",
    "sandbox_values.py",
)
_BOOT = (
    "import sys, types, json; room = types.ModuleType('room'); room.__path__ = [sys.argv[1]]; "
    "sys.modules['room'] = room; from room.sandbox_room import main; main(json.loads(sys.argv[2]))"
)
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program that prints a set has one verdict
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


def room_command(level: Level) -> list[str]:
    """The command whose process is a room, with the fork server at its standard input."""
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
        raise FileNotFoundError("bwrap is not installed")
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
