"""Progress of a run within its step: what it is doing, how much of it is done, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """One phase after another; `show` is called whenever something has changed."""

    def __init__(self) -> None:
        self.show: Callable[[Progress], None] = lambda progress: None
        self.entered: Callable[[str], None] = lambda phase: None
        """Told of each phase that begins."""
        self.begin("starting")

    def begin(self, phase: str, total: int = 0) -> None:
        """The next phase; `total` is how many things it will end, 0 where that is not known."""
        self.phase, self.total, self.done, self.tokens = phase, total, 0, 0
        self.began = time.perf_counter()
        self.entered(phase)
        self.show(self)

    def ended(self, tokens: int = 0) -> None:
        """One thing more is done."""
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
