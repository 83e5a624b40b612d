"""Descriptions of tools for a model: name, description and JSON schema, read from the tool's signature.

    about(tool, "retrieve") == [{"name": "retrieve", "description": "…", "parameters": {"type": "object", …}}]

`misfit(parameters, arguments)` describes what is wrong with the arguments of a call, in words for the model.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from ...agents.basics.hints import nearest
from ...agents.basics.json_types import JsonView
from .tool import About, Tool

_TYPES: dict[object, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array",
    set: "array", Sequence: "array", dict: "object", Mapping: "object",
}  # fmt: skip
_FITS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list, tuple), "object": (Mapping,), "null": (type(None),),
}  # fmt: skip


def about(tool: Tool, name: str) -> list[About]:
    """Describe a tool for a model, under this name. A tool that stands for several (MCP) has several descriptions."""
    if callable(tool.about):
        return list(tool.about(name.partition(":")[2]))
    return [{"name": name, **tool.about} if tool.about else from_signature(tool, name)]


def from_signature(tool: Tool, name: str) -> About:
    """Return a tool's schema from its function: types from annotations, optional arguments from defaults, description from
    the first paragraph of the docstring.
    """
    if tool.kind == "session":
        raise TypeError(
            f"tool {name!r} opens sessions, whose calls have no signature; give Tool(…, about={{…}})"
        )
    fn = tool.fn if inspect.isroutine(tool.fn) else type(tool.fn).__call__
    hints = _hints(fn)
    properties: dict[str, JsonView] = {}
    required: list[str] = []
    open_ended = False
    for parameter in inspect.signature(tool.fn).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        if (
            parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            or parameter.name.startswith("_")
            or (tool.task and parameter.name == "task")
        ):
            continue
        properties[parameter.name] = _schema(hints.get(parameter.name, Any))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    told = inspect.getdoc(tool.fn if inspect.isroutine(tool.fn) else type(tool.fn)) or ""
    return {
        "name": name,
        "description": told.partition("\n\n")[0].replace("\n", " "),
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": open_ended,
        },
    }


def without(told: About, fixed: Mapping[str, object]) -> About:
    """Return a description without the arguments `fixed`, which the model may not choose."""
    parameters = dict(told["parameters"])
    parameters["properties"] = {k: v for k, v in parameters.get("properties", {}).items() if k not in fixed}
    parameters["required"] = [name for name in parameters.get("required", ()) if name not in fixed]
    return {**told, "parameters": parameters}


def misfit(parameters: JsonView, arguments: Mapping[str, object]) -> str:
    """Describe what is wrong with the arguments of a call. Empty: they are right."""
    properties = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if parameters.get("additionalProperties", True):
                continue
            return f"there is no argument {name!r}; {nearest(name, properties, 'it takes')}"
        wrong = _wrong(properties[name], value)
        if wrong:
            return f"the argument {name!r} must be {wrong}"
    return ""


def _wrong(schema: JsonView, value: object) -> str:
    options = schema.get("enum")
    if options is not None:
        return "" if value in options else f"one of {', '.join(map(repr, options))}"
    kind_or_kinds = schema.get("type", ())
    kinds = (kind_or_kinds,) if isinstance(kind_or_kinds, str) else tuple(kind_or_kinds)
    fits = not kinds or any(
        isinstance(value, _FITS.get(kind, (object,))) and (kind == "boolean" or not isinstance(value, bool))
        for kind in kinds
    )
    return "" if fits else f"of type {' or '.join(kinds)}"


def _hints(fn: object) -> dict[str, object]:
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):  # annotations that only a type checker can read
        return {}


def _schema(hint: object) -> JsonView:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema(option).get("type") for option in inner if option is not type(None)]
        nullable = ["null"] if type(None) in inner else []
        return {"type": [*kinds, *nullable]} if all(isinstance(kind, str) for kind in kinds) else {}
    json_kind = _TYPES.get(origin or hint)
    if json_kind == "array" and inner and inner[0] is not Any:
        return {"type": "array", "items": _schema(inner[0])}
    return {"type": json_kind} if json_kind else {}
