"""Idle shares: how long the trainer waits for episodes, and how long no call to a policy is open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Idle:
    """Two clocks that restart with each step."""

    def __init__(self) -> None:
        self._open, self._since = 0, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._began = self._since = time.perf_counter()
        self._waited = self._busy = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's duration as waiting of the trainer."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - max(began, self._began)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call as open during the block."""
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._busy += time.perf_counter() - self._since

    def figures(self) -> dict[str, float]:
        """Return the shares of the step so far in which the trainer and the rollout were idle."""
        now = time.perf_counter()
        seconds = max(now - self._began, 1e-9)
        busy = self._busy + (now - self._since if self._open else 0.0)
        return {
            "time/idle/trainer": min(1.0, self._waited / seconds),
            "time/idle/rollout": max(0.0, 1.0 - busy / seconds),
        }
