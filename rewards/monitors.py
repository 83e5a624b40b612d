"""Monitors of a run: each reports one sign that the team gets worse while its reward rises.

    watch = Watch(headline="f1")
    for step …:
        figures = {"step": step, **measure(traces), "train": mean_score}        # "held_out" where it was measured
        for alarm in watch.see(figures):
            print(alarm)

    length drift      episodes are longer or shorter than in the first steps
    tool spike        many more tool calls than in the steps before
    entropy collapse  a role gives nearly the same reply to every prompt
    format only       the credit for format rises, and the other credit does not
    held-out drop     the held-out score falls, and the training score does not

A monitor never changes a reward. An alarm is raised at the step where its condition begins, and not again while the
condition lasts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Protocol

from ..agents.basics.json_types import JsonView
from ..envs.core.trace import Trace

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Alarm of a monitor: step, value, threshold, and a sentence for the user."""

    step: int
    monitor: str
    value: float
    threshold: float
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.monitor}: {self.message}"


class Monitor(Protocol):
    """Interface of a monitor, which reads the figures of all steps so far."""

    @property
    def name(self) -> str:
        """Name of the monitor."""

    def look(self, history: Sequence[Figures]) -> tuple[float, float, str] | None:
        """Return the value, its threshold and a message if the latest step raises an alarm, else None."""


def measure(traces: Iterable[Trace]) -> dict[str, float]:
    """Compute the figures that monitors read, from the episodes of one step (means per episode)."""
    traces = list(traces)
    if not traces:
        return {}
    credits: dict[bool, float] = defaultdict(float)
    for trace in traces:
        for credit in trace.credits:
            credits["format" in credit.component] += credit.amount
    n = len(traces)
    return {
        "acts": sum(len(t.acts()) for t in traces) / n,
        "tool_uses": sum(len(t.uses()) for t in traces) / n,
        "thinking_characters": sum(len(node.thinking) for t in traces for node in t.acts()) / n,
        "message_entropy": message_entropy(traces),
        "format_credit": credits[True] / n,
        "task_credit": credits[False] / n,
    }


