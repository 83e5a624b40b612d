"""When a model cannot be asked at all: the work stops and says why, instead of playing on with nobody there."""

from __future__ import annotations

import re
from collections.abc import Hashable


class ModelFailure(RuntimeError):
    """A model did not answer a call. `hopeless`: neither would it answer any other."""

    hopeless = False


class Outage(RuntimeError):
    """A model answers nothing any more."""


class Failures:
    """Tells an outage from failures that happen: by failures in a row, all alike, of one policy."""

    first = 3  # in a row, of a policy that never answered
    later = 32  # of one that did: a few may fall together

    def __init__(self) -> None:
        self._answered: set[Hashable] = set()
        self._row: dict[Hashable, tuple[str, int]] = {}  # what failed last, and how often in a row

    def answered(self, policy: Hashable) -> None:
        """It answered a call."""
        self._answered.add(policy)
        self._row.pop(policy, None)

    def failed(self, policy: Hashable, error: Exception) -> None:
        """It failed a call; raises `Outage` if that is how all of them will end."""
        if not isinstance(error, ModelFailure | MemoryError):
            return  # an error in somebody's own code
        kind = (
            f"{type(error).__name__} {re.sub(r'[^ ]*[0-9][^ ]*', '#', str(error))}"  # without ids and times
        )
        last, times = self._row.get(policy, ("", 0))
        times = times + 1 if kind == last else 1
        self._row[policy] = kind, times
        known = policy in self._answered
        if getattr(error, "hopeless", False) and not known:
            raise Outage(str(error)) from error
        if times >= (self.later if known else self.first):
            raise Outage(f"{times} calls in a row failed alike, so no more are made: {error}") from error
