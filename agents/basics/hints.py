"""Parts of messages that every room shares: the nearest name, a number with its noun, a value's kind."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Literal, Union, get_args, get_origin


def nearest(
    name: str,
    known: Iterable[str],
    otherwise: str = "choose one of",
    *,
    most: int = 1,
    alike: float = 0.5,
    instead: str | None = None,
) -> str:
    """Name the known value that was probably meant, or the `most` likely ones.

    If none is near, list all after the words `otherwise`, or return `instead`.
    """
    known = list(known)
    near = get_close_matches(name, known, most, alike) or _in_small_letters(name, known, most, alike)
    if near:
        return f"did you mean {repr(near[0]) if most == 1 else ', '.join(near)}?"
    return f"{otherwise} {', '.join(known) or 'none'}" if instead is None else instead


def _in_small_letters(name: str, known: list[str], most: int, alike: float) -> list[str]:
    """Return the known values that are near if capitals do not count: `TINY` is near `tiny`."""
    spelt = {value.lower(): value for value in reversed(known)}
    return [spelt[value] for value in get_close_matches(name.lower(), spelt, most, alike)]


@cache
def say_once(line: str) -> None:
    """Print a line on stderr the first time it is needed."""
    print(f"unitymas: {line}", file=sys.stderr)


def counted(number: int | float, noun: str, plural: str = "", *, form: str = ",") -> str:
    """Write a number with its noun, in the singular where it is one: ``1 role``, ``2 roles``, ``1,200
    tokens``.
    """
    return f"{number:{form}} {noun if number == 1 else plural or noun + 's'}"


def fits(value: object, kind: object) -> bool:
    """Tell whether a value is of an annotated kind. A kind without a plain class behind it fits any value."""
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    plain = origin or kind
    return isinstance(value, plain) if isinstance(plain, type) else True


def described(kind: object) -> str:
    """Describe an annotated kind in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(described(option) for option in get_args(kind))
    return "null" if kind is type(None) else str(getattr(kind, "__name__", kind))
