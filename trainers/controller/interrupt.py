"""Ctrl-C in a training run: the first finishes the step and writes a checkpoint, the second stops at once.

Before the run has begun (while models load or Ray starts), there is nothing to save. Then the first one stops it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPED = 130
"""Exit status of a process that a Ctrl-C ended."""


class Interrupts:
    """Counter of interrupts, which also knows how to stop at once."""

    def __init__(self) -> None:
        self.count, self.begun = 0, False
        self._stop: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        return self.count > 0

    def __call__(self) -> None:
        """Count one more interrupt."""
        self.count += 1
        if self.count > 1 or not self.begun:
            self._stop()
            return
        text = "interrupted: the step is finished and a checkpoint written; Ctrl-C again stops at once"
        print(f"\nunitymas: {text}", file=sys.stderr, flush=True)

    def cancels(self) -> None:
        """Cancel this task at an interrupt, until the run has begun. A second interrupt raises at once."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        if self:  # the interrupt came before the task existed
            self._stop()
        try:  # the signal must wake the loop, in whichever thread it arrives
            loop.add_signal_handler(signal.SIGINT, lambda: None)
        except (NotImplementedError, RuntimeError, ValueError):
            return
        signal.signal(signal.SIGINT, self._at_start)

    def _at_start(self, *_: object) -> None:
        self()
        if self.count > 1:  # a model is being read or downloaded, so the loop does not run
            raise KeyboardInterrupt

    @contextmanager
    def heeded(self, at_once: Callable[[], object]) -> Iterator[None]:
        """Handle the signal during the block. In a thread (of a notebook) the waiting thread calls this object.

        The second interrupt calls `at_once` and ends this process with all its threads. A resume can continue from the
        files.
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
