"""Roles, and how their replies are read.

A `Role` is a name, how many of it sit at the table, and a reply format. A format reads text and says
whether it was *legal*: `Reply(text, ok, value)`. Illegal replies carry `value=None` unless the format
declares `otherwise=`, so that a malformed reply can never count as approval by accident.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .frozen import FROZEN, FrozenDict, freeze
from .spoken import Spoken


class Reply(NamedTuple):
    """What a role said, read by its format: the text, whether it was legal, and the value in it."""

    text: str
    ok: bool
    value: Any
    node: str = ""

    def message(self) -> dict[str, str]:
        """The reply as a chat message that remembers its node, so an engine can reuse its very tokens."""
        return {"role": "assistant", "content": Spoken(self.text, self.node)}


_new: Callable[..., Reply] = tuple.__new__  # a named tuple's own constructor costs three times as much


class FormatError(ValueError):
    """Raised by a custom parse function: this text is not what the role was asked for."""


@runtime_checkable
class Format(Protocol):
    """How a role's text is read. `choices` and `stop` are hints an engine may enforce while sampling."""

    @property
    def choices(self) -> tuple[str, ...] | None: ...

    @property
    def stop(self) -> tuple[str, ...]: ...

    def parse(self, text: str, node: str = "") -> Reply: ...

    def describe(self) -> str: ...


