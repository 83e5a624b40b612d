"""Start of a room: the part of the host that programs see, and the command that makes the room.

Programs see the interpreter, the system's shared libraries and PACKAGES, all read-only. Other installed packages are
hidden, because a data set in one of them would contain the answers.
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
from typing import Literal

from ....agents.basics.renamed import renamed
from .kernel import NOBODY

SandboxLevel = Literal["bubblewrap", "namespaces", "unsafe"]
__getattr__ = renamed(__name__, {"Level": "SandboxLevel"})
PACKAGES = ("numpy",)  # packages that programs may import, if the host has them

_HERE = Path(__file__).parent
_START = _HERE / "start"
_ROOM = "/room"  # folder of our files and PACKAGES in a room
_ROOM_FILES = (
    "kernel.py",
    "program.py",
    "room.py",
    "seccomp.py",
    "accounting.py",
    "values.py",
    "start/sitecustomize.py",
)
_COVERED = ("/tmp/", "/dev/shm/")  # a program has its own of these; host files there are bound again
_ENTER = (  # for rooms that we build ourselves: build the room, then run the server in it
    "import sys, types, json, os; room = types.ModuleType('room'); room.__path__ = [sys.argv[1]]; "
    "sys.modules['room'] = room; from room.kernel import enter_room; "
    "enter_room(*json.loads(sys.argv[2])); os.execv(sys.argv[3], sys.argv[3:])"
)
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # so a program that prints a set always gets the same verdict
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}


def room_command(level: SandboxLevel) -> list[str]:
    """Return the command that starts a room. The fork server is at its standard input."""
    view = _view()
    folder = "/tmp" if level != "unsafe" else f"/tmp/unitymas-room-{os.urandom(8).hex()}"
    python = [view.interpreter, "-s", "-B", "-X", "utf8", f"{folder}/program.py"]
    if level == "bubblewrap":
        return [*_bubblewrap(view), "--", *python]
    if level == "namespaces":
        room = [[*_same(view.binds), *_own_files(view)], view.links, view.masks, _privileged()]
        return [view.interpreter, "-I", "-S", "-B", "-c", _ENTER, str(_HERE), json.dumps(room), *python]
    return python


def room_environment(level: SandboxLevel, group: Sequence[int] = ()) -> dict[str, str]:
    """Return the environment variables of a room: those that programs see, and the settings of the server.

    `group` holds descriptors of the programs' control group (`cgroups`), which the room inherits.
    """
    view = _view()
    isolated = level != "unsafe"
    config = {
        "level": level,
        "group": list(group),
        "room": _ROOM if isolated else str(_HERE),
        "path": view.path if isolated else view.host_path,
        "hidden": [path for path in view.binds if path.startswith(_COVERED)],
        "privileged": _privileged(),
        "user": _own_user(),
        "threads_only": not isolated or not _can_count_processes(),
    }
    return {
        **_ENVIRONMENT,
        "PYTHONPATH": _ROOM if isolated else str(_START),
        "PYTHONINSPECT": "1",  # with it, the interpreter calls `sys.excepthook` for SystemExit, too
        "UNITYMAS_ROOM": json.dumps(config),
    }


def _same(paths: list[str]) -> list[list[str]]:
    return [[path, path] for path in paths]


def _own_files(view: _View) -> list[list[str]]:
    """Return [source, target] of each file that has another place in a room."""
    ours = [[str(_HERE / name), f"{_ROOM}/{os.path.basename(name)}"] for name in _ROOM_FILES]
    stashed = [[path, f"{_ROOM}/stash{path}"] for path in view.binds if path.startswith(_COVERED)]
    return [*ours, *view.packages, *stashed]


def _bubblewrap(view: _View) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap is not installed")
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--new-session"]
    if _privileged():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    own = _own_files(view)
    for folder in _ancestors([*view.binds, *(target for _, target in own)]):
        # folders that bubblewrap makes by itself are closed to other users
        command += ["--perms", "0755", "--dir", folder]
    for path in view.binds:
        command += ["--ro-bind", path, path]
        command += [word for mask in view.masks if mask.startswith(path + "/") for word in ("--tmpfs", mask)]
    command += [word for mask in view.masks for word in ("--remount-ro", mask)]
    for target, name in view.links:
        command += ["--symlink", target, name]
    for source, target in own:
        command += ["--ro-bind", source, target]
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", "/dev/shm", "--dir", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


@dataclass(frozen=True, slots=True)
class _View:
    """Part of the host that programs see, read-only: interpreter, shared libraries, PACKAGES."""

    interpreter: str
    binds: list[str]
    links: list[list[str]]  # [target, name], as /lib -> usr/lib
    masks: list[str]  # folders of third-party packages under a bind, which are hidden
    packages: list[list[str]]  # [source, target]
    path: list[str]  # sys.path in a room
    host_path: list[str]  # sys.path without a room


@cache
def _view() -> _View:
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    folders = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", os.path.realpath(f"{sys.base_prefix}/lib")]
    links = [[os.readlink(path), path] for path in ("/lib", "/lib64") if os.path.islink(path)]
    binds = _outermost([path for path in folders if os.path.isdir(path) and not os.path.islink(path)])
    masks = [
        place
        for folder in binds
        for kind in ("site-packages", "dist-packages")
        for place in glob(f"{folder}/python*/{kind}") + glob(f"{folder}/python*/*/{kind}")
    ]
    packages, package_path = _packages()
    path = [stdlib, f"{stdlib}/lib-dynload"]
    room_path = [*path, *([_ROOM + "/packages"] if packages else [])]
    plain = [path for path in ("/etc/ld.so.cache", "/usr/share/zoneinfo") if os.path.exists(path)]
    return _View(
        interpreter,
        [*binds, interpreter, *plain],
        links,
        sorted(set(masks)),
        packages,
        room_path,
        [*path, *package_path],
    )


def _packages() -> tuple[list[list[str]], list[str]]:
    """Return PACKAGES with the shared libraries of their wheels, as [source, target], and their folders on the host.

    In a room they have another place, because a program's own /tmp would hide a virtual environment under /tmp.
    """
    binds, path = [], []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folder = os.path.realpath(spec.submodule_search_locations[0])
            for source in (folder, *(libs for libs in (f"{folder}.libs",) if os.path.isdir(libs))):
                binds.append([source, f"{_ROOM}/packages/{os.path.basename(source)}"])
            path.append(os.path.dirname(folder))
    return binds, list(dict.fromkeys(path))


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
    """Tell whether this process may make namespaces and change its user, as real root may."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    held = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    needed = (1 << 21) | (1 << 6) | (1 << 7)  # CAP_SYS_ADMIN, CAP_SETGID, CAP_SETUID
    return os.geteuid() == 0 and held & needed == needed


def _own_user(mapped: Path = Path("/proc/self/uid_map")) -> int:
    """Return a user number that no other process uses: a random one among the highest numbers that exist here."""
    try:
        ranges = [tuple(map(int, line.split())) for line in mapped.read_text().splitlines()]
    except (OSError, ValueError):
        return NOBODY
    first, _, count = max(ranges, key=lambda one: one[2], default=(0, 0, 1))
    end = min(first + count, 1 << 31)
    span = min(1 << 26, count // 16)
    return end - 2 - int.from_bytes(os.urandom(4), "big") % span if span > 1 else NOBODY


def _can_count_processes() -> bool:
    """Tell whether RLIMIT_NPROC limits a program: since Linux 5.14 it counts by user namespace. It never limits root."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= (5, 14) and (os.geteuid() != 0 or _privileged())
