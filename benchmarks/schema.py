"""The part of JSON Schema that our published schemas use, so that checking a submission needs no extra
package.

``type, const, enum, pattern, required, properties, additionalProperties, items, $ref`` into ``$defs``; an
unknown keyword is an error in the schema, not silence. The tests hold it against the reference
implementation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, Any] = {
    "object": Mapping,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {"$schema", "$defs", "$ref", "title", "type", "const", "enum", "pattern", "required", "properties",
          "additionalProperties", "items"}  # fmt: skip


def violations(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None, at: str = ""
) -> Iterator[str]:
    """Each way in which a value breaks the schema, with its place."""
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
        yield f"{where} must be {types}, got {type(value).__name__}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} must be {schema['const']!r}, got {value!r:.60}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} must be one of {schema['enum']}, got {value!r:.60}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{where} must match {schema['pattern']}, got {value!r:.60}"
    if isinstance(value, Mapping):
        yield from _inside(value, schema, root, at)
    elif isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from violations(item, schema["items"], root, f"{at}[{i}]")


def _inside(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at or 'the whole'} lacks {name!r}"
    listed = schema.get("properties", {})
    for name, item in value.items():
        rule = listed.get(name, schema.get("additionalProperties"))
        if rule is not None:
            yield from violations(item, rule, root, f"{at}.{name}" if at else str(name))


def _is(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (
            whole if name == "integer" else isinstance(value, (int, float))
        )
    return isinstance(value, _TYPES[name])
