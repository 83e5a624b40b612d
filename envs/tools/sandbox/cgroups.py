"""Control group (cgroup v2) for the programs of a room, if the machine allows us to make one.

With a group, the kernel counts the processor time of a whole tree to the microsecond, with children for which no process
waited. Memory and the number of processes get a second limit if their controllers are available; the limits of
`accounting` come first. Without a group, `accounting` measures alone. The group is a child of our own group, so no setup is
needed: root, or a delegated group (`systemd-run --user -p Delegate=yes`), is enough.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LOWEST = 300  # first descriptor that we use; a room's own descriptors are lower
_BESIDE = 64 << 20  # bytes of pages that belong to no program, added to the kernel's limit


class CaseGroup:
    """Control group that the programs of one room enter, one after the other."""

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
        """Return a new group below our own, or None if that is not allowed."""
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
        """Set the limits of the next program, with the controllers that are available."""
        for name, value in (
            ("memory.max", memory + _BESIDE),
            ("memory.swap.max", 0),
            ("pids.max", processes + 1),
        ):
            if (self.folder / name).exists():
                with contextlib.suppress(OSError):
                    (self.folder / name).write_text(str(value))

    def close(self) -> None:
        """Remove the group, which must be empty."""
        while self.descriptors:
            os.close(self.descriptors.pop())
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def own_group(
    mounts: Path = Path("/proc/self/mountinfo"), mine: Path = Path("/proc/self/cgroup")
) -> Path | None:
    """Return the folder of this process's group (version 2), or None if there is none."""
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
