"""What a setting may be, where a config can be checked against it without loading torch: named choices, ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "unit-mean"]
Estimator = Literal["k1", "k2", "k3"]
Importance = Literal["off", "truncate", "mask", "sequence-truncate"]


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that fit a setting."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    """`low` itself is too low."""
    below: bool = False
    """`high` itself is too high."""

    def refusal(self, x: float) -> str:
        """What a number that does not fit must do; empty if it fits."""
        if not math.isfinite(x):
            return "be a finite number"
        if x < self.low or (self.above and x == self.low):
            if self.above:
                return f"be greater than {self.low:g}"
            return f"be at least {self.low:g}" if self.low else "not be negative"
        if x > self.high or (self.below and x == self.high):
            return f"be {'less than' if self.below else 'at most'} {self.high:g}"
        return ""


ANY = Range(-math.inf)
SHARE = Range(0.0, 1.0)
POSITIVE = Range(0.0, above=True)
COUNT = Range(1.0)


class OutOfRange(ValueError):
    """A setting holds a number that does not fit; the message names it."""

    def __init__(self, name: str, value: float, refusal: str) -> None:
        self.name, self.value, self.refusal = name, value, refusal
        super().__init__(f"{name} is {value}: it must {refusal}")


def check_ranges(settings: Any, ranges: Mapping[str, Range], owner: str = "") -> None:
    """Refuse a dataclass with a number that is not finite, or that is not in its field's range (None is none)."""
    for field in fields(settings):
        given = getattr(settings, field.name)
        for value in given if isinstance(given, tuple) else (given,):
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if refusal := ranges.get(field.name, ANY).refusal(value):
                raise OutOfRange(owner + field.name, value, refusal)
