"""Outages: a model cannot be asked at all, so the work stops and says why."""

from __future__ import annotations

import re
from collections.abc import Hashable

from .failures import ModelFailure as ModelFailure
from .failures import Outage as Outage


class Failures:
    """Counters that tell an outage from single failures: one policy fails in a row, always in the same way."""

    first = 3  # failures in a row, of a policy that never answered
    later = 32  # of a policy that has answered: a few calls may fail together

    def __init__(self) -> None:
        self._answered: set[Hashable] = set()
        self._row: dict[Hashable, tuple[str, int]] = {}  # policy -> the last failure, and how often in a row

    def answered(self, policy: Hashable) -> None:
        """Record that the policy answered a call."""
        self._answered.add(policy)
        self._row.pop(policy, None)

    def failed(self, policy: Hashable, error: Exception) -> None:
        """Record that the policy failed a call. Raise `Outage` if all its calls would end like this."""
        if not isinstance(error, ModelFailure | MemoryError):
            return  # an error in the user's own code
        kind = (
            f"{type(error).__name__} {re.sub(r'[^ ]*[0-9][^ ]*', '#', str(error))}"  # without ids and times
        )
        last, times = self._row.get(policy, ("", 0))
        times = times + 1 if kind == last else 1
        self._row[policy] = kind, times
        answered = policy in self._answered
        if getattr(error, "hopeless", False) and not answered:
            raise Outage(str(error)) from error
        if times >= (self.later if answered else self.first):
            raise Outage(f"{times} calls in a row failed alike, so no more are made: {error}") from error
