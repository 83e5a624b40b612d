"""Checker for the part of JSON Schema that our published schemas use, without another package.

It supports ``type, const, enum, pattern, required, properties, additionalProperties, items, $ref`` into ``$defs``, and bounds
(``minimum, maximum, maxLength, minItems, maxItems, maxProperties``). An unknown keyword is an error. The tests compare it with
the reference implementation. It is stricter in three points: an integer has no decimal point, a number is finite, and the end
of a pattern is the end of the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

from ...agents.basics.json_types import JsonView
from ..pages.html import asset

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": Mapping,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
JsonSchema: TypeAlias = JsonView
"""JSON schema with the keywords of `_KNOWN`."""
_KNOWN = {"$schema", "$defs", "$ref", "title", "type", "const", "enum", "pattern", "required", "properties",
          "additionalProperties", "items", "minimum", "maximum", "maxLength", "minItems", "maxItems", "maxProperties"}  # fmt: skip
_SIZES = (
    ("maxLength", str, "characters"),
    ("maxItems", list, "items"),
    ("maxProperties", Mapping, "entries"),
)


@cache
def schema_of(what: str) -> JsonSchema:
    """Read one of our published schemas: "submission" or "trace"."""
    schema: JsonSchema = json.loads(asset(f"{what}.schema.json"))
    return schema


def violations(value: Any, schema: JsonSchema, root: JsonSchema | None = None, at: str = "") -> Iterator[str]:
    """Yield each violation of the schema, with its place."""
    root = schema if root is None else root
    if unknown := set(schema) - _KNOWN:
        raise ValueError(f"the schema uses {sorted(unknown)}, which this checker does not know")
    if "$ref" in schema:
        yield from violations(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
        return
    where = at or "the whole"
    types = schema.get("type")
    if types is not None and not any(
        _is(value, name) for name in ([types] if isinstance(types, str) else types)
    ):
        yield f"{where} must be {types}, got {_said(value)}"
        return
    yield from _beyond(value, schema, where)
    if "const" in schema and not _alike(value, schema["const"]):
        yield f"{where} must be {schema['const']!r}, got {value!r:.60}"
    if "enum" in schema and not any(_alike(value, one) for one in schema["enum"]):
        yield f"{where} must be one of {schema['enum']}, got {value!r:.60}"
    if "pattern" in schema and isinstance(value, str) and not re.search(_ended(schema["pattern"]), value):
        yield f"{where} must match {schema['pattern']}, got {value!r:.60}"
    if isinstance(value, Mapping):
        yield from _inside(value, schema, root, at)
    elif isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from violations(item, schema["items"], root, f"{at}[{i}]")


def _beyond(value: Any, schema: JsonSchema, where: str) -> Iterator[str]:
    """Yield each bound that a value breaks."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield f"{where} must be at least {schema['minimum']}, got {_said(value)}"
        if value > schema.get("maximum", value):
            yield f"{where} must be at most {schema['maximum']}, got {_said(value)}"
    for name, kind, of in _SIZES:
        if name in schema and isinstance(value, kind) and len(value) > schema[name]:
            yield f"{where} has {len(value):,} {of}; at most {schema[name]:,} are allowed"
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        yield f"{where} has {len(value)} items; at least {schema['minItems']} are wanted"


def _inside(value: JsonView, schema: JsonSchema, root: JsonSchema, at: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at or 'the whole'} lacks {name!r}"
    listed = schema.get("properties", {})
    for name, item in value.items():
        rule = listed.get(name, schema.get("additionalProperties"))
        if rule is False:
            yield f"{at or 'the whole'} has {name!r:.60}, which does not belong there"
        elif rule is not None:
            yield from violations(item, rule, root, f"{at}.{name:.60}" if at else f"{name:.60}")


def _is(value: object, name: str) -> bool:
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return _is(value, "integer") or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, _TYPES[name])


def _alike(value: object, one: object) -> bool:
    """Tell whether two plain values are equal. 1 is not true."""
    return isinstance(value, bool) is isinstance(one, bool) and value == one


def _said(value: object) -> str:
    """Return a short text for a value of the wrong type."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value}" if value.bit_length() < 200 else f"a number of {value.bit_length():,} bits"
    return f"{value!r}" if isinstance(value, (bool, float)) else type(value).__name__


def _ended(pattern: str) -> str:
    """Anchor a pattern at the end of the text, because in Python `$` also matches before a last newline."""
    return f"{pattern[:-1]}\\Z" if pattern.endswith("$") else pattern
