"""Reading settings: a YAML file, `a.b=c` overrides or plain mappings into checked dataclasses, and back to YAML.

An unknown key is an error that names the nearest one; so is a value that does not fit, with its path. What is written is
read as it is meant for the field that it is for: `1e-5` is a number, and `off` a choice, a switch or nothing.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import yaml

from ...agents.basics.hints import nearest
from ...agents.basics.json_types import JsonObject
from ...agents.basics.unique_keys import UniqueKeys
from .choices import OutOfRange, Settings, check_ranges, hints_of

T = TypeVar("T")
ConfigTree: TypeAlias = JsonObject
"""Settings as YAML has them: section -> key -> value. `build` checks them."""
FREE = (object, Any)
"""Annotations whose values are passed on unchanged."""
GIVEN = "given from Python: "
"""Text that config.yaml has in place of an object that cannot be written."""


class ConfigError(ValueError):
    """Raised for an invalid config. The message gives the path of the key, and valid values."""


# text to trees -------------------------------------------------------------------------------------------


class Switch(str):
    """Unquoted `on`, `off`, `yes` or `no` in YAML. Its meaning depends on the field."""


class _Loader(UniqueKeys, yaml.SafeLoader):
    """Loader of YAML's plain data with the scalars of YAML 1.2: `1e-5` is a number, and a date or `1:30` is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text that YAML 1.1 or our reader would read as another type, such as `1e5`."""

    yaml_implicit_resolvers = {
        first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


INTEGER = r"[-+]?(?:0|[1-9][0-9_]*)"
FLOAT = r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
NUMBER = re.compile(f"{INTEGER}|{FLOAT}")
SWITCHES = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", INTEGER, list("-+0123456789")),
    ("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
    ("!switch", r"(?i:on|off|yes|no)", list("oOyYnN")),
):  # fmt: skip
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor("!switch", lambda loader, node: Switch(node.value))


def parse_yaml(text: str) -> object:
    """Return the data of a YAML text. Raise `yaml.YAMLError` if it is invalid."""
    data: object = yaml.load(text, _Loader)
    return data


def read_yaml(path: str | Path) -> ConfigTree:
    """Read a YAML file as a tree."""
    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {path}: not UTF-8 at byte {error.start}; is it a YAML file?"
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config file {path}{where}: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"config file {path}: expected keys and values, got {type(tree).__name__}")
    return tree or {}


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> ConfigTree:
    """Return `base` with the values of `over`, key by key."""
    merged: ConfigTree = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def override(tree: Mapping[str, object], assignments: list[str]) -> ConfigTree:
    """Return a tree with `a.b=c` assignments. Values are read as YAML (`1e-4` is a number, `true` a flag)."""
    merged: ConfigTree = dict(tree)
    for text in assignments:
        key, equals, raw = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{text!r}: overrides look like a.b=c")
        try:
            # "openai:" is an unfinished name, though YAML reads a mapping
            value = raw if raw.rstrip().endswith(":") or not raw else parse_yaml(raw)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{key}: {raw!r} is no YAML value ({getattr(error, 'problem', error)}); put text in quotes"
            ) from error
        for name in reversed(key.split(".")):
            value = {name: value}
        assert isinstance(value, dict)
        merged = merge(merged, value)
    return merged


# trees to settings ---------------------------------------------------------------------------------------


