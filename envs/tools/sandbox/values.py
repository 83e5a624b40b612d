"""Python values as JSON text: arguments that enter the sandbox, and return values that leave it.

JSON has no sets, tuples, bytes, fractions or keys other than text, and its readers are recursive. Here a value is one flat
list of tokens, with a container before its items: `(1, {2})` is `[["tuple", 2], 1, ["set", 1], 2]`. So no side recurses,
for any value that a program returns. This module runs inside the room and outside of it.
"""

from __future__ import annotations

import json
from typing import Any

_DEEPEST = 5000
_SAFE = 1 << 63  # larger integers are written in base 16, which has no limit on digits
_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
_LONGEST_FRACTION = 20_000  # digits; the reduction of a fraction takes quadratic time
_SAME_HASH = 100  # more keys than this with the same hash mean an attack


def encode(value: object) -> str:
    """Write a value of built-in types, of the standard library's numbers, of numpy, or an iterable (as a list)."""
    tokens: list[object] = []
    waiting = [(value, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ValueError(f"the value nests deeper than {_DEEPEST}")
        if hasattr(value, "tolist"):  # numpy's arrays and scalars
            value = value.tolist()
        token = _scalar(value)
        if token is None and value is not None:
            kind, items = _items(value)
            token = [kind, len(items) // (2 if kind == "dict" else 1)]
            waiting += [(item, depth + 1) for item in reversed(items)]
        tokens.append(token)
    return json.dumps(tokens)


def decode(text: str) -> Any:
    """Return the value that `encode` wrote. For other texts, raise ValueError or TypeError."""
    unfinished: list[tuple[str, int, list[object]]] = []
    for token in json.loads(text):
        if isinstance(token, list) and token[0] in _KINDS:
            unfinished.append((token[0], int(token[1]) * (2 if token[0] == "dict" else 1), []))
        else:
            value = _unscalar(token)
            if not unfinished:
                return value
            unfinished[-1][2].append(value)
        while len(unfinished[-1][2]) >= unfinished[-1][1]:
            kind, _, items = unfinished.pop()
            value = _container(kind, items)
            if not unfinished:
                return value
            unfinished[-1][2].append(value)
    raise ValueError("the value is cut short")


def _scalar(value: Any) -> object:
    """Return the token of a value without items. None has the token None, and so do values with items."""
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        value = int(value)
        return value if -_SAFE < value < _SAFE else ["int", hex(value)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if kind == "fractions.Fraction":
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    return ["Decimal", str(value)] if kind == "decimal.Decimal" else None


def _unscalar(token: object) -> object:
    if not isinstance(token, list):
        return token
    kind, *parts = token
    if kind == "int":
        return int(parts[0], 16)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(parts[0])
    if kind == "complex":
        return complex(*parts)
    if kind == "Fraction":
        from fractions import Fraction

        if max(map(len, parts)) > _LONGEST_FRACTION:
            raise ValueError(f"a fraction of more than {_LONGEST_FRACTION} digits")
        return Fraction(int(parts[0], 16), int(parts[1], 16))
    if kind == "Decimal":
        from decimal import Decimal

        return Decimal(parts[0])
    raise ValueError(f"a value of the unknown kind {kind!r:.40}")


def _items(value: object) -> tuple[str, list[object]]:
    if hasattr(value, "keys") and hasattr(value, "items"):
        return "dict", [part for pair in value.items() for part in pair]
    for kind in ("tuple", "set", "frozenset"):
        if isinstance(value, _KINDS[kind]):
            return kind, list(value)
    if hasattr(value, "__iter__") and not isinstance(value, type):
        return "list", list(value)
    raise TypeError(f"a {type(value).__name__} has no plain form: neither a number, text, nor a collection")


def _container(kind: str, items: list[object]) -> object:
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    keys = items[::2] if kind == "dict" else items
    if len(keys) > _SAME_HASH:
        _refuse_collisions(keys)
    return dict(zip(keys, items[1::2], strict=True)) if kind == "dict" else _KINDS[kind](items)


def _refuse_collisions(keys: list[object]) -> None:
    """Raise an error for keys with many equal hashes, because a table of them takes quadratic time."""
    seen: dict[str, int] = {}  # by text, whose hash an attacker cannot choose
    for key in keys:
        name = str(hash(key))
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > _SAME_HASH:
            raise ValueError(f"more than {_SAME_HASH} keys with one hash")
