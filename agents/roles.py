"""Roles, and the formats of their replies.

A `Role` is a name, a number of instances, and a reply format. A format reads a text and says whether it is *legal*:
`Reply(text, ok, value)`. An illegal reply has `value=None` unless the format declares `otherwise=`. So a malformed
reply can never count as approval by accident.

Two rules hold for every format. First, thinking is removed before a format reads (`reading.split_thinking`): it stays
in `Reply.thinking`, and other roles never see it. Second, `Role.lenient` says what may stand around the part that a
format reads, for all formats alike:

    None   as the format says: nothing around tags and choices, anything around JSON, boxes and plans
    True   a preamble, words after it, and code fences are overlooked
    False  nothing but blanks, JSON and plans included
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from .basics.frozen import FROZEN, FrozenDict, freeze
from .text.attributed_text import Spoken
from .text.reply_readers import (
    MAX_REPLY,
    between,
    first_json_object,
    is_shallow,
    json_object,
    last_boxed,
    split_thinking,
    tag_pattern,
)
from .text.role_prompt import Wording

T = TypeVar("T")

__all__ = [
    "MAX_REPLY", "Boxed", "Choice", "Custom", "Format", "FormatError", "Json", "Raw", "Reply", "Role", "Tags",
    "first_json_object", "is_shallow", "last_boxed", "read_reply",
]  # fmt: skip


class Reply(NamedTuple):
    """A role's reply, read by its format: the text, whether it was legal, and the value in it."""

    text: str
    """Text that other roles may see: the reply without its thinking."""
    ok: bool
    value: Any
    node: str = ""
    thinking: str = ""
    """Thinking before the text, tags included."""

    @property
    def said(self) -> str:
        """Whole reply, as it was sampled."""
        return self.thinking + self.text

    def message(self) -> dict[str, str]:
        """Return the reply as the role's own chat message. It remembers its node, so an engine can reuse its
        exact tokens.
        """
        return {"role": "assistant", "content": Spoken(self.said, self.node)}


_new: Callable[..., Reply] = tuple.__new__  # a named tuple's own constructor costs three times as much


class FormatError(ValueError):
    """Raised by a custom parse function: the text does not have the format."""


@runtime_checkable
class Format(Protocol):
    """Format of a role's text. `choices` and `stop` are hints that an engine may enforce while sampling."""

    @property
    def choices(self) -> tuple[str, ...] | None: ...

    @property
    def stop(self) -> tuple[str, ...]: ...

    def parse(self, text: str, node: str = "") -> Reply: ...

    def describe(self) -> str: ...


