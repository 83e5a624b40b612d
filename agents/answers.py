"""Answers of policies: the text of a reply, the record of how it was made, and the name of its sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from .basics.frozen import FrozenDict
from .basics.json_types import JsonObject, JsonView


class DecisionId(str):
    """Name of one sampled decision: an episode and its node.

    In files, messages and keys it is the text `episode/node`. Code uses the two fields, and never splits the text.
    """

    __slots__ = ("episode", "node")
    episode: str
    node: str

    def __new__(cls, episode: str, node: str) -> DecisionId:
        if "/" in node:  # a slash in an episode's name would give two decisions the same text
            raise ValueError(f"node {node!r} of episode {episode!r}: the name of a node holds no '/'")
        name = super().__new__(cls, f"{episode}/{node}")
        name.episode, name.node = episode, node
        return name

    @classmethod
    def of(cls, text: str) -> DecisionId:
        """Make an id of its text in a file or a message. An id is returned unchanged."""
        if isinstance(text, cls):
            return text
        episode, slash, node = text.rpartition("/")
        if not slash:
            raise ValueError(f"{text!r} is no id of a decision: it is written episode/node")
        return cls(episode, node)

    def __reduce__(self) -> tuple[object, ...]:
        return (DecisionId, (self.episode, self.node))


@dataclass(frozen=True, slots=True, eq=False)
class ReplyMeta(JsonView):
    """Record of how a reply was made. None: the value is not known.

    It can also be read as the mapping that files hold: `meta["tokens_out"]`, `meta.get("sample")` and `dict(meta)` have
    the known fields, and `more`.
    """

    policy: str | None = None
    """Name of the policy that answered."""
    version: int | None = None
    """Version of the policy that sampled the first token."""
    switches: tuple[tuple[int, int], ...] | None = None
    """Numbers of the tokens from which a newer version sampled, each with that version."""
    tokens_in: int | None = None
    """Number of tokens in the prompt."""
    tokens_out: int | None = None
    """Number of tokens in the reply."""
    finish_reason: str | None = None
    """Reason why the reply ended: "stop", "length", "overflow" …"""
    sample: DecisionId | None = None
    """Name of the sample that a model group stores for the reply."""
    thinking: str | None = None
    """Marker "open": the thinking never ended, so the reply is malformed."""
    prompt_cut: Mapping[str, int] | None = None
    """Number of characters that were cut from the prompt, by field."""
    cut: int | None = None
    """Length of a reply that was longer than a format may read."""
    tokens: Mapping[str, Sequence[object]] | None = None
    """Tokens of the prompt and the reply with their log-probs, if the call asked to keep them."""
    forced: bool | None = None
    """Marker of a reply that a replay has inserted."""
    changed: bool | None = None
    """Marker of a forced reply whose prompt differs from the original one."""
    raised: str | None = None
    """Exception that a tool's own code raised, with its place."""
    cost: float | None = None
    """Cost of the reply in dollars, if its endpoint has a price."""
    more: JsonView = FrozenDict()
    """Other entries, which unitymas does not use."""

    @classmethod
    def of(cls, entries: Mapping[str, object] | None) -> ReplyMeta:
        """Make the record from a mapping of a policy or a file. A value of a wrong type is stored in `more`."""
        if isinstance(entries, cls):
            return entries
        if not entries:
            return NOTHING_KNOWN
        known: JsonObject = {}
        more: JsonObject = {}
        for name, value in entries.items():
            read = _READ.get(name)
            fit = None if read is None or value is None else read(value)
            if fit is not None:
                known[name] = fit
            elif value is not None or read is None:
                more[name] = value
        return cls(**known, more=FrozenDict(more)) if more else cls(**known)

    @property
    def tokens_used(self) -> int:
        """Return the number of the reply's tokens that count in the budget of its episode."""
        return (self.tokens_in or 0) + (self.tokens_out or 0)

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in _READ else None
        return self.more[name] if value is None else value

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in _READ if getattr(self, name) is not None)
        yield from self.more

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    if type(value) is int:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    return int(float(value)) if math.isfinite(value) else None


def _dollars(value: object) -> float | None:
    if isinstance(value, int | float) and type(value) in (int, float) and 0 <= value < 1e300:
        return float(value)
    return None


def _sample(value: object) -> DecisionId | None:
    return DecisionId.of(value) if isinstance(value, str) and "/" in value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _mapping(value: object) -> JsonView | None:
    return value if isinstance(value, Mapping) else None


def _pairs(value: object) -> tuple[tuple[int, int], ...] | None:
    if not isinstance(value, list | tuple) or not all(isinstance(pair, list | tuple) for pair in value):
        return None
    if any(list(map(type, pair)) != [int, int] for pair in value):
        return None
    return tuple((token, version) for token, version in value)


_READ: dict[str, Callable[[object], object]] = {
    "policy": _text, "version": _number, "switches": _pairs, "tokens_in": _number, "tokens_out": _number, "finish_reason": _text,
    "sample": _sample, "thinking": _text, "prompt_cut": _mapping, "cut": _number, "tokens": _mapping,
    "forced": _flag, "changed": _flag, "raised": _text, "cost": _dollars,
}  # fmt: skip
NOTHING_KNOWN = ReplyMeta()


@dataclass(slots=True, init=False)
class Answer:
    """Text of a reply, and the record of how it was made. A mapping is read as a record."""

    text: str
    meta: ReplyMeta

    def __init__(self, text: str, meta: ReplyMeta | Mapping[str, object] = NOTHING_KNOWN) -> None:
        self.text, self.meta = text, ReplyMeta.of(meta)
