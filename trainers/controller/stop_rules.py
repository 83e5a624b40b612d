"""Rules by which a run stops itself: steps that teach nothing, roles that cannot learn, settings that count on what is not there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ...agents.basics.hints import counted
from ..config.schema import RunConfig
from .checkpoint import Saved


class Stopped(RuntimeError):
    """A run stopped itself; the message is the cause."""


class StopRules:
    """Count what goes wrong step after step, and raise `Stopped` with the cause when it has gone on for too long."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.patience = min(config.patience, config.steps)  # a short run must teach something, too
        self.cause = ""  # of the last step without usable samples
        self._empty = 0
        self._times: dict[str, int] = defaultdict(int)  # by policy or key; -1: what was missing has been seen

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Count a step; `patience` of them in a row without one usable sample stop the run."""
        self._empty = self._empty + 1 if not metrics.get("usable") else 0
        if self._empty >= self.patience:
            cause = self.cause or "no decision of a trained policy was left"
            raise Stopped(
                f"{counted(self._empty, 'step')} in a row without one usable sample; most often: {cause}"
            )

    def missing(self, key: str, sentence: str | None) -> None:
        """Stop the run over a setting that counts on what no decision of its first `patience` steps has had."""
        if sentence is None:
            self._times[key] = -1  # it exists; from now on it may be rare
        elif self._times[key] >= 0:
            self._times[key] += 1
            if self._times[key] >= self.patience:
                raise Stopped(f"{key}: {sentence} (in {counted(self.patience, 'step')})")

    def starving(self, policy: str, sentence: str | None) -> None:
        """Stop the run over a trained role whose advantages are nearly all 0, for the config's `patience` steps."""
        self._times[policy] = self._times[policy] + 1 if sentence else 0
        if sentence and self.config.starved and self._times[policy] >= self.config.patience:
            raise Stopped(
                f"policy {policy!r}: {sentence} (for {counted(self.config.patience, 'step')}; starved=false goes on)"
            )

    def state_dict(self) -> dict[str, object]:
        """Return the counts so far, as plain JSON for a checkpoint."""
        return {"empty": self._empty, "starved": dict(self._times), "last_cause": self.cause}

    def load_state_dict(self, state: Saved) -> None:
        """Go on from what `state_dict` gave."""
        self._empty, self.cause = state["empty"], state["last_cause"]
        self._times = defaultdict(int, state["starved"])