class _Base:
    """Base of the formats: thinking is removed before they read, and both hints are absent by default."""

    __slots__ = ()

    def parse(self, text: str, node: str = "") -> Reply:
        """Read the reply in a text. Thinking that is never closed leaves nothing to read."""
        if "think>" not in text.lower():  # nearly always
            return self._read(text, node)
        thinking, rest, closed = split_thinking(text)
        if not thinking:
            return self._read(text, node)
        reply = self._read(rest, node)
        return reply._replace(ok=reply.ok and closed, thinking=thinking)

    if TYPE_CHECKING:  # every format has its own

        def _read(self, text: str, node: str) -> Reply: ...

    def within(self, text: str) -> str | None:
        """Return the part of a text that this format reads, without what stands around it; None where there
        is none.
        """
        return text

    @property
    def choices(self) -> tuple[str, ...] | None:
        return None

    @property
    def stop(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Raw(_Base):
    """Any text that is not blank; the value is the text, stripped."""

    otherwise: object = None

    def _read(self, text: str, node: str) -> Reply:
        stripped = text.strip()
        if stripped:
            return _new(Reply, (text, True, stripped, node, ""))
        return Reply(text, False, self.otherwise, node)

    def describe(self) -> str:
        return "any text"


@dataclass(frozen=True, init=False)
class Tags(_Base):
    """Each tag exactly once, in order, not empty, nothing outside or between: `<answer>Paris</answer>`.

    One tag gives its content as value; several give a dict by tag. `enums` restricts a tag's content
    (compared case-folded). Tag names are matched without regard to case and told in lower case.
    """

    names: tuple[str, ...]
    enums: Mapping[str, tuple[str, ...]]
    otherwise: object
    _order: list[str] = field(repr=False, compare=False)
    _marks: re.Pattern[str] = field(repr=False, compare=False)

    def __init__(self, *names: str, otherwise: object = None, **enums: tuple[str, ...]) -> None:
        if not names:
            raise ValueError("Tags needs at least one tag name, e.g. Tags('answer')")
        unknown = sorted(set(enums) - set(names))
        if unknown:
            raise ValueError(
                f"Tags: values were given for {unknown}, which are not among the tags {list(names)}"
            )
        set_ = object.__setattr__
        set_(self, "names", tuple(names))
        set_(self, "enums", freeze({k: tuple(v) for k, v in enums.items()}))
        set_(self, "otherwise", freeze(otherwise))
        set_(self, "_order", [mark for n in names for mark in (n.lower(), f"/{n.lower()}")])
        set_(self, "_marks", tag_pattern(tuple(map(re.escape, names))))

    @property
    def stop(self) -> tuple[str, ...]:
        return (f"</{self.names[-1]}>",)

    def _read(self, text: str, node: str) -> Reply:
        parts = self._marks.split(text, len(self._order) + 1)
        tags = parts[1::2]
        if (
            tags != self._order
            and [tag.lower() for tag in tags] != self._order
            or "".join(parts[::4]).strip()
        ):
            return Reply(text, False, self.otherwise, node)
        values: dict[str, str] = {}
        for name, value in zip(self.names, parts[2::4], strict=True):
            value = value.strip()
            allowed = self.enums.get(name)
            if allowed is not None:
                value = value.casefold()
            if not value or (allowed is not None and value not in allowed):
                return Reply(text, False, self.otherwise, node)
            values[name] = value
        value = values[self.names[0]] if len(values) == 1 else freeze(values)
        return _new(Reply, (text, True, value, node, ""))

    def within(self, text: str) -> str | None:
        return between(text, (f"<{self.names[0]}>",), (f"</{self.names[-1]}>",))

    def describe(self) -> str:
        return " ".join(
            f"<{n}>{'|'.join(self.enums[n]) if n in self.enums else '…'}</{n}>" for n in self.names
        )


_MARKUP = " \t\r\n`*_\"'.!"


@dataclass(frozen=True)
class Choice(_Base):
    """One of a few words, exactly (case and outer blanks aside): `Choice("approve", "reject")`."""

    options: tuple[str, ...]
    otherwise: object = None

    def __init__(self, *options: str, otherwise: object = None) -> None:
        if len(options) < 2 or len(set(map(str.casefold, options))) != len(options):
            raise ValueError(f"Choice needs two or more different options, got {list(options)}")
        object.__setattr__(self, "options", tuple(options))
        object.__setattr__(self, "otherwise", otherwise)

    @property
    def choices(self) -> tuple[str, ...] | None:
        return self.options

    def _read(self, text: str, node: str) -> Reply:
        word = text.strip().casefold()
        for option in self.options:
            if word == option.casefold():
                return _new(Reply, (text, True, option, node, ""))
        return Reply(text, False, self.otherwise, node)

    def within(self, text: str) -> str | None:
        """Return the last line without its markup. An option named in a sentence ("I do not approve") does
        not count.
        """
        return (text.strip(_MARKUP).splitlines() or [""])[-1].strip(_MARKUP) or None

    def describe(self) -> str:
        return " | ".join(self.options)


@dataclass(frozen=True)
class Json(_Base):
    """The first balanced JSON object in the text; with `key`, the value under it.

    Lists are stripped of blanks and cut to `most`; a missing or empty value is illegal.
    """

    key: str | None = None
    most: int | None = None
    otherwise: object = None
    texts: bool = False
    """The value must be a list of texts. Other things in it are left out, and a list without a text is illegal."""

    def _read(self, text: str, node: str) -> Reply:
        data = first_json_object(text)
        if data is None:
            return Reply(text, False, self.otherwise, node)
        value = data if self.key is None else data.get(self.key)
        if isinstance(value, str):
            value = value.strip()
        elif isinstance(value, list):
            kept = [
                v.strip() if isinstance(v, str) else v for v in value if isinstance(v, str) or not self.texts
            ]
            value = [v for v in kept if v is not None and v != ""][: self.most]
        if self.texts and not isinstance(value, list):
            return Reply(text, False, self.otherwise, node)
        if value is None or value == "" or value == [] or value == {}:
            return Reply(text, False, self.otherwise, node)
        return Reply(text, True, freeze(value), node)

    def within(self, text: str) -> str | None:
        return json_object(text)[1] or None

    def describe(self) -> str:
        return "a JSON object" if self.key is None else f'{{"{self.key}": …}}'


@dataclass(frozen=True)
class Boxed(_Base):
    """The last `\\boxed{…}` of the text, braces balanced."""

    otherwise: object = None

    def _read(self, text: str, node: str) -> Reply:
        value = last_boxed(text)
        return Reply(text, True, value, node) if value else Reply(text, False, self.otherwise, node)

    def describe(self) -> str:
        return r"text that ends in \boxed{…}"


@dataclass(frozen=True)
class Custom(_Base):
    """A pure function from text to value; it raises `FormatError` where the text is illegal.

    `FormatError("why", value)` may carry the value to fall back on as its second argument.
    """

    read: Callable[[str], object]
    says: str = ""
    ends: tuple[str, ...] = ()
    """Strings that end a legal reply: sampling may stop there."""
    starts: tuple[str, ...] = ()
    """Strings that begin a legal reply; by default the tags that `ends` closes."""

    @property
    def stop(self) -> tuple[str, ...]:
        return self.ends

    def _read(self, text: str, node: str) -> Reply:
        read = self.read
        try:
            value = read(text)
        except FormatError as error:
            return Reply(text, False, freeze(error.args[1]) if len(error.args) > 1 else None, node)
        return _new(Reply, (text, True, value if type(value) in FROZEN else freeze(value), node, ""))

    def within(self, text: str) -> str | None:
        if not self.ends:
            return text
        return between(text, self.starts or tuple(end.replace("</", "<") for end in self.ends), self.ends)

    def describe(self) -> str:
        return self.says or (self.read.__doc__ or self.read.__name__).strip().splitlines()[0]


def form_in_words(format: Format) -> str:
    """Description of a legal reply as a noun, for a line such as "planner replies with a plan: …"."""
    return re.sub(r"\bRead (?=(?:an?|the) |\w+:)", "", format.describe())


def read_reply(format: Format, text: str, node: str = "", lenient: bool | None = None) -> Reply:
    """Read a role's reply by its format, with its role's rule for what may stand around (see the module's
    docstring).
    """
    reply = format.parse(text, node)
    ours = isinstance(format, _Base)
    if ours and lenient is None:
        return reply
    if not ours and "think>" in text.lower():
        thinking, rest, closed = split_thinking(text)  # a custom format, which knows no thinking
        reply = format.parse(rest, node)
        reply = reply._replace(text=rest, thinking=thinking, ok=reply.ok and closed)
    if lenient is None or reply.ok == lenient or not reply.text or not hasattr(format, "within"):
        return reply
    part = format.within(reply.text)
    if lenient:
        inner = format.parse(part, node) if part else reply
        return reply._replace(ok=inner.ok, value=inner.value) if inner.ok else reply
    if part is None or part == reply.text.strip():
        return reply
    return reply._replace(ok=False, value=format.parse("", node).value)


@dataclass(frozen=True, slots=True)
class Role:
    """A role of a workflow. With `instances > 1` its agents are `name_1 … name_n`."""

    name: str
    instances: int = 1
    reply: Format = Raw()
    system: str = ""
    description: str = ""
    lenient: bool | None = None
    """Rule for what may stand around the part of a reply that its format reads: see the top of this module."""
    sees: tuple[str, ...] = ()
    """Fields that its prompt is filled with, where prompts come in sets; without the first it would be blind."""
    wording: Wording | None = field(default=None, repr=False, compare=False)
    """Words of the chosen prompt set."""
    opening: tuple[Mapping[str, str], ...] = field(init=False, repr=False, compare=False)
    """Messages before every prompt of this role: its system message, if it has one."""
    read: Callable[[str, str], Reply] = field(init=False, repr=False, compare=False)
    """Reader of texts without thinking, given text and node id: `read_reply` with what is known beforehand."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"role name {self.name!r}: use lower-case letters, digits and '_', a letter first"
            )
        if self.instances < 1:
            raise ValueError(f"role {self.name!r}: instances must be at least 1, got {self.instances}")
        if isinstance(self.reply, type) or not hasattr(self.reply, "parse"):
            raise ValueError(
                f"role {self.name!r}: reply must be a format, such as Tags('answer') or Raw(), got {self.reply!r:.60}"
            )
        system = (FrozenDict(role="system", content=self.system),) if self.system else ()
        object.__setattr__(self, "opening", system)
        read: Callable[
            [str, str], Reply
        ]  # settled here once, because a rollout reads thousands of replies a second
        if self.lenient is not None:
            read = partial(read_reply, self.reply, lenient=self.lenient)
        elif isinstance(self.reply, _Base) and getattr(type(self.reply), "parse", None) is _Base.parse:
            read = self.reply._read
        else:
            read = self.reply.parse
        object.__setattr__(self, "read", read)

    @property
    def agents(self) -> tuple[str, ...]:
        """List the agent ids of this role, in order."""
        if self.instances == 1:
            return (self.name,)
        return tuple(f"{self.name}_{i}" for i in range(1, self.instances + 1))


def entry_of(table: Mapping[str, T], *names: str) -> T | None:
    """Return the entry of the first of these names (an agent, its role) in a table, else that of `"*"`, else None."""
    return next((table[name] for name in (*names, "*") if name in table), None)


def nobody_plays(agent: str, role: str) -> str:
    """Return the message for an agent without an entry in a table. It names the entries that could be added."""
    return f"nobody plays {agent!r}; add {' or '.join(map(repr, dict.fromkeys([agent, role, '*'])))}"
