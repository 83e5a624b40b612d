"""Console output of a run: curves, a row per role, speed, failures. If the output is not a terminal, a line per
step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console as Rich
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ....agents.basics.json_types import JsonView
from ...config.schema import RunConfig
from .progress import Progress

BARS = " ▁▂▃▄▅▆▇█"


class Console:
    """Display of a run's metrics."""

    def __init__(
        self, config: RunConfig, headline: str, live: bool, directory: Path = Path(), every: float = 30.0
    ) -> None:
        self.config, self.headline, self.dir, self.every = config, headline, directory, every
        self.earlier, self.now, self.shown = (
            0,
            "",
            0.0,
        )  # steps before a resume; the phase, and when it was last shown
        self.rich = Rich()
        self.train: list[float] = []
        self.valid: list[tuple[int, float]] = []
        self.began = time.perf_counter()
        self.last: Mapping[str, float] = {}
        self.live = Live(console=self.rich, refresh_per_second=4, transient=False) if live else None
        if self.live is not None:
            self.live.start()

    def say(self, text: str) -> None:
        """Print a text above the live display."""
        self.rich.print(Text(text), soft_wrap=True)

    def recall(self, rows: Iterable[JsonView]) -> None:
        """Take the metrics from before a resume."""
        for row in rows:
            if row["kind"] == "validation":
                self.valid.append((row["step"], row.get(self.headline, 0.0)))
            elif row["kind"] == "step":
                self.train.append(row.get(f"train/{self.headline}", 0.0))
        self.earlier = len(self.train)

    def progressed(self, progress: Progress) -> None:
        """Show how far the step is: often in a terminal, rarely in a file."""
        now = time.perf_counter()
        if self.live is not None:
            if progress.done == 0 or now - self.shown > 0.25:
                self.now, self.shown = _bar(progress), now
                self.live.update(self._page(len(self.train)))
        elif now - max(self.shown, progress.began) > self.every:
            self.shown = now
            print(f"step {len(self.train) + 1:>4}/{self.config.steps}  {progress}", flush=True)

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Show the metrics of a step or a validation."""
        if kind == "validation":
            self.valid.append((step, figures.get(self.headline, 0.0)))
        else:
            self.last = figures
            self.train.append(figures.get(f"train/{self.headline}", 0.0))
        if self.live is not None:
            self.live.update(self._page(step))
        elif kind == "validation":
            print(f"step {step:>4}  validation {self.headline} {self.valid[-1][1]:.3f}", flush=True)
        else:
            print(self._line(step, figures), flush=True)

    def close(self, ending: str) -> None:
        """Show how the run ended. An error is reported by the caller."""
        if self.live is not None:
            self.live.stop()
        self.rich.print(
            Text(f"run {ending.partition(':')[0]}, {time.perf_counter() - self.began:.0f} s: {self.dir}"),
            soft_wrap=True,
        )

    def _line(self, step: int, figures: Mapping[str, float]) -> str:
        taken = max(1, len(self.train) - self.earlier)
        left = (time.perf_counter() - self.began) / taken * (self.config.steps - step)
        parts = [
            f"step {step:>4}/{self.config.steps}",
            f"{self.headline} {self.train[-1]:.3f}",
            f"malformed {1 - figures.get('train/format_ok', 1.0):.1%}",
            f"{figures.get('time/step', 0.0):.1f} s",
            f"{figures.get('time/rollout_tokens_per_second', 0.0):,.0f} tok/s",
            f"left {left / 60:.1f} min",
        ]
        if tokens := figures.get("spent/tokens_in", 0.0) + figures.get("spent/tokens_out", 0.0):
            dollars = figures.get("spent/dollars", 0.0)
            parts.append(f"endpoints {f'${dollars:.2f}' if dollars else f'{tokens:,.0f} tokens'}")
        if figures.get("failures"):
            parts.append(f"failures {figures['failures']:.0f}")
        return "  ".join(parts)

    def _page(self, step: int) -> Group:
        head = Text(f"{self.config.env.id}   {self._line(step, self.last) if self.last else ''}")
        curves = Table.grid(padding=(0, 2))
        curves.add_row(f"train {self.headline}", sparkline(self.train), _ends(self.train))
        curves.add_row(
            f"validation {self.headline}",
            sparkline([v for _, v in self.valid]),
            _ends([v for _, v in self.valid]),
        )
        return Group(head, Text(self.now), curves, self._roles())

    def _roles(self) -> Table:
        table = Table(box=None, padding=(0, 2))
        for title in ("role", "acts", "credit", "format", "tokens"):
            table.add_column(title, justify="left" if title == "role" else "right")
        for role in sorted({k.split("/")[1] for k in self.last if k.startswith("role/")}):
            cell = {n: self.last.get(f"role/{role}/{n}", 0.0) for n in ("acts", "credit", "format", "tokens")}
            table.add_row(
                role,
                f"{cell['acts']:.0f}",
                f"{cell['credit']:+.3f}",
                f"{cell['format']:+.3f}",
                f"{cell['tokens']:.1f}",
            )
        return table


def _bar(progress: Progress, width: int = 30) -> str:
    """Return a phase as a line with a bar."""
    if not progress.total:
        return f"{progress} …"
    full = round(width * progress.done / progress.total)
    return f"{'━' * full}{'─' * (width - full)}  {progress}"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return a curve as one line of text."""
    if not values:
        return ""
    values = values if len(values) <= width else [values[int(i * len(values) / width)] for i in range(width)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[1 + round((v - low) / span * 7)] for v in values)


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else ""
