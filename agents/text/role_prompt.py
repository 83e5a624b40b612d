"""A role's words: its system text and its prompt, with named fields that the workflow fills.

`{question}` is a field. Every other brace stands for itself (JSON and `\\boxed{}` need no care), and `{{question}}` is
written as {question}. A field may be told in a sentence of its own, `when` it holds something, and another one stand
in its place `unless` it does. A prompt knows which of its fields may be cut, so that a policy whose model has no room
for all of it can leave out the oldest steps or the last passages (`shortened`), and say so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Piece = tuple[str, str]
"""The field that a part of a text tells ("" for none), and the part."""
ENDS = ("first", "middle", "last")
"""Ends of a field whose lines go first when there is no room."""
LEFT_OUT = "…"
_FIELD = re.compile(r"\{\{([a-z_]\w*)\}\}|\{([a-z_]\w*)\}")


class Told(str):
    """A prompt that knows its pieces, and which fields may be cut, in their order."""

    __slots__ = ("cut", "pieces")
    pieces: tuple[Piece, ...]
    cut: tuple[tuple[str, str], ...]

    def __new__(cls, pieces: Iterable[Piece], cut: Sequence[tuple[str, str]]) -> Told:
        pieces = tuple(pieces)
        told = super().__new__(cls, _joined(pieces))
        told.pieces, told.cut = pieces, tuple(cut)
        return told

    def __reduce__(self) -> tuple[object, ...]:
        return (Told, (self.pieces, self.cut))

    def shortened(self, characters: int) -> tuple[str, dict[str, int]]:
        """The text with at least so many characters left out, as far as it may be cut; what was, by field."""
        pieces, gone = list(self.pieces), dict[str, int]()
        for name, end in self.cut:
            for i in range(len(pieces)):
                if pieces[i][0] != name or characters <= 0:
                    continue
                text = pieces[i][1]
                kept = shorter(text, characters, end)
                characters -= len(text) - len(kept)
                gone[name] = gone.get(name, 0) + len(text) - len(kept)
                pieces[i] = (name, kept)
        return _joined(pieces), {name: n for name, n in gone.items() if n > 0}


def shortened(
    messages: Iterable[Mapping[str, object]], characters: int
) -> tuple[list[Mapping[str, object]], dict[str, int]]:
    """Messages with so many characters left out, the oldest first; what was, by field."""
    kept, gone = list[Mapping[str, object]](), dict[str, int]()
    for message in messages:
        content = message["content"]
        if isinstance(content, Told) and characters > 0:
            text, here = content.shortened(characters)
            message = {**message, "content": text}
            characters -= sum(here.values())
            gone |= {name: gone.get(name, 0) + n for name, n in here.items()}
        kept.append(message)
    return kept, gone


def shorter(text: str, by: int, end: str) -> str:
    """A text without at least `by` characters at one end or in the middle, whole lines (or words) of it."""
    room = len(text) - by - len(LEFT_OUT) - 2
    if room <= 0:
        return LEFT_OUT if len(text) > len(LEFT_OUT) else text
    if end == "last":
        return f"{_whole(text[:room])}\n{LEFT_OUT}"
    if end == "first":
        return f"{LEFT_OUT}\n{_whole(text[-room:][::-1])[::-1]}"
    head, tail = text[: (room + 1) // 2], text[len(text) - room // 2 :]
    return f"{_whole(head)}\n{LEFT_OUT}\n{_whole(tail[::-1])[::-1]}"


def _whole(text: str) -> str:
    """A text up to its last line break, or else its last blank, unless nearly all of it would go."""
    for mark in "\n ":
        at = text.rfind(mark)
        if at > 0:
            return text[:at]
    return text


@dataclass(frozen=True)
class FieldText:
    """A text with fields, ready to be filled."""

    parts: tuple[tuple[str, str], ...]
    """Literal text, and the name of the field behind it ("" at the end)."""

    @classmethod
    def of(cls, text: str) -> FieldText:
        parts, literal, at = list[tuple[str, str]](), "", 0
        for match in _FIELD.finditer(text):
            literal += text[at : match.start()]
            at = match.end()
            if match[1]:
                literal += match[0][1:-1]
            else:
                parts.append((literal, match[2]))
                literal = ""
        return cls((*parts, (literal + text[at:], "")))

    def __str__(self) -> str:
        return "".join(literal + (f"{{{name}}}" if name else "") for literal, name in self.parts)

    @property
    def fields(self) -> set[str]:
        return {name for _, name in self.parts if name}


@dataclass(frozen=True)
class Wording:
    """Words to one role: `system` as it stands, and `prompt` to be filled for each act."""

    system: str
    prompt: FieldText
    when: Mapping[str, FieldText] = field(default_factory=dict)
    unless: Mapping[str, FieldText] = field(default_factory=dict)
    cut: tuple[tuple[str, str], ...] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    """Fields that are the same in every act."""
    ask: Callable[[Mapping[str, object]], str] = field(init=False, repr=False, compare=False)
    """Function that fills the prompt."""

    @property
    def source(self) -> str:
        """The prompt with its fields in braces, and what stands around them."""
        around = [
            f"{key}.{name}: {table[name]}"
            for key, table in (("when", self.when), ("unless", self.unless))
            for name in sorted(table)
        ]
        return "\n".join([str(self.prompt), *around])

    def __post_init__(self) -> None:
        object.__setattr__(self, "ask", self._first_ask)

    def _first_ask(self, fields: Mapping[str, object]) -> str:
        """Compile the prompt when it is first filled: a rollout fills thousands a second."""
        tables = (tuple(table.items()) for table in (self.when, self.unless, self.terms))
        try:
            ask = _compiled(self.prompt, *tables)
        except RecursionError:  # texts that stand around each other: which come to an end, the fields decide
            ask = self._chosen
        object.__setattr__(self, "ask", ask)
        return ask(fields)

    def __reduce__(self) -> tuple[type[Wording], tuple[object, ...]]:  # `ask` is compiled again
        return (Wording, (self.system, self.prompt, self.when, self.unless, self.cut, self.terms))

    def _chosen(self, fields: Mapping[str, object]) -> str:
        return _joined(self.pieces(fields))

    def told(self, fields: Mapping[str, object]) -> str:
        """Return the prompt, filled; a `Told` where it may be cut."""
        return Told(self.pieces(fields), self.cut) if self.cut else self.ask(fields)

    def pieces(self, fields: Mapping[str, object]) -> list[Piece]:
        """Return the parts of the filled prompt, in order."""
        pieces: list[Piece] = []
        self._fill(self.prompt, fields, pieces)
        return pieces

    def _fill(
        self, template: FieldText, fields: Mapping[str, object], pieces: list[Piece], inside: str = ""
    ) -> None:
        for literal, name in template.parts:
            if literal:
                pieces.append(("", literal))
            if not name:
                continue
            value = fields[name] if name in fields else self.terms[name]
            if name != inside:
                around = (self.when if value else self.unless).get(name)
                if around is not None:
                    self._fill(around, fields, pieces, name)
                    continue
            pieces.append((name, value if type(value) is str else str(value)))


def filled(text: str, wording: Wording, fields: Mapping[str, object]) -> str:
    """Another text of the same role, filled by the same rules."""
    pieces: list[Piece] = []
    wording._fill(FieldText.of(text), fields, pieces)
    return _joined(pieces)


@lru_cache(maxsize=1024)
def _compiled(
    prompt: FieldText,
    when: tuple[tuple[str, FieldText], ...],
    unless: tuple[tuple[str, FieldText], ...],
    terms: tuple[tuple[str, str], ...],
) -> Callable[[Mapping[str, object]], str]:
    """Compile what `Wording._fill` does to one expression, such as
    `lambda fields: f"Question: {fields['question']!s}"`.
    """
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg("fields")], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    body = _expression(prompt, dict(when), dict(unless), dict(terms))
    tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
    fill: Callable[[Mapping[str, object]], str] = eval(compile(tree, "<prompt>", "eval"))
    return fill


def _expression(
    text: FieldText,
    when: Mapping[str, FieldText],
    unless: Mapping[str, FieldText],
    terms: Mapping[str, str],
    around: tuple[str, ...] = (),
) -> ast.expr:
    """A text as an f-string; `around` are the fields whose sentences it stands in."""
    pieces: list[ast.expr] = []
    for literal, name in text.parts:
        pieces.append(ast.Constant(literal))
        if not name:
            continue
        value: ast.expr = ast.Subscript(ast.Name("fields", ast.Load()), ast.Constant(name), ast.Load())
        if name in terms:
            known = ast.Compare(ast.Constant(name), [ast.In()], [ast.Name("fields", ast.Load())])
            value = ast.IfExp(known, value, ast.Constant(terms[name]))
        if (name in when or name in unless) and around[-1:] != (name,):
            if name in around:
                raise RecursionError(f"the sentences of {name!r} stand in each other")
            sentences = [
                _expression(table[name], when, unless, terms, (*around, name))
                if name in table
                else ast.JoinedStr([ast.FormattedValue(value, ord("s"))])
                for table in (when, unless)
            ]
            pieces.append(ast.FormattedValue(ast.IfExp(value, *sentences), -1))
        else:
            pieces.append(ast.FormattedValue(value, ord("s")))
    return ast.JoinedStr(pieces)


def _joined(pieces: Iterable[Piece]) -> str:
    return "".join([text for _, text in pieces])
