"""Ctrl-C in a training run: the first finishes the step and writes a checkpoint, the second stops at once.

Before the run has begun (models are loaded, Ray is started), there is nothing to keep: the first stops it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPED = 130
"""The exit status of a process that a Ctrl-C ended."""


class Interrupts:
    """Counts them, and knows how to stop at once."""

    def __init__(self) -> None:
        self.count, self.begun = 0, False
        self._stop: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        return self.count > 0

    def __call__(self) -> None:
        """One more."""
        self.count += 1
        if self.count > 1 or not self.begun:
            self._stop()
            return
        text = "interrupted: the step is finished and a checkpoint written; Ctrl-C again stops at once"
        print(f"\nunitymas: {text}", file=sys.stderr, flush=True)

    def cancels(self) -> None:
        """Cancel this task at an interrupt, until the run has begun; a second one raises where the process is."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        if self:  # it came before there was a task
            self._stop()
        try:  # so that the signal wakes the loop, whichever thread it reaches
            loop.add_signal_handler(signal.SIGINT, lambda: None)
        except (NotImplementedError, RuntimeError, ValueError):
            return
        signal.signal(signal.SIGINT, self._at_start)

    def _at_start(self, *_: object) -> None:
        self()
        if self.count > 1:  # a model is being read, or fetched: the loop does not turn
            raise KeyboardInterrupt

    @contextmanager
    def heeded(self, at_once: Callable[[], object]) -> Iterator[None]:
        """Take the signal while the block, the run, lasts; in a thread (a notebook) whoever waits for it calls.

        The second one calls `at_once` and ends this process, computing threads included. A resume can go on from
        what is left behind.
        """
        loop, self.begun = asyncio.get_running_loop(), True
        try:
            loop.add_signal_handler(signal.SIGINT, self)
        except (NotImplementedError, RuntimeError, ValueError):
            yield
            return
        self._stop = lambda: _exit(at_once)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _exit(at_once: Callable[[], object]) -> None:
    at_once()
    sys.stdout.flush()
    os._exit(STOPPED)
