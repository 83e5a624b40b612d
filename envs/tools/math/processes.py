"""Pool of worker processes for symbolic comparisons. A worker starts when it is needed, and is replaced when it dies.

A comparison that uses up its processor time ends its worker (see `worker`) and counts as "not equal". So does one that
breaks its worker in another way. An error is raised only if a worker cannot start.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 120.0  # wall time for the imports, also on a busy machine
WALL_FACTOR, WALL_EXTRA = 20.0, 10.0  # limit on wall time, for a worker that sleeps
COMPARISONS = 5_000  # a worker ends after so many, because sympy's caches grow
_PROGRAM = Path(__file__).with_name("worker.py")
# Run by path, with the import path of this process and without the folder of the file.
_START = "import sys, runpy; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"


def _environment() -> dict[str, str]:
    """Return the variables that the interpreter needs to find its libraries, and no others (no keys, no proxies)."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}


class Worker:
    """Worker process and the pipe to it, for one thread at a time."""

    def __init__(self) -> None:
        path = [entry for entry in sys.path if entry]
        self.comparisons = 0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(_PROGRAM), *path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(), cwd="/",
        )  # fmt: skip
        if self._listen(START_SECONDS) != "ready":
            raise RuntimeError(f"the math grader cannot start: {self._last_words()}")

    def compare(self, predictions: Sequence[str], golds: Sequence[str], seconds: float) -> bool | None:
        """Return the verdict, or None if the worker died."""
        self.comparisons += 1
        question = {"predictions": list(predictions), "golds": list(golds), "seconds": seconds}
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return None
        heard = self._listen(seconds * WALL_FACTOR + WALL_EXTRA)
        return heard == "1" if heard in ("1", "0", "e") else None

    @property
    def alive(self) -> bool:
        """Flag: the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()  # waits for its end and closes the pipes

    def _listen(self, seconds: float) -> str:
        """Return the worker's next line, or "" if it ended or was silent for too long."""
        stdout = self._process.stdout
        assert stdout is not None
        poll = select.poll()
        poll.register(stdout, select.POLLIN | select.POLLHUP)
        return stdout.readline().decode().strip() if poll.poll(seconds * 1000) else ""

    def _last_words(self) -> str:
        self._process.kill()
        complaint = self._process.communicate()[1].decode(errors="replace").strip()
        return complaint.rpartition("\n")[2] or "it ended without a word"


class Pool:
    """Pool of at most ``size`` workers. The latest idle one is used next. If all are busy, threads wait."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.forget()

    def forget(self) -> None:
        """Start with an empty pool, without ending the workers: after a fork they belong to the parent."""
        self._idle: list[Worker] = []
        self._turn = threading.BoundedSemaphore(self._size)

    def compare(self, predictions: Sequence[str], golds: Sequence[str], seconds: float) -> bool:
        """Compare a prediction with gold answers in a free process."""
        with self._turn:
            worker = self._living()
            verdict = None
            try:
                verdict = worker.compare(predictions, golds, seconds)
            finally:
                if verdict is None or worker.comparisons >= COMPARISONS:
                    worker.close()
                else:
                    self._idle.append(worker)
        return bool(verdict)

    def _living(self) -> Worker:
        """Return an idle worker that still runs, or a new one. The system may have killed a worker for its memory."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return Worker()
            if worker.alive:
                return worker
            worker.close()

    def close(self) -> None:
        """End all processes."""
        while self._idle:
            self._idle.pop().close()


POOL = Pool(size=min(4, os.cpu_count() or 1))
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.forget)
