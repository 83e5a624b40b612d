"""Generator of the page `docs/settings.md`: every setting of a run, with its range, default and documentation.

    python -m unitymas.benchmarks.pages.environment_pages docs

Everything is read from the source of the config's dataclasses, in which the documentation follows each field.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from ...agents.model_settings import ModelSettings
from ...trainers.algorithms import ALGORITHMS, find_algorithm
from ...trainers.algorithms.algorithm import Algorithm, GroupRelative, PolicyGradient
from ...trainers.config import group_settings, schema
from ...trainers.config.choices import Range, Settings, hints_of, ranges_of
from ...trainers.controller.counterfactual import Counterfactual

SECTIONS: tuple[tuple[str, str, type], ...] = (
    ("Run", "", schema.RunConfig),
    ("Environment", "env.", schema.EnvConfig),
    ("Groups", "groups.NAME.", schema.GroupConfig),
    ("Policies", "policies.NAME.", schema.PolicyConfig),
    ("Learning", "policies.NAME.learning.", group_settings.Learning),
    ("Sampling", "policies.NAME.sampling.", group_settings.Sampling),
    ("Adapters", "policies.NAME.adapter.", group_settings.Adapter),
    ("Validation", "eval.", schema.EvalConfig),
    ("Logs", "log.", schema.LogConfig),
    ("Ray", "ray.", schema.RayConfig),
    ("Fixed players", "players.", ModelSettings),
    ("Counterfactual credit", "counterfactual.ROLE.", Counterfactual),
    ("All algorithms", "policies.NAME.algorithm.", Algorithm),
    ("Algorithms with a clipped loss", "policies.NAME.algorithm.", PolicyGradient),
    ("Algorithms that compare within groups", "policies.NAME.algorithm.", GroupRelative),
)
INTRODUCTION = """\
# Settings of a run

This page lists every key of the config of `unitymas train`. `make docs` writes it from the dataclasses that read the config.
**Not run:** the settings that need GPUs or several hosts ([scale](scale.md), [cluster](cluster.md)).

Set a key on the command line (`steps=40`, `policies.team.learning.lr=1e-5`) or in a YAML file (`--config FILE`). Replace `NAME` by the
name of a policy or a group, or by `*` for all of them: `'groups.*.model=tiny'`. Presets change defaults ([presets](presets.md)).
`unitymas train ID --dry-run` prints the values that a run would have.
"""
WORDS: Mapping[object, str] = {str: "text", bool: "true or false"}


def settings_page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for title, prefix, kind in SECTIONS:
        parts += [f"## {title}\n", *_table(prefix, kind)]
    shown = {kind for _, _, kind in SECTIONS}
    owners: dict[type, list[str]] = {}
    for name in ALGORITHMS:
        for kind in find_algorithm(name).__mro__:
            if issubclass(kind, Algorithm) and kind not in shown:
                owners.setdefault(kind, []).append(f"`{name}`")
    for kind, names in owners.items():
        if table := list(_table("policies.NAME.algorithm.", kind)):
            parts += [f"## Algorithm {', '.join(names)}\n", *table]
    return "\n".join(parts)


def _table(prefix: str, kind: type) -> Iterator[str]:
    """Yield the lines of a table of a dataclass's own fields."""
    rows = list(_fields(kind))
    if rows:
        yield f"Keys begin with `{prefix}`.\n" if prefix else ""
        yield "| key | fits | default | what it is |\n|---|---|---|---|"
        yield from (f"| `{name}` | {fits} | {default} | {words} |" for name, fits, default, words in rows)
        yield ""


def _fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, allowed values, default and documentation of each field."""
    hints, ranges = hints_of(kind), ranges_of(kind)
    [body] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for node, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        if ast.unparse(node.annotation).startswith("ClassVar"):
            continue
        inherited = any(name in vars(base).get("__annotations__", {}) for base in kind.__mro__[1:])
        words = "As above, with another default." if inherited else ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            words = inspect.cleandoc(str(following.value.value)).replace("\n", " ").replace("|", "\\|")
            words = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", words)
        yield name, _fits(hints[name], ranges.get(name)), _default(node.value), words


def _fits(hint: object, range: Range | None) -> str:
    """Describe the allowed values of a type."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" if value else "empty" for value in parts)
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(words for part in parts if (words := _fits(part, range)))
    if hint is NoneType:
        return "`null`"
    if hint in (int, float):
        number = "integer" if hint is int else "number"
        return f"{number}, {_reach(range)}" if range else number
    if get_origin(hint) is tuple:
        return "list"
    if get_origin(hint) in (dict, Mapping):
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "mapping"
    return WORDS.get(hint, "")


def _reach(range: Range) -> str:
    """Describe the numbers of a range."""
    low = "above" if range.above else "at least"
    high = "below" if range.below else "at most"
    return f"{low} {range.low:g}" + (f", {high} {range.high:g}" if math.isfinite(range.high) else "")


def _default(value: ast.expr | None) -> str:
    """Return a default as YAML writes it."""
    match value:
        case None:
            return ""
        case ast.Constant(value=None):
            return "`null`"
        case ast.Constant(value=bool() as flag):
            return f"`{str(flag).lower()}`"
        case ast.Constant(value=""):
            return "empty"
        case ast.Constant(value=str() | int() | float() as constant):
            return f"`{constant}`"
        case ast.Tuple(elts=[]):
            return "empty"
        case ast.Call(keywords=[ast.keyword(value=ast.Lambda(body=ast.Dict(keys=[key], values=[made])))]):
            inner = ast.literal_eval(made) if isinstance(made, ast.Constant) else "{}"
            return f"`{{{ast.unparse(key or ast.Constant('')).replace(chr(39), chr(34))}: {inner}}}`"
        case ast.Call(func=ast.Name(id="field")):
            return "empty"
        case ast.Call():
            return "its own defaults"
        case _:
            return f"`{ast.unparse(value)}`"
