"""A control group (cgroup v2) for the programs of a room, where the machine lets us make one.

The kernel then counts the processor time of a whole tree to the microsecond, children that nobody waited for
included. Memory and processes get a second bound, where their controllers are given to us; the limits of `accounting`
come first. Where there is no group, `accounting` counts alone. The group is a child of our own, so that nothing has to
be set up: root, or a delegated group (`systemd-run --user -p Delegate=yes`), is enough.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LOWEST = 300  # descriptors of a room, out of the way of its own
_BESIDE = 64 << 20  # bytes of pages that are no program's own, before the kernel steps in


class CaseGroup:
    """The group that the programs of one room enter, one after the other."""

    def __init__(self, folder: Path) -> None:
        import fcntl

        self.folder = folder
        self.descriptors: list[int] = []
        try:
            for name, flags in (("cgroup.procs", os.O_WRONLY), ("cpu.stat", os.O_RDONLY)):
                low = os.open(folder / name, flags | os.O_CLOEXEC)
                try:
                    self.descriptors.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _LOWEST))
                finally:
                    os.close(low)
        except OSError:
            self.close()
            raise

    @classmethod
    def make(cls) -> CaseGroup | None:
        """Make a group below our own, or None where that is not allowed."""
        parent = own_group()
        if parent is None:
            return None
        for left in parent.glob("unitymas-*-*"):  # by a process that was killed
            if not Path(f"/proc/{left.name.split('-')[1]}").exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
        folder = parent / f"unitymas-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            folder.mkdir()
            return cls(folder)
        except (OSError, ImportError):
            return None

    def limit(self, memory: int, processes: int) -> None:
        """Bound the next program by the controllers that are there."""
        for name, value in (
            ("memory.max", memory + _BESIDE),
            ("memory.swap.max", 0),
            ("pids.max", processes + 1),
        ):
            if (self.folder / name).exists():
                with contextlib.suppress(OSError):
                    (self.folder / name).write_text(str(value))

    def close(self) -> None:
        """Let the group go; it must be empty."""
        while self.descriptors:
            os.close(self.descriptors.pop())
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def own_group(
    mounts: Path = Path("/proc/self/mountinfo"), mine: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """The folder of the group of version 2 that this process is in."""
    try:
        inside = next(line[3:] for line in mine.read_text().splitlines() if line.startswith("0::"))
        for line in mounts.read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.startswith("cgroup2 "):
                root, place = fields.split()[3:5]
                below = os.path.relpath(inside, root)
                return None if below.startswith("..") else Path(place) / below
    except (OSError, StopIteration, ValueError):
        pass
    return None
