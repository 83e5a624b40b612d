"""Checkers of a program's output, which compare it with the expected output outside of the sandbox.

Integers must be equal, with any tolerance. If the expected number has a fraction, the output may differ by `tolerance`,
absolutely or relatively. The amount of whitespace between words does not matter, but line ends do.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import zip_longest
from typing import Any, TypeAlias

Checker = Callable[[Any, Any, Any], bool]
"""Function of (output, expected output, input) that tells whether the output is right.

It gets texts for programs that use stdin, and JSON values for function calls.
"""

Number: TypeAlias = "int | float | Decimal | Fraction"

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_LINE, _TOKEN = re.compile(r"\S[^\n]*"), re.compile(r"\S+")
_LONG = 1 << 16  # characters that are split into lines at a time
_LONGEST_NUMBER = 400  # characters; longer numbers are equal only if their texts are


def same_text(got: str, expected: str, tolerance: float) -> bool:
    """Compare two texts line by line and token by token, without blank lines. Stop at the first difference."""
    return all(
        a is not None and b is not None and _same_line(a, b, tolerance)
        for a, b in zip_longest(_lines(got), _lines(expected))
    )


def same_tokens_in_any_order(got: str, expected: str) -> bool:
    """Compare the words of two texts, in any order."""
    missing = Counter(expected.split())
    for token in _tokens(got):
        if not missing[token]:
            return False
        missing[token] -= 1
    return not +missing


def same_bytes(got: str, expected: str) -> bool:
    """Compare two texts exactly, except for one newline at the end."""
    return got.removesuffix("\n") == expected.removesuffix("\n")


def same_value(got: object, expected: object, tolerance: float) -> bool:
    """Tell whether two values are equal in the sense of the published data sets.

    The rule is Python's equality (True equals 1, 2.0 equals 2) with these changes: floats have a tolerance, and NaN equals
    NaN. JSON has only lists and text keys, so a tuple or a set in its order equals an expected list, and a key equals its
    text in JSON.
    """
    pairs = [(got, expected)]
    while pairs:  # no recursion, because a returned value may be nested deeper than the recursion limit
        ours, theirs = pairs.pop()
        if isinstance(theirs, Mapping):
            inner = _by_key(ours, theirs)
        elif isinstance(theirs, (list, tuple)):
            inner = _by_place(ours, theirs)
        elif isinstance(theirs, (set, frozenset)):
            same = isinstance(ours, (set, frozenset)) and same_items_in_any_order(list(ours), list(theirs))
            inner = [] if same else None
        else:
            inner = [] if _same_scalar(ours, theirs, tolerance) else None
        if inner is None:
            return False
        pairs += inner
    return True


def _by_key(got: object, expected: Mapping[object, object]) -> list[tuple[object, object]] | None:
    if not isinstance(got, dict) or len(got) != len(expected):
        return None
    spelled = {_spelled(key): value for key, value in got.items() if not isinstance(key, str)}
    pairs = []
    for key, value in expected.items():
        if key in got:
            pairs.append((got[key], value))
        elif key in spelled:
            pairs.append((spelled[key], value))
        else:
            return None
    return pairs


def _spelled(key: object) -> object:
    """Return a key as JSON writes it."""
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key


def _by_place(got: object, expected: Sequence[object]) -> list[tuple[object, object]] | None:
    if isinstance(got, (set, frozenset)):
        try:
            got = sorted(got)
        except TypeError:
            return [] if same_items_in_any_order(list(got), expected) else None
    if not isinstance(got, (list, tuple)) or len(got) != len(expected):
        return None
    return list(zip(got, expected, strict=True))


def _same_scalar(got: object, expected: object, tolerance: float) -> bool:
    if isinstance(expected, float) and isinstance(got, (int, float, Decimal, Fraction)):
        if got != got or expected != expected:
            return got != got and expected != expected
        return _close(got, expected, tolerance)
    return bool(got == expected) or (got != got and expected != expected)


def same_items_in_any_order(got: object, expected: object, tolerance: float = 0.0) -> bool:
    """Compare two lists as multisets, at the top level. Compare other values as they are."""
    if not isinstance(got, _LISTS) or not isinstance(expected, (list, tuple)):
        return same_value(got, expected, tolerance)
    if Counter(map(_canonical, got)) == Counter(map(_canonical, expected)):
        return True
    numbers = len(got) == len(expected) and all(isinstance(n, (int, float)) for n in (*got, *expected))
    return numbers and same_value(sorted(got), sorted(expected), tolerance)


_LISTS = (list, tuple, set, frozenset)


def _canonical(value: object) -> Hashable:
    """Return a hashable value that is equal for equal values: 2.0 for 2, tuples for lists."""
    if isinstance(value, (list, tuple)):
        return ("list", *map(_canonical, value))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(_canonical, value)))
    if isinstance(value, Mapping):
        return ("dict", frozenset((_spelled(key), _canonical(item)) for key, item in value.items()))
    if isinstance(value, bytearray):
        return bytes(value)
    return value if value == value else "not a number"


def _lines(text: str) -> Iterator[str]:
    """Yield the lines that are not blank, one at a time, because a hostile output has millions."""
    return (match.group() for match in _LINE.finditer(text))


def _tokens(text: str) -> Iterator[str]:
    return iter(text.split()) if len(text) < _LONG else (match.group() for match in _TOKEN.finditer(text))


def _same_line(got: str, expected: str, tolerance: float) -> bool:
    return got == expected or all(
        a is not None and b is not None and _same_token(a, b, tolerance)
        for a, b in zip_longest(_tokens(got), _tokens(expected))
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
    """Return an integer's normal form, of any length: without plus, leading zeros or -0."""
    digits = integer.lstrip("+-").lstrip("0")
    return "-" + digits if integer[0] == "-" and digits else digits


def _number(token: str) -> Decimal | None:
    """Return a token as a finite decimal number, or None. `_` and non-ASCII digits, which Python accepts, make it text."""
    if len(token) > _LONGEST_NUMBER or "_" in token or not token.isascii():
        return None
    try:
        number = Decimal(token)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _close(got: Number, expected: float, tolerance: float) -> bool:
    if got == expected:
        return True
    try:
        got = float(got)
        finite = math.isfinite(got) and math.isfinite(expected)
        return finite and abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer larger than every float
        return False