class _Base:
    """The two hints, absent by default."""

    __slots__ = ()

    @property
    def choices(self) -> tuple[str, ...] | None:
        return None

    @property
    def stop(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Raw(_Base):
    """Any text that is not blank; the value is the text, stripped."""

    otherwise: Any = None

    def parse(self, text: str, node: str = "") -> Reply:
        stripped = text.strip()
        return Reply(text, True, stripped, node) if stripped else Reply(text, False, self.otherwise, node)

    def describe(self) -> str:
        return "any text"


@dataclass(frozen=True, init=False)
class Tags(_Base):
    """Each tag exactly once, in order, not empty, nothing outside: `<answer>Paris</answer>`.

    One tag gives its content as value; several give a dict by tag. `enums` restricts a tag's content
    (compared case-folded). Tag names are matched without regard to case and told in lower case.
    """

    names: tuple[str, ...]
    enums: Mapping[str, tuple[str, ...]]
    otherwise: Any
    _whole: re.Pattern[str] = field(repr=False, compare=False)

    def __init__(self, *names: str, otherwise: Any = None, **enums: tuple[str, ...]) -> None:
        if not names:
            raise ValueError("Tags needs at least one tag name, e.g. Tags('answer')")
        unknown = sorted(set(enums) - set(names))
        if unknown:
            raise ValueError(
                f"Tags: values were given for {unknown}, which are not among the tags {list(names)}"
            )
        whole = r"\s*".join(rf"<{re.escape(n)}>(?P<{n}>.*?)</{re.escape(n)}>" for n in names)
        set_ = object.__setattr__
        set_(self, "names", tuple(names))
        set_(self, "enums", freeze({k: tuple(v) for k, v in enums.items()}))
        set_(self, "otherwise", freeze(otherwise))
        set_(self, "_whole", re.compile(rf"\s*{whole}\s*", re.DOTALL | re.IGNORECASE))

    @property
    def stop(self) -> tuple[str, ...]:
        return (f"</{self.names[-1]}>",)

    def parse(self, text: str, node: str = "") -> Reply:
        match = self._whole.fullmatch(text)
        if match is None:
            return Reply(text, False, self.otherwise, node)
        values: dict[str, str] = {}
        for name, value in match.groupdict().items():
            value = value.strip()
            if not value or "<" in value and f"<{name}>" in value.lower():
                return Reply(text, False, self.otherwise, node)
            allowed = self.enums.get(name)
            if allowed is not None:
                if value.casefold() not in allowed:
                    return Reply(text, False, self.otherwise, node)
                value = value.casefold()
            values[name] = value
        value = values[self.names[0]] if len(values) == 1 else freeze(values)
        return _new(Reply, (text, True, value, node))

    def describe(self) -> str:
        return " ".join(
            f"<{n}>{'|'.join(self.enums[n]) if n in self.enums else '…'}</{n}>" for n in self.names
        )


@dataclass(frozen=True)
class Choice(_Base):
    """One of a few words, exactly (case and outer blanks aside): `Choice("approve", "reject")`."""

    options: tuple[str, ...]
    otherwise: Any = None

    def __init__(self, *options: str, otherwise: Any = None) -> None:
        if len(options) < 2 or len(set(map(str.casefold, options))) != len(options):
            raise ValueError(f"Choice needs two or more different options, got {list(options)}")
        object.__setattr__(self, "options", tuple(options))
        object.__setattr__(self, "otherwise", otherwise)

    @property
    def choices(self) -> tuple[str, ...] | None:
        return self.options

    def parse(self, text: str, node: str = "") -> Reply:
        said = text.strip().casefold()
        for option in self.options:
            if said == option.casefold():
                return Reply(text, True, option, node)
        return Reply(text, False, self.otherwise, node)

    def describe(self) -> str:
        return " | ".join(self.options)


@dataclass(frozen=True)
class Json(_Base):
    """The first balanced JSON object in the text; with `key`, the value under it.

    Lists are stripped of blanks and cut to `most`; a missing or empty value is illegal.
    """

    key: str | None = None
    most: int | None = None
    otherwise: Any = None

    def parse(self, text: str, node: str = "") -> Reply:
        found = first_json_object(text)
        if found is None:
            return Reply(text, False, self.otherwise, node)
        value = found if self.key is None else found.get(self.key)
        if isinstance(value, str):
            value = value.strip()
        elif isinstance(value, list):
            kept = (v.strip() if isinstance(v, str) else v for v in value)
            value = [v for v in kept if v is not None and v != ""][: self.most]
        if value is None or value == "" or value == [] or value == {}:
            return Reply(text, False, self.otherwise, node)
        return Reply(text, True, freeze(value), node)

    def describe(self) -> str:
        return "a JSON object" if self.key is None else f'{{"{self.key}": …}}'


@dataclass(frozen=True)
class Boxed(_Base):
    """The last `\\boxed{…}` of the text, braces balanced."""

    otherwise: Any = None

    def parse(self, text: str, node: str = "") -> Reply:
        value = last_boxed(text)
        return Reply(text, True, value, node) if value else Reply(text, False, self.otherwise, node)

    def describe(self) -> str:
        return r"text that ends in \boxed{…}"


@dataclass(frozen=True)
class Custom(_Base):
    """A pure function from text to value; it raises `FormatError` where the text is illegal.

    `FormatError("why", value)` may carry the value to fall back on as its second argument.
    """

    read: Callable[[str], Any]
    says: str = ""
    ends: tuple[str, ...] = ()

    @property
    def stop(self) -> tuple[str, ...]:
        return self.ends

    def parse(self, text: str, node: str = "") -> Reply:
        read = self.read
        try:
            value = read(text)
        except FormatError as error:
            return Reply(text, False, freeze(error.args[1]) if len(error.args) > 1 else None, node)
        return _new(Reply, (text, True, value if type(value) in FROZEN else freeze(value), node))

    def describe(self) -> str:
        return self.says or (self.read.__doc__ or self.read.__name__).strip().splitlines()[0]


def first_json_object(text: str) -> dict[str, Any] | None:
    """The first balanced JSON object anywhere in the text, or None."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    for _ in range(64):  # a hostile reply of a million braces must not cost a million attempts
        if start < 0:
            return None
        try:
            found, _end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and is_shallow(found):
            return found
        start = text.find("{", start + 1)
    return None


def is_shallow(value: Any, most: int = 50) -> bool:
    """Whether plain data nests at most so deep; a hostile reply nests until recursion fails."""
    level = [value]
    for _ in range(most):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [child for values in inner for child in values]
        if not level:
            return True
    return False


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}`, or None where there is none or its braces do not close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 7 : i].strip()
    return None


@dataclass(frozen=True, slots=True)
class Role:
    """A part in a workflow. With `instances > 1` its agents are `name_1 … name_n`."""

    name: str
    instances: int = 1
    reply: Format = Raw()
    system: str = ""
    description: str = ""
    opening: tuple[Mapping[str, str], ...] = field(init=False, repr=False, compare=False)
    """What stands before every prompt of this role: its system message, if it has one."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"role name {self.name!r}: use lower-case letters, digits and '_', a letter first"
            )
        if self.instances < 1:
            raise ValueError(f"role {self.name!r}: instances must be at least 1, got {self.instances}")
        system = (FrozenDict(role="system", content=self.system),) if self.system else ()
        object.__setattr__(self, "opening", system)

    @property
    def agents(self) -> tuple[str, ...]:
        """The agent ids of this role, in order."""
        if self.instances == 1:
            return (self.name,)
        return tuple(f"{self.name}_{i}" for i in range(1, self.instances + 1))
