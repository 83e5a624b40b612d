"""The watchdog: if nothing ends for a long time, it reports what each part of a run waits for.

Every call to a model group is on a list while it waits, and every episode while it is played. A thread beside the event
loop looks at both. It only reads and prints, so it does not affect training.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from ....agents.policies import Call
from ....envs.core.execution import Execution
from ...group.contract import Group

POOLS = ("MainThread", "group", "unitymas", "openai", "vllm")
"""Beginnings of the names of threads whose place is reported."""
NO_POLICY = ("play", "save", "load", "seal", "drop", "cancel", "phase")
"""Calls whose first argument is text, but not the name of a policy."""


class Watchdog:
    """Reporter of everything that waits if nothing has ended for `seconds` (0: never), and again after the same
    time.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None] | None = None) -> None:
        self.seconds, self.tell = seconds, tell or _print
        self.episodes: dict[str, Execution] = {}  # name -> execution, while it is played
        self.answered: Callable[[str, str, str, float, float], None] | None = None
        """Function that is called for each call that has ended, with group, method, policy, beginning and end."""
        self._calls: dict[int, tuple[float, str, str, tuple[object, ...]]] = {}
        self._last, self._number = time.monotonic(), 0
        self._over = threading.Event()

    def start(self) -> None:
        """Start to watch."""
        if self.seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop to watch."""
        self._over.set()

    def over(self, group: Group, name: str) -> Group:
        """Return a model group whose calls are on the list."""
        return cast(Group, Watched(group, name, self))  # it has the members of the group itself

    @contextmanager
    def call(self, group: str, method: str, arguments: tuple[object, ...]) -> Iterator[None]:
        """Keep a call on the list during the block."""
        self._number = number = self._number + 1
        self._calls[number] = (time.monotonic(), group, method, arguments)
        began = time.perf_counter()
        try:
            yield
        finally:
            del self._calls[number]
            self._last = time.monotonic()
            if self.answered is not None:
                policy = arguments[0] if method not in NO_POLICY and arguments else ""
                self.answered(
                    group, method, policy if isinstance(policy, str) else "", began, time.perf_counter()
                )

    @contextmanager
    def episode(self, name: str, execution: Execution) -> Iterator[None]:
        """Keep an episode on the list during the block."""
        self.episodes[name] = execution
        try:
            yield
        finally:
            self.episodes.pop(name, None)
            self._last = time.monotonic()

    def _watch(self) -> None:
        told = self._last
        while not self._over.wait(min(self.seconds / 4, 10.0)):
            now = time.monotonic()
            if now - max(self._last, told) >= self.seconds:
                told = now
                self.tell(self.report())

    def report(self) -> str:
        """Return a report of everything that waits now, the longest wait first."""
        now = time.monotonic()
        calls = sorted(list(self._calls.values()), key=lambda call: call[0])
        lines = [f"watchdog: nothing has ended for {now - self._last:.0f} s. Waiting:"]
        lines += _folded(f"group {g!r}: {_asked(m, a)}, for {now - began:.0f} s" for began, g, m, a in calls)
        lines += _folded(
            f"episode {name}: {wait}" for name, e in list(self.episodes.items()) for wait in _pending(e)
        )
        lines += [f"thread {name}: {place}" for name, place in sorted(_places().items())]
        return "\n  ".join(lines)


class Watched:
    """Model group whose calls are on the watchdog's list."""

    def __init__(self, group: Group, name: str, watchdog: Watchdog) -> None:
        self._group, self._name, self._watchdog = group, name, watchdog

    def abandon(self) -> None:
        """End the group without waiting."""
        self._group.abandon()

    def __getattr__(self, method: str) -> Any:
        asked = getattr(self._group, method)
        if not callable(asked):
            return asked

        async def ask(*arguments: object, **options: object) -> object:
            with self._watchdog.call(self._name, method, arguments):
                return await asked(*arguments, **options)

        return ask


def _asked(method: str, arguments: tuple[object, ...]) -> str:
    """Describe a call: what it requests, of which policy, for which episode and node."""
    policy = f" of policy {arguments[0]!r}" if arguments and isinstance(arguments[0], str) else ""
    if method in ("seal", "drop", "cancel"):
        return f"{method} episode {arguments[0] if arguments else '?'}"
    if method == "play":
        return f"play draw {arguments[0]}"
    if method == "generate" and len(arguments) > 1 and isinstance(call := arguments[1], Call):
        return f"generate{policy}, episode {call.episode}, node {call.node}, role {call.role!r}"
    return f"{method}{policy}"


def _pending(execution: Execution) -> Iterator[str]:
    """Describe what an episode waits for: the agent that acts, or the tool that is used."""
    for node in list(execution.pending):
        what = f"tool {node.tool!r}" if node.kind == "use" else f"agent {node.agent!r}"
        yield f"waits for {what} at node {node.id}"


def _folded(lines: Iterator[str], most: int = 8) -> list[str]:
    every = list(lines)
    return every[:most] + ([f"… and {len(every) - most} more like these"] if len(every) > most else [])


def _places() -> Mapping[str, str]:
    """Return the places of a run's working threads: the innermost line of each."""
    frames, places, count = sys._current_frames(), {}, Counter[str]()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or not thread.name.startswith(POOLS):
            continue
        stack = traceback.extract_stack(frame)
        if stack[-1].name in ("_worker", "wait") and not thread.name.startswith("Main"):
            continue  # an idle thread of a pool
        ours = [line for line in stack if "unitymas" in line.filename] or stack
        count[thread.name] += 1
        places[f"{thread.name}"] = f"{ours[-1].filename}:{ours[-1].lineno} in {ours[-1].name}"
    return places


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
