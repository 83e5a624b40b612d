"""The run in a terminal: curves, a row per role, speed, failures; or a line a step where nobody watches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console as Rich
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .config import RunConfig

BARS = " ▁▂▃▄▅▆▇█"


class Console:
    """Shows a run's figures as they come."""

    def __init__(self, config: RunConfig, headline: str, live: bool) -> None:
        self.config, self.headline = config, headline
        self.rich = Rich()
        self.train: list[float] = []
        self.valid: list[tuple[int, float]] = []
        self.began = time.perf_counter()
        self.last: Mapping[str, float] = {}
        self.live = Live(console=self.rich, refresh_per_second=4, transient=False) if live else None
        if self.live is not None:
            self.live.start()

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Show a step's or a validation's figures."""
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
        """Say how it ended."""
        if self.live is not None:
            self.live.stop()
        self.rich.print(Text(f"run {ending}, {time.perf_counter() - self.began:.0f} s"))

    def _line(self, step: int, figures: Mapping[str, float]) -> str:
        left = (time.perf_counter() - self.began) / max(1, len(self.train)) * (self.config.steps - step)
        parts = [
            f"step {step:>4}/{self.config.steps}",
            f"{self.headline} {self.train[-1]:.3f}",
            f"malformed {1 - figures.get('train/format_ok', 1.0):.1%}",
            f"{figures.get('time/step', 0.0):.1f} s",
            f"{figures.get('time/rollout_tokens_per_second', 0.0):,.0f} tok/s",
            f"left {left / 60:.1f} min",
        ]
        if figures.get("failures"):
            parts.append(f"failures {figures['failures']:.0f}")
        return "  ".join(parts)

    def _page(self, step: int) -> Group:
        head = Text(f"{self.config.env.id}   {self._line(step, self.last) if self.train else 'validating …'}")
        curves = Table.grid(padding=(0, 2))
        curves.add_row(f"train {self.headline}", sparkline(self.train), _ends(self.train))
        curves.add_row(
            f"validation {self.headline}",
            sparkline([v for _, v in self.valid]),
            _ends([v for _, v in self.valid]),
        )
        return Group(head, curves, self._roles())

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


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text."""
    if not values:
        return ""
    values = values if len(values) <= width else [values[int(i * len(values) / width)] for i in range(width)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[1 + round((v - low) / span * 7)] for v in values)


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else ""
