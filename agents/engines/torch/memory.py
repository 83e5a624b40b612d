"""Memory that a device has left for this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""File that names the control groups of this process."""


def available(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device, by the limits of machine, container and
    process.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return max(0, min(_machine(), *_container(), *_process()))


def _machine() -> int:
    try:
        return _lines(Path("/proc/meminfo"))["MemAvailable"]
    except (OSError, KeyError):  # not Linux: half of the memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container() -> Iterator[int]:
    """Bytes that the control groups around this process leave. Caches of files count as free."""
    try:
        groups = OWN.read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, kinds, path = line.split(":", 2)
        if kinds == "" or "memory" in kinds.split(","):
            root, most, used, file = (
                (CGROUPS, "memory.max", "memory.current", "inactive_file")
                if kinds == ""
                else (
                    CGROUPS / "memory",
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                )
            )
            inner = root / path.lstrip("/")
            for group in (inner, *inner.parents):
                try:
                    limit = int((group / most).read_text())  # "max" is not a number: there is no limit
                    held = int((group / used).read_text()) - _lines(group / "memory.stat")[file]
                except (OSError, ValueError, KeyError):
                    pass
                else:
                    yield limit - held
                if group == root:
                    break


def _process() -> Iterator[int]:
    """Bytes that `ulimit -v` leaves."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield limit - pages * resource.getpagesize()
    except (ImportError, OSError):
        return


def _lines(file: Path) -> dict[str, int]:
    """Read lines such as `name: 12 kB` or `name 12`, in bytes."""
    numbers: dict[str, int] = {}
    for line in file.read_text().splitlines():
        name, number, *unit = line.replace(":", " ").split()
        numbers[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return numbers
