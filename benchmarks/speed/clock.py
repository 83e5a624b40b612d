"""Seconds of wall-clock time and of processor time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Seconds(NamedTuple):
    """Wall-clock and processor seconds."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Seconds:
        """Return the current times."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Seconds) -> Seconds:
        """Return the seconds since an earlier moment."""
        return Seconds(self.wall - earlier.wall, self.processor - earlier.processor)


def stopwatch(work: Callable[[], object]) -> Seconds:
    """Return the seconds of some work. On a busy machine, those of the processor are reliable."""
    started = Seconds.now()
    work()
    return Seconds.now().since(started)
