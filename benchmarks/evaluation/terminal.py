"""Console of an evaluation: a live table on a terminal, otherwise a line from time to time.

All text of models and tasks passes through `printable`, so it cannot move the cursor, set colours or change the direction of
text.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TextIO

from ...agents.basics.hints import counted
from ..pages.html import printable
from . import stats
from .result_tables import estimate
from .result_types import TraceJson
from .results import EpisodeRow, RoleSum

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

LINE_EVERY = 15.0  # seconds between lines without a terminal
PAINT_EVERY = 0.25


class Board:
    """Display of a running evaluation. Use it as a context manager, and its `episode` as ``on_episode``."""

    def __init__(
        self, title: str, total: int, done: int = 0, *, stream: TextIO | None = None, quiet: bool = False
    ) -> None:
        self.title, self.total, self.done, self.fresh = printable(title), total, done, 0
        self.stream, self.quiet = stream or sys.stderr, quiet
        self.began = self.painted = time.monotonic()
        self.scores: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.roles: dict[str, RoleSum] = defaultdict(RoleSum)
        self.failures: Counter[str] = Counter()
        self.cost = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Board:
        if self.stream.isatty() and not self.quiet:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self.stream), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def episode(self, row: EpisodeRow, trace: TraceJson) -> None:
        """Add an episode that has ended."""
        self.done += 1
        self.fresh += 1
        self.scores[trace["env_id"], row.task].append(row.score)
        for role, did in row.roles.items():
            self.roles[role].add(did)
        if row.reason:
            self.failures[row.reason] += 1
        self.cost += row.cost
        now = time.monotonic()
        if now - self.painted >= (PAINT_EVERY if self._live else LINE_EVERY) or self.done == self.total:
            self.painted = now
            self.paint()

    def paint(self) -> None:
        """Show the current state."""
        if self.quiet:
            return
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            self.stream.write(self.line() + "\n")
            self.stream.flush()

    def line(self) -> str:
        """Return the state in one line."""
        shown = ""
        if len({env for env, _ in self.scores}) == 1:  # a mean over different environments would mean nothing
            score = stats.average(list(self.scores.values()), resamples=500)
            shown = "score " + estimate(score.plain())
        tokens = sum(did.tokens_in + did.tokens_out for did in self.roles.values())
        parts = [
            f"{self.title}: {self.done:,}/{counted(self.total, 'episode')}", shown, f"{counted(tokens, 'token')}",
            f"${self.cost:.2f}" if self.cost else "", self._eta(),
        ]  # fmt: skip
        return " · ".join(part for part in parts if part)

    def _eta(self) -> str:
        if not self.fresh or self.done >= self.total:
            return ""
        left = (time.monotonic() - self.began) / self.fresh * (self.total - self.done)
        return f"{int(left // 60)}:{int(left % 60):02d} left"

    def _table(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        roles = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("role", "calls", "legal", "credit", "tokens out", *(["$"] if self.cost else [])):
            roles.add_column(name, justify="left" if name == "role" else "right")
        for role, did in self.roles.items():
            roles.add_row(
                Text(printable(role)), f"{did.calls:,}", f"{did.legal / did.calls:.1%}",
                f"{did.credit / did.calls:+.3f}", f"{did.tokens_out / did.calls:.0f}",
                *([f"{did.cost:.4f}"] if self.cost else []),
            )  # fmt: skip
        failures = [
            Text(f"  {count} × {printable(cause, 100)}", style="red")
            for cause, count in self.failures.most_common(4)
        ]
        return Group(Text(self.line()), ProgressBar(self.total, self.done, width=60), roles, *failures)
