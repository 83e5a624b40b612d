"""Rules by which a run stops itself: steps without samples, roles that cannot learn, settings whose component never
occurs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ...agents.basics.hints import counted
from ..config.schema import RunConfig
from .checkpoint import Saved


class Stopped(RuntimeError):
    """Raised when a run stops itself. The message is the cause."""


class StopRules:
    """Counters of bad steps. A rule raises `Stopped` with the cause when its counter reaches `patience`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.patience = min(config.patience, config.steps)  # a short run must also learn something
        self.cause = ""  # cause of the last step without usable samples
        self._empty = 0
        # counts by policy or key; -1: the missing thing has been seen
        self._times: dict[str, int] = defaultdict(int)

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Count a step. `patience` steps in a row without a usable sample stop the run."""
        self._empty = self._empty + 1 if not metrics.get("usable") else 0
        if self._empty >= self.patience:
            cause = (
                self.cause
                or "no decision of a trained policy was left (a prompt longer than groups.*.context, or failed episodes)"
            )
            raise Stopped(
                f"{counted(self._empty, 'step')} in a row without one usable sample; most often: {cause}"
            )

    def missing(self, key: str, sentence: str | None) -> None:
        """Stop the run if no decision of its first `patience` steps has something that a setting needs."""
        if sentence is None:
            self._times[key] = -1  # it exists, and may be rare from now on
        elif self._times[key] >= 0:
            self._times[key] += 1
            if self._times[key] >= self.patience:
                raise Stopped(f"{key}: {sentence} (in {counted(self.patience, 'step')})")

    def starving(self, policy: str, sentence: str | None) -> None:
        """Stop the run if nearly all advantages of a trained role are 0 for `patience` steps."""
        self._times[policy] = self._times[policy] + 1 if sentence else 0
        if sentence and self.config.starved and self._times[policy] >= self.config.patience:
            raise Stopped(
                f"policy {policy!r}: {sentence} (for {counted(self.config.patience, 'step')}; starved=false goes on)"
            )

    def state_dict(self) -> dict[str, object]:
        """Return the counts so far, as plain JSON for a checkpoint."""
        return {"empty": self._empty, "starved": dict(self._times), "last_cause": self.cause}

    def load_state_dict(self, state: Saved) -> None:
        """Restore the state that `state_dict` returned."""
        self._empty, self.cause = state["empty"], state["last_cause"]
        self._times = defaultdict(int, state["starved"])
