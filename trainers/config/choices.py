"""What a setting may be, declared where it stands: named choices, and ranges of numbers.

    @dataclass(frozen=True, kw_only=True)
    class Mine(Settings):
        lam: Share = 1.0                                       # Share = Annotated[float, Range(0, 1)]
        every: Annotated[int, Range(1, 20)] = 5

Importable without torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Literal, get_args, get_type_hints

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "unit-mean"]
Estimator = Literal["k1", "k2", "k3"]
Importance = Literal["off", "truncate", "mask", "sequence-truncate", "sequence-mask"]


@dataclass(frozen=True, slots=True)
class Range:
    """Range of the numbers that a setting may have."""

    low: float = 0.0
    high: float = math.inf
    above: bool = False
    """Flag: `low` itself is excluded."""
    below: bool = False
    """Flag: `high` itself is excluded."""

    def refusal(self, x: float) -> str:
        """Return what is wrong with a number, or an empty text if it fits."""
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
Share = Annotated[float, Range(0.0, 1.0)]
Positive = Annotated[float, Range(0.0, above=True)]
Amount = Annotated[float, Range()]
"""Number that is 0 or more."""
AboveOne = Annotated[float, Range(1.0, above=True)]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range()]
"""Whole number that is 0 or more."""


class OutOfRange(ValueError):
    """Raised when a setting has a number outside its range. The message names the setting."""

    def __init__(self, name: str, value: float, refusal: str) -> None:
        self.name, self.value, self.refusal = name, value, refusal
        super().__init__(f"{name} is {value}: it must {refusal}")


class Settings:
    """Base of settings: a dataclass whose numbers must be in the ranges declared at its fields."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_ranges(self)


@cache
def ranges_of(kind: Hashable) -> dict[str, Range]:
    """Return the ranges that the fields of a dataclass declare, those of its bases included."""
    ranges: dict[str, Range] = {}
    for base in reversed(getattr(kind, "__mro__", ())):
        for name, hint in hints_of(base, extras=True).items():
            if found := _range(hint):
                ranges[name] = found
    return ranges


def hints_of(kind: type, extras: bool = False) -> dict[str, object]:
    """Return the annotations of a dataclass, or none if they cannot be read (a name that only type checkers import)."""
    try:
        return get_type_hints(kind, include_extras=extras)
    except NameError:
        return {}


def _range(hint: object) -> Range | None:
    """Return the range in an annotation, also inside `… | None` and `tuple[…]`."""
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        found = part if isinstance(part, Range) else _range(part)
        if found is not None:
            return found
    return None


def check_ranges(settings: object, owner: str = "") -> None:
    """Refuse a dataclass with a number that is not finite, or not in its field's range. None is allowed."""
    kind: type = type(settings)
    ranges = ranges_of(kind)
    for field in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if refusal := ranges.get(field.name, ANY).refusal(number):
                raise OutOfRange(owner + field.name, number, refusal)
