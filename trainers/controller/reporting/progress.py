"""Progress of a run within its step: the phase, how much of it is done, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Progress of one phase after another. `show` is called at every change."""

    def __init__(self) -> None:
        self.show: Callable[[Progress], None] = lambda progress: None
        self.entered: Callable[[str], None] = lambda phase: None
        """Function that is called when a phase begins."""
        self.begin("starting")

    def begin(self, phase: str, total: int = 0) -> None:
        """Begin the next phase. `total` is the number of its parts, or 0 if it is not known."""
        self.phase, self.total, self.done, self.tokens = phase, total, 0, 0
        self.began = time.perf_counter()
        self.entered(phase)
        self.show(self)

    def ended(self, tokens: int = 0) -> None:
        """Count one finished part."""
        self.done, self.tokens = self.done + 1, self.tokens + tokens
        self.show(self)

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.began
        parts = [self.phase]
        if self.total:
            parts.append(f"{self.done}/{self.total}")
        if self.tokens and seconds:
            parts.append(f"{self.tokens / seconds:,.0f} tok/s")
        if 0 < self.done < self.total:
            parts.append(f"{seconds / self.done * (self.total - self.done):.0f} s left")
        return "  ".join(parts)


class Speed:
    """Speed of work that runs side by side: tokens per second of the time in which any of it runs."""

    def __init__(self) -> None:
        self.tokens = 0
        self._seconds, self._since, self._running = 0.0, 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block, once for all blocks that run at the same time."""
        self._lap()
        self._running += 1
        try:
            yield
        finally:
            self._lap()
            self._running -= 1

    def taken(self) -> float:
        """Return the tokens per second since the last call. Without a token, it is 0."""
        self._lap()
        pace = self.tokens / self._seconds if self._seconds else 0.0
        self.tokens, self._seconds = 0, 0.0
        return pace

    def _lap(self) -> None:
        """Count the time since the last lap, if anything ran."""
        now = time.perf_counter()
        if self._running:
            self._seconds += now - self._since
        self._since = now
