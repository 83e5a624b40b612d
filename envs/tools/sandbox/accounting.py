"""Processor time and memory of a judged program and all its child processes, measured from outside.

RLIMITs bound each process; this module measures the whole tree. The keeper reads it every few milliseconds, from a /proc
that programs cannot see, and from the program's control group if there is one (`cgroups`). The processor time of a process
that has ended counts for the process that waited for it. The filter makes sure that there is one, because programs cannot
ignore SIGCHLD. This module runs inside the room.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SOCKET = 212_992  # bytes that may wait unread in one socket; programs cannot raise it
_LONGEST_MAPS = 1 << 20  # bytes: thousands of mappings
_SLACK = 16 << 20  # shared pages that a process touches for the first time


@dataclass(slots=True)
class Usage:
    """Measurement of the tree at one moment."""

    cpu: float = 0.0  # seconds of the running processes, and of those that they waited for
    memory: int = 0  # bytes beyond those of the idle interpreter
    waiting: bool = False  # flag: a process runs, or waits for a processor or the disk


class ProcessTree:
    """Processes of one case. The keeper makes this object before it covers /proc and before the program starts."""

    def __init__(self, memory: int, group: int | None = None) -> None:
        """Begin to measure. `group` is an open `cpu.stat` of the control group that the program will enter (`cgroups`)."""
        self._group = group
        self._before = self.group_cpu()
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._me = os.readlink("self", dir_fd=self._proc)
        self._others = {name for name in os.listdir(self._proc) if name.isdigit()}
        # otherwise /proc is the host's, because a container may forbid a new one
        self._own = self._me == str(os.getpid())
        self._idle = int((self._read(f"{self._me}/statm") or "0 0").split()[1]) * _PAGE
        self._sockets = self._open_sockets()
        self._memory = memory + _SLACK

    def group_cpu(self) -> float:
        """Return the seconds that the group has used, with processes that have ended; 0 without a group."""
        if self._group is None:
            return 0.0
        first = os.pread(self._group, 64, 0).split(b"\n")[0]  # usage_usec 123
        return int(first.split()[1]) / 1e6

    def final_cpu(self) -> float:
        """Return the seconds of the case from its group, exact to the microsecond; 0 without a group."""
        return self.group_cpu() - self._before

    def look(self) -> Usage:
        """Measure all processes. This takes about 50 microseconds, and 50 more for each process."""
        use = Usage()
        faulted = 0
        names = [name for name in os.listdir(self._proc) if name.isdigit() and self._is_ours(name)]
        for name in names:
            text = self._read(f"{name}/stat")
            if text is None:
                continue
            fields = text[text.rindex(")") + 2 :].split()
            use.cpu += sum(map(int, fields[11:15])) / _TICKS
            use.memory += max(0, int(fields[21]) * _PAGE - self._idle)
            faulted += (int(fields[7]) + int(fields[8])) * _PAGE
            use.waiting = (
                use.waiting or fields[0] in "RD" or (int(fields[17]) > 1 and self._threads_wait(name))
            )
        use.cpu = max(use.cpu, self.final_cpu())
        buffers = max(0, self._open_sockets() - self._sockets) * _SOCKET
        if use.memory + buffers > self._memory:  # shared pages were counted for each process
            use.memory = sum(map(self._proportional, names))
        if faulted > self._memory and any(map(self._shares, names)):
            use.memory = max(use.memory, faulted)
        use.memory += buffers
        return use

    def is_too_large(self, use: Usage) -> bool:
        """Tell whether the processes use more memory than allowed."""
        return use.memory > self._memory

    def _is_ours(self, name: str) -> bool:
        if name in self._others:
            return False
        if self._own:
            return True
        try:
            kind = os.stat(f"{name}/ns/pid", dir_fd=self._proc).st_ino
            return kind == os.stat(f"{self._me}/ns/pid_for_children", dir_fd=self._proc).st_ino
        except OSError:
            return False

    def _threads_wait(self, name: str) -> bool:
        try:
            folder = os.open(f"{name}/task", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return False
        try:
            texts = [self._read(f"{name}/task/{thread}/stat") for thread in os.listdir(folder)]
        except OSError:
            return False
        finally:
            os.close(folder)
        return any(text is not None and text[text.rindex(")") + 2] in "RD" for text in texts)

    def _proportional(self, name: str) -> int:
        """Return a process's proportional share of its memory, or all of its memory if the share cannot be read."""
        text = self._read(f"{name}/smaps_rollup")
        line = next((line for line in (text or "").splitlines() if line.startswith("Pss:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
        statm = self._read(f"{name}/statm")
        return 0 if statm is None else max(0, int(statm.split()[1]) * _PAGE - self._idle)

    def _shares(self, name: str) -> bool:
        """Tell whether a process has shared memory without a file. Its pages stay after all processes have unmapped it.

        The size of such memory cannot be read, but every page of it has caused a page fault.
        """
        try:
            with open(os.open(f"{name}/maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc), "rb") as maps:
                text = maps.read(_LONGEST_MAPS)
        except ProcessLookupError:
            return False
        except OSError as error:
            return not isinstance(error, FileNotFoundError)  # the process does not allow us to read it
        return b"/dev/zero (deleted)" in text or len(text) == _LONGEST_MAPS

    def _open_sockets(self) -> int:
        """Return the number of open sockets in the network namespace, with those in transfer between processes."""
        text = self._read(f"{self._me}/net/sockstat") or "sockets: used 0"
        return int(text.split()[2])

    def _read(self, path: str) -> str | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return None  # it has just ended
        try:
            return os.read(descriptor, 1 << 14).decode(errors="replace")
        except OSError:
            return None
        finally:
            os.close(descriptor)


def can_enter(group: list[int]) -> bool:
    """Tell whether the kernel lets a child of this process enter the control group that the host has opened."""
    if not group:
        return False
    child = os.fork()
    if child == 0:
        try:
            os._exit(os.write(group[0], b"0") - 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
