"""Prompts of a role: its system text and its prompt, with named fields that the workflow fills.

`{question}` is a field. All other braces are ordinary text, so JSON and `\\boxed{}` need no escapes. `{{question}}`
becomes the text {question}.

A field may have a sentence around it: the `when` sentence is used if the field has a value, the `unless` sentence if it
is empty. A prompt also lists the fields that may be cut. A policy whose model has no room for the whole prompt cuts
these, for example the oldest steps or the last passages (`shortened`), and reports how much it cut.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

PromptPiece = tuple[str, str]
"""Part of a filled prompt: the name of the field that it comes from ("" for none), and its text."""
ENDS = ("first", "middle", "last")
"""Places of a field where a cut may begin."""
LEFT_OUT = "…"
_FIELD = re.compile(r"\{\{([a-z_]\w*)\}\}|\{([a-z_]\w*)\}")


class Told(str):
    """Filled prompt with its pieces. `cut` lists the fields that may be cut, in order, and where each is cut."""

    __slots__ = ("_pieces", "cut")
    _pieces: tuple[PromptPiece, ...] | Callable[[], Iterable[PromptPiece]]
    cut: tuple[tuple[str, str], ...]

    def __new__(cls, pieces: Iterable[PromptPiece], cut: Sequence[tuple[str, str]]) -> Told:
        pieces = tuple(pieces)
        told = super().__new__(cls, _joined(pieces))
        told._pieces, told.cut = pieces, tuple(cut)
        return told

    @classmethod
    def later(
        cls, text: str, pieces: Callable[[], Iterable[PromptPiece]], cut: tuple[tuple[str, str], ...]
    ) -> Told:
        """Make a prompt whose pieces are computed when they are needed. Most prompts are never cut."""
        told = super().__new__(cls, text)
        told._pieces, told.cut = pieces, cut
        return told

    @property
    def pieces(self) -> tuple[PromptPiece, ...]:
        """Pieces of the prompt, in order."""
        if callable(self._pieces):
            self._pieces = tuple(self._pieces())
        return self._pieces

    def __reduce__(self) -> tuple[object, ...]:
        return (Told, (self.pieces, self.cut))

    def shortened(self, characters: int) -> tuple[str, dict[str, int]]:
        """Return the text without at least this many characters, and how many were cut from each field.

        Fewer characters are cut if the fields that may be cut are too short.
        """
        pieces, cuts = list(self.pieces), dict[str, int]()
        for name, end in self.cut:
            for i in range(len(pieces)):
                if pieces[i][0] != name or characters <= 0:
                    continue
                text = pieces[i][1]
                rest = shorter(text, characters, end)
                characters -= len(text) - len(rest)
                cuts[name] = cuts.get(name, 0) + len(text) - len(rest)
                pieces[i] = (name, rest)
        return _joined(pieces), {name: n for name, n in cuts.items() if n > 0}


def shortened(
    messages: Iterable[Mapping[str, object]], characters: int
) -> tuple[list[Mapping[str, object]], dict[str, int]]:
    """Return the messages without this many characters, and how many were cut from each field.

    The oldest messages are cut first, and only those whose content is a `Told`.
    """
    result, cuts = list[Mapping[str, object]](), dict[str, int]()
    for message in messages:
        content = message["content"]
        if isinstance(content, Told) and characters > 0:
            text, fields = content.shortened(characters)
            message = {**message, "content": text}
            characters -= sum(fields.values())
            cuts |= {name: cuts.get(name, 0) + n for name, n in fields.items()}
        result.append(message)
    return result, cuts


def shorter(text: str, by: int, end: str) -> str:
    """Return a text without at least `by` characters, cut at one end or in the middle, between lines or words."""
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
    """Return the text up to its last line break, or else up to its last blank, or else the whole text."""
    for mark in "\n ":
        at = text.rfind(mark)
        if at > 0:
            return text[:at]
    return text


@dataclass(frozen=True)
class FieldText:
    """Text with fields, parsed."""

    parts: tuple[tuple[str, str], ...]
    """Pairs of literal text and the name of the field after it ("" at the end)."""

    @classmethod
    def of(cls, text: str) -> FieldText:
        """Parse a text."""
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
        """Names of the fields."""
        return {name for _, name in self.parts if name}


@dataclass(frozen=True)
class Wording:
    """Prompts of one role: `system`, which never changes, and `prompt`, which is filled for each act."""

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
        """Return the prompt with its fields in braces, and the `when` and `unless` sentences."""
        around = [
            f"{key}.{name}: {table[name]}"
            for key, table in (("when", self.when), ("unless", self.unless))
            for name in sorted(table)
        ]
        return "\n".join([str(self.prompt), *around])

    def __post_init__(self) -> None:
        object.__setattr__(self, "ask", self._first_ask)

    def _first_ask(self, fields: Mapping[str, object]) -> str:
        """Compile the prompt when it is filled for the first time, because a rollout fills thousands a second."""
        tables = (tuple(table.items()) for table in (self.when, self.unless, self.terms))
        try:
            ask = _compiled(self.prompt, *tables)
        except (
            RecursionError
        ):  # sentences contain each other: the values of the fields decide where this ends
            ask = self._chosen
        object.__setattr__(self, "ask", ask)
        return ask(fields)

    def __reduce__(self) -> tuple[type[Wording], tuple[object, ...]]:  # `ask` is compiled again
        return (Wording, (self.system, self.prompt, self.when, self.unless, self.cut, self.terms))

    def _chosen(self, fields: Mapping[str, object]) -> str:
        return _joined(self.pieces(fields))

    def told(self, fields: Mapping[str, object]) -> str:
        """Return the filled prompt. It is a `Told` if the role has fields that may be cut."""
        text = self.ask(fields)
        return Told.later(text, partial(self.pieces, fields), self.cut) if self.cut else text

    def pieces(self, fields: Mapping[str, object]) -> list[PromptPiece]:
        """Return the parts of the filled prompt, in order."""
        pieces: list[PromptPiece] = []
        self._fill(self.prompt, fields, pieces)
        return pieces

    def _fill(
        self, template: FieldText, fields: Mapping[str, object], pieces: list[PromptPiece], inside: str = ""
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
    """Fill another text of the same role, with the same sentences and terms."""
    pieces: list[PromptPiece] = []
    wording._fill(FieldText.of(text), fields, pieces)
    return _joined(pieces)


@lru_cache(maxsize=1024)
def _compiled(
    prompt: FieldText,
    when: tuple[tuple[str, FieldText], ...],
    unless: tuple[tuple[str, FieldText], ...],
    terms: tuple[tuple[str, str], ...],
) -> Callable[[Mapping[str, object]], str]:
    """Compile a prompt to one expression that gives the same text as `Wording._fill`.

    Example: `lambda fields: f"Question: {fields['question']!s}"`.
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
    """Return a text as an f-string. `around` names the fields whose sentences contain this text."""
    pieces: list[ast.expr] = []
    for literal, name in text.parts:
        pieces.append(ast.Constant(literal))
        if not name:
            continue
        value: ast.expr = ast.Subscript(ast.Name("fields", ast.Load()), ast.Constant(name), ast.Load())
        if name in terms:
            test = ast.Compare(ast.Constant(name), [ast.In()], [ast.Name("fields", ast.Load())])
            value = ast.IfExp(test, value, ast.Constant(terms[name]))
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


def _joined(pieces: Iterable[PromptPiece]) -> str:
    return "".join([text for _, text in pieces])
