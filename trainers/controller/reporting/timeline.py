"""Timeline of a run: what every group and the controller did when, in a file that Perfetto opens.

`timeline.json` in the run directory is a list of Chrome trace events (https://ui.perfetto.dev opens it as it is). One
track shows the controller's phases (playing, updating, writing a checkpoint). One track for each kind of work of each
model group shows its values, updates and publishes. A counter shows the calls that are open at each group. The file is written step by
step; its closing bracket is left out, as the format allows, so a killed run's file opens too.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

POINTS = 200
"""Largest number of points of a counter in one step."""
SHORT = ("generate", "seal", "drop", "cancel", "phase")
"""Calls that come in thousands. The timeline counts them, and draws no bar for each."""


class Timeline:
    """Collector of a step's intervals, which it writes at the end of the step."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.origin = path, time.perf_counter() - time.time()
        self.calls: dict[str, list[tuple[float, float]]] = defaultdict(
            list
        )  # group -> open generate calls; controller -> open draws
        self.work: dict[str, list[tuple[float, float]]] = defaultdict(list)  # group -> its longer calls
        self.bars: list[dict[str, object]] = []
        self._phase: tuple[str, float] | None = None
        self._tracks: dict[str, int] = {}
        self._named = 0
        if path is not None and path.exists():  # a resumed run continues after the last complete line
            whole = path.read_bytes()
            os.truncate(path, whole.rfind(b"\n") + 1)

    def phase(self, name: str) -> None:
        """End the controller's phase, and begin the next one."""
        now = time.perf_counter()
        if self._phase is not None:
            self._bar("controller", self._phase[0], self._phase[1], now)
        self._phase = (name, now)

    def call(self, group: str, method: str, policy: str, began: float, ended: float) -> None:
        """Record a call that a group has answered."""
        if method in ("generate", "play"):
            self.calls[group].append((began, ended))
        elif method not in SHORT:
            name = f"{method} {policy}".strip()
            self._bar(f"{group}: {name}", name, began, ended)
            self.work[group].append((began, ended))

    def stepped(self, step: int, began: float) -> dict[str, float]:
        """Write the intervals since the last step. Return the share of the step in which each group worked."""
        now = time.perf_counter()
        self.phase("between steps")
        self._bar("steps", f"step {step}", began, now)
        figures: dict[str, float] = {}
        for group, intervals in list(self.calls.items()):
            open_calls = concurrency(np.array(intervals))
            self.bars += [
                {
                    "name": f"open calls of {group}",
                    "ph": "C",
                    "pid": 1,
                    "ts": self._micros(at),
                    "args": {"calls": count},
                }
                for at, count in thinned(open_calls, POINTS)
            ]
            figures |= {
                f"time/open_calls/{group}": mean(open_calls, began, now),
                f"time/open_calls_max/{group}": float(max(count for _, count in open_calls)),
            }
        for group in dict.fromkeys((*self.calls, *self.work)):
            busy = covered([*self.calls[group], *self.work[group]], began, now)
            figures[f"time/busy/{group}"] = busy / max(now - began, 1e-9)
        self._write()
        return figures

    def _bar(self, track: str, name: str, began: float, ended: float) -> None:
        number = self._tracks.setdefault(track, len(self._tracks) + 1)
        self.bars.append(
            {
                "name": name, "ph": "X", "pid": 1, "tid": number, "ts": self._micros(began),
                "dur": round((ended - began) * 1e6),
            }
        )  # fmt: skip

    def _micros(self, at: float) -> int:
        return round((at - self.origin) * 1e6)

    def _write(self) -> None:
        bars, self.bars = self.bars, []
        self.calls.clear()
        self.work.clear()
        if self.path is None:
            return
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
            for track, number in list(self._tracks.items())[self._named :]
        ]
        self._named = len(self._tracks)
        with open(self.path, "a") as file:
            if file.tell() == 0:
                file.write("[\n")
            file.writelines(json.dumps(event) + ",\n" for event in [*names, *bars])


def concurrency(intervals: np.ndarray) -> list[tuple[float, int]]:
    """Count the open intervals (began, ended): the count after each moment at which one begins or ends."""
    moments = np.concatenate([intervals[:, 0], intervals[:, 1]])
    change = np.repeat([1, -1], len(intervals))
    order = np.lexsort((change, moments))  # at the same moment, an end comes before a beginning
    return list(zip(moments[order].tolist(), np.cumsum(change[order]).tolist(), strict=True))


def thinned(points: list[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Keep at most so many points, the last one among them."""
    return points if len(points) <= most else [*points[:: -(-len(points) // (most - 1))], points[-1]]


def mean(points: list[tuple[float, int]], began: float, ended: float) -> float:
    """Return the mean over time of a count that is 0 outside of its points."""
    area = sum(count * (after - at) for (at, count), (after, _) in zip(points, points[1:], strict=False))
    return area / max(ended - began, 1e-9)


def covered(intervals: list[tuple[float, float]], began: float, ended: float) -> float:
    """Return the seconds between `began` and `ended` in which at least one interval is open."""
    seconds, reached = 0.0, began
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, ended)
        if end > start:
            seconds, reached = seconds + end - start, end
    return seconds