def build(kind: type[T], tree: object, path: str = "") -> T:
    """Make a dataclass from a mapping, and check it key by key."""
    if isinstance(tree, kind):
        return tree
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'config'}: expected keys of {kind.__name__}, got {tree!r:.60}")
    hints = {f.name: hints_of(kind).get(f.name, object) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(f"{where}: unknown key; {_where_else(str(key), hints)}")
        values[key] = read(hints[key], value, where)
    try:
        make: Callable[..., T] = kind
        settings = make(**values)
        check_ranges(settings)
    except OutOfRange as error:
        key = error.name.rpartition(".")[2]
        where = f"{path}.{key}" if path else key
        raise ConfigError(f"{where}: must {error.refusal}, got {error.value}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error
    return settings


def _where_else(key: str, hints: Mapping[str, object]) -> str:
    """Return the key that was probably meant: the same name in a section below, or a similar name."""
    for name, hint in hints.items():
        below = get_args(hint)[1] if get_origin(hint) is dict else hint
        if dataclasses.is_dataclass(below) and key in {f.name for f in dataclasses.fields(below)}:
            return f"did you mean {name}{'.*' if below is not hint else ''}.{key}?"
    return nearest(key, sorted(hints), "its keys are")


def read(hint: object, value: object, where: str) -> object:
    """Check a value against a type hint, and return it as that type."""
    value = as_meant(value, hint)
    origin, args = get_origin(hint), get_args(hint)
    if hint in FREE:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _one_of([option for option in args if option is not type(None)], value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, args))}")
        return value
    if dataclasses.is_dataclass(hint):
        return build(hint, {} if value is None else value, where)  # type: ignore[arg-type]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected keys and values, got {value!r:.60}")
        return {str(k): read(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {value!r:.60}")
        kinds = args if args[-1] is not Ellipsis else (args[0],) * len(value)
        if len(kinds) != len(value):
            raise ConfigError(f"{where}: expected {len(kinds)} values, got {value!r:.60}")
        return tuple(read(k, v, where) for k, v in zip(kinds, value, strict=True))
    plain = origin or hint
    if not isinstance(plain, type):
        return value
    if not isinstance(value, plain) or (plain is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where}: expected {plain.__name__}, got {value!r:.60}")
    return value


def _one_of(options: list[object], value: object, where: str) -> object:
    errors = []
    for option in options:
        try:
            return read(option, value, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[-1]


def as_meant(value: object, hint: object) -> object:
    """Convert a value to the type of its field. A value that does not fit is returned unchanged."""
    if hint in FREE:
        return _switched(value)
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}
    if isinstance(value, bool | str):
        return _word(value, kinds)
    if isinstance(value, numbers.Real) and float in kinds:
        return float(value)
    if isinstance(value, numbers.Real) and int in kinds and float(value).is_integer():
        return int(float(value))
    return str(value) if isinstance(value, PurePath) and str in kinds else value


def _word(value: bool | str, kinds: set[object]) -> object:
    """Convert a word or a switch to one of these types: a choice, true or false, None, or a number."""
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    if (isinstance(value, str) and value in choices) or str in kinds:
        return str(value) if isinstance(value, Switch) else value
    switch = value if isinstance(value, bool) else SWITCHES.get(value.lower())
    if switch is not None and bool in kinds:
        return switch
    if switch is not None and (name := "on" if switch else "off") in choices:
        return name
    if switch is False and type(None) in kinds:
        return None
    if isinstance(value, str) and kinds & {int, float} and NUMBER.fullmatch(value):
        number = float(value)
        return number if float in kinds or not number.is_integer() else int(number)
    return value


def _switched(value: object) -> object:
    """Convert switches to true and false, in plain data for other code."""
    if type(value) is dict:
        return {k: _switched(v) for k, v in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_switched(v) for v in value)
    return SWITCHES[value.lower()] if isinstance(value, Switch) else value


# settings to text ----------------------------------------------------------------------------------------


def to_dict(settings: Settings | Mapping[str, object]) -> ConfigTree:
    """Return the tree as plain mappings. Objects that were given from Python stay objects."""
    if isinstance(settings, Settings):
        return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    return {key: _plain(value) for key, value in settings.items()}


def _plain(value: object) -> object:
    if isinstance(value, Settings):
        return to_dict(value)
    return {k: _plain(v) for k, v in value.items()} if type(value) is dict else value


def written(tree: Mapping[str, object]) -> ConfigTree:
    """Return a tree that YAML can hold. An object becomes a note that it was given from Python."""
    return {str(key): _written(value) for key, value in tree.items()}


def _written(value: object) -> object:
    if isinstance(value, Mapping):
        return written(value)
    if isinstance(value, list | tuple):
        return [_written(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    kind = getattr(value, "__qualname__", None) or type(value).__qualname__
    name = getattr(value, "name", "")
    return f"{GIVEN}{kind}" + (f" {name}" if isinstance(name, str) and name else "")


def dump(settings: Settings | Mapping[str, object]) -> str:
    """Return the tree as YAML. Reading it gives the same settings."""
    tree = written(to_dict(settings))
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def leaves(tree: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Return every value of a tree under its full key. Empty values are left out."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        elif value not in ({}, None):
            yield f"{path}{key}", value
