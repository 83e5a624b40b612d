"""Is this output right? Checkers compare what a program gave with what was expected, outside of the sandbox.

Integers compare exactly, whatever the tolerance. A number expected with a fraction may differ by
`tolerance`, absolutely or relatively. Whitespace separates and otherwise does not matter; line ends do.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Checker = Callable[[Any, Any, Any], bool]
"""(got, expected, input) -> right? Texts for stdin programs, JSON values for function calls."""

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_LONGEST_NUMBER = 400  # characters: beyond them only the same text is the same number


def same_text(got: str, expected: str, tolerance: float) -> bool:
    """Line by line, token by token; blank lines do not count."""
    ours, theirs = _lines(got), _lines(expected)
    return len(ours) == len(theirs) and all(
        _same_line(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def same_tokens_in_any_order(got: str, expected: str) -> bool:
    return Counter(got.split()) == Counter(expected.split())


def same_bytes(got: str, expected: str) -> bool:
    """To the letter, but for one newline at the end."""
    return got.removesuffix("\n") == expected.removesuffix("\n")


def same_value(got: Any, expected: Any, tolerance: float) -> bool:
    """Equality as the tests of published data sets mean it: Python's (true is 1, 2.0 is 2), floats by tolerance."""
    if isinstance(expected, dict):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            return False
        return all(same_value(got[key], value, tolerance) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, list) or len(got) != len(expected):
            return False
        return all(same_value(a, b, tolerance) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return _close(got, expected, tolerance)
    return bool(got == expected)


def same_items_in_any_order(got: Any, expected: Any) -> bool:
    """Lists as multisets at the top level; anything else as it is."""
    if not isinstance(got, list) or not isinstance(expected, (list, tuple)):
        return same_value(got, expected, 0.0)
    return Counter(map(_canonical, got)) == Counter(map(_canonical, expected))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _lines(text: str) -> list[list[str]]:
    return [tokens for tokens in map(str.split, text.split("\n")) if tokens]


def _same_line(got: list[str], expected: list[str], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        _same_token(a, b, tolerance) for a, b in zip(got, expected, strict=True)
    )


def _same_token(got: str, expected: str, tolerance: float) -> bool:
    if got == expected:
        return True
    if expected.lower() in ("yes", "no"):
        return got.lower() == expected.lower()
    if _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(got):
        return _digits(got) == _digits(expected)
    ours, theirs = _number(got), _number(expected)
    if ours is None or theirs is None:
        return False
    if _INTEGER.fullmatch(expected):
        return ours == theirs
    return _close(float(ours), float(theirs), tolerance)


def _digits(integer: str) -> str:
    """An integer's one spelling, of any length: no plus, no leading zeros, no -0."""
    digits = integer.lstrip("+-").lstrip("0")
    return "-" + digits if integer[0] == "-" and digits else digits


def _number(token: str) -> Decimal | None:
    """A finite decimal number, else None. `_` and non-ASCII digits, which Python would take, are text."""
    if len(token) > _LONGEST_NUMBER or "_" in token or not token.isascii():
        return None
    try:
        number = Decimal(token)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _close(got: float, expected: float, tolerance: float) -> bool:
    if got == expected:
        return True
    try:
        finite = math.isfinite(got) and math.isfinite(expected)
        return finite and abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer beyond all floats
        return False