def message_entropy(traces: Iterable[Trace]) -> float:
    """Return the variety of replies, from 0 (all replies are equal) to 1 (no two are equal).

    The entropy of a role's distribution of whole replies is divided by its maximum. The smallest value of any role is
    returned, because one role that repeats itself is enough for an alarm.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for trace in traces:
        for node in trace.acts():
            counts[str(node.role)][(node.text or "").strip()] += 1
    return min((_evenness(replies) for replies in counts.values() if replies.total() > 1), default=1.0)


def _evenness(counts: Counter[str]) -> float:
    total = counts.total()
    return -sum(c / total * math.log(c / total) for c in counts.values()) / math.log(total)


@dataclass(frozen=True, slots=True)
class LengthDrift:
    """Monitor of acts per episode: mean of the last `window` steps against mean of the first `warmup` steps."""

    factor: float = 1.5
    warmup: int = 5
    window: int = 3
    key: str = "acts"
    name: str = "length drift"

    def look(self, history: Sequence[Figures]) -> tuple[float, float, str] | None:
        """Return the value, its threshold and a message if the latest step raises an alarm, else None."""
        means = _early_and_late(history, self.key, self.warmup, self.window)
        if means is None or means[0] <= 0:
            return None
        before, now = means
        ratio = now / before
        if 1 / self.factor <= ratio <= self.factor:
            return None
        change = "longer" if ratio > 1 else "shorter"
        threshold = self.factor if ratio > 1 else 1 / self.factor
        return (
            ratio,
            threshold,
            f"episodes are {change}: {now:.1f} acts, {before:.1f} at first (× {ratio:.2f}, threshold × {threshold:.2f})",
        )


@dataclass(frozen=True, slots=True)
class ToolSpike:
    """Monitor of tool uses per episode in this step, against the median of the `window` steps before."""

    factor: float = 2.0
    least: float = 1.0
    window: int = 10
    name: str = "tool spike"

    def look(self, history: Sequence[Figures]) -> tuple[float, float, str] | None:
        """Return the value, its threshold and a message if the latest step raises an alarm, else None."""
        uses = [row["tool_uses"] for row in history if "tool_uses" in row]
        if len(uses) < 4 or "tool_uses" not in history[-1]:
            return None
        usual = median(uses[-1 - self.window : -1])
        threshold = max(usual * self.factor, usual + self.least)
        if uses[-1] <= threshold:
            return None
        return (
            uses[-1],
            threshold,
            f"{uses[-1]:.1f} tool uses an episode, {usual:.1f} in the steps before (threshold {threshold:.1f})",
        )


@dataclass(frozen=True, slots=True)
class EntropyCollapse:
    """Monitor of the variety of replies: the last steps against the first. A variety of `floor` or more never alarms."""

    share: float = 0.5
    floor: float = 0.5
    warmup: int = 5
    window: int = 3
    name: str = "entropy collapse"

    def look(self, history: Sequence[Figures]) -> tuple[float, float, str] | None:
        """Return the value, its threshold and a message if the latest step raises an alarm, else None."""
        means = _early_and_late(history, "message_entropy", self.warmup, self.window)
        if means is None:
            return None
        before, now = means
        threshold = min(self.floor, self.share * before)
        if now >= threshold:
            return None
        return (
            now,
            threshold,
            f"a role repeats itself: variety of replies {now:.2f}, {before:.2f} at first (threshold {threshold:.2f})",
        )


@dataclass(frozen=True, slots=True)
class FormatOnly:
    """Monitor of credit per episode, against the first steps: the credit for format rose, the other credit did not."""

    least: float = 0.1
    share: float = 0.1
    warmup: int = 5
    window: int = 3
    name: str = "format only"

    def look(self, history: Sequence[Figures]) -> tuple[float, float, str] | None:
        """Return the value, its threshold and a message if the latest step raises an alarm, else None."""
        form = _early_and_late(history, "format_credit", self.warmup, self.window)
        task = _early_and_late(history, "task_credit", self.warmup, self.window)
        if form is None or task is None:
            return None
        gain, other = form[1] - form[0], task[1] - task[0]
        if gain < self.least or other > self.share * gain:
            return None
        return (
            other,
            self.share * gain,
            (
                f"credit rises by format alone: format {gain:+.2f}, everything else {other:+.2f} "
                f"(threshold {self.share * gain:+.2f}: {self.share:.0%} of the format's gain)"
            ),
        )


@dataclass(frozen=True, slots=True)
class HeldOutDrop:
    """Monitor of the held-out score against its best, while the training score is not below its value at that step."""

    drop: float = 0.05
    name: str = "held-out drop"

    def look(self, history: Sequence[Figures]) -> tuple[float, float, str] | None:
        """Return the value, its threshold and a message if the latest step raises an alarm, else None."""
        rows = [row for row in history if "held_out" in row]
        if len(rows) < 2:
            return None
        best = max(rows, key=lambda row: row["held_out"])
        fall = best["held_out"] - rows[-1]["held_out"]
        if fall <= self.drop or rows[-1].get("train", math.inf) < best.get("train", -math.inf):
            return None
        return (
            fall,
            self.drop,
            (
                f"held-out score {rows[-1]['held_out']:.3f}, it was {best['held_out']:.3f} at step {int(best['step'])} "
                f"(− {fall:.3f}, threshold {self.drop:.3f}), while the training score did not fall"
            ),
        )


DEFAULT: tuple[Monitor, ...] = (LengthDrift(), ToolSpike(), EntropyCollapse(), FormatOnly(), HeldOutDrop())


@dataclass
class Watch:
    """Monitors of one run, which are shown its steps in order."""

    monitors: Sequence[Monitor] = DEFAULT
    history: list[Figures] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    _firing: set[str] = field(default_factory=set)

    def see(self, figures: Mapping[str, object]) -> list[Alarm]:
        """Add the figures of one step, and return the alarms that begin there. `figures` has the key ``step``."""
        self.history.append(
            {k: float(v) for k, v in figures.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        )
        fresh = []
        for monitor in self.monitors:
            trend = monitor.look(self.history)
            if trend is None:
                self._firing.discard(monitor.name)
            elif monitor.name not in self._firing:
                self._firing.add(monitor.name)
                fresh.append(Alarm(int(self.history[-1]["step"]), monitor.name, *trend))
        self.alarms += fresh
        return fresh

    def state_dict(self) -> dict[str, object]:
        """Return the state of the monitors, as plain data for a run's checkpoints."""
        alarms = [asdict(alarm) for alarm in self.alarms]
        return {"history": list(self.history), "alarms": alarms, "firing": sorted(self._firing)}

    def load_state_dict(self, state: JsonView) -> None:
        """Restore a state that `state_dict` returned."""
        self.history, self.alarms = list(state["history"]), [Alarm(**alarm) for alarm in state["alarms"]]
        self._firing = set(state["firing"])


def _early_and_late(
    history: Sequence[Figures], key: str, warmup: int, window: int
) -> tuple[float, float] | None:
    """Return the means over the first and the last steps; None while there are too few steps."""
    values = [row[key] for row in history if key in row]
    if len(values) < warmup + window:
        return None
    return fmean(values[:warmup]), fmean(values[-window:])
