"""Schemas of the rows of each kind, and errors that name file, row and field.

    QA    {id, question, answers}                                               each of the answers is right
    code  {id, problem, visible_tests, hidden_tests, starter_code?, fn_name?}   tests: see ``check_test``
    math  {id, problem, answer}

Adapters raise ``FieldError`` for a field that they cannot read. The reader of the file turns it into a ``DataError`` with the
place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

KINDS = ("qa", "code", "math")
LONGEST_TEXT = 2_000_000  # characters of one field; a longer one means a broken or hostile file


class TestRow(TypedDict):
    """Test of a programming task: texts for stdin and stdout, or JSON values for a call."""

    input: object
    output: object


class MathRow(TypedDict):
    """Mathematics task with its solution."""

    id: str
    problem: str
    answer: str
    solution: str
    steps: list[str]


class _CodeAlways(TypedDict):
    id: str
    problem: str
    visible_tests: list[TestRow]
    hidden_tests: list[TestRow]
    solution: str
    steps: list[str]


class CodeRow(_CodeAlways, total=False):
    """Programming task with its solution."""

    fn_name: str


class Question(TypedDict):
    """Question with its answers, the titles of the passages that support them, and its hops: the simple questions."""

    question: str
    answers: list[str]
    supporting: list[str]
    hops: list[dict[str, str]]


class QaRow(Question):
    """Question-answering task."""

    id: str


class DataError(ValueError):
    """Raised when data cannot be used. The message names the place and the reason."""


class FieldError(ValueError):
    """Raised when a field of a record cannot be used."""

    def __init__(self, field: str, trouble: str) -> None:
        super().__init__(f"field {field!r}: {trouble}")
        self.field = field


def check_row(row: Mapping[str, object], kind: str) -> None:
    """Raise ``FieldError`` unless the row has the schema of its kind."""
    _text(row, "id")
    _CHECKS[kind](row)


def _check_qa(row: Mapping[str, object]) -> None:
    _text(row, "question")
    answers = row.get("answers")
    if not isinstance(answers, list | tuple) or not answers:
        raise FieldError("answers", f"wanted a list of at least one text, got {brief(answers)}")
    for number, answer in enumerate(answers):
        if not isinstance(answer, str) or not answer.strip():
            raise FieldError(f"answers[{number}]", f"wanted a text, got {brief(answer)}")


def _check_math(row: Mapping[str, object]) -> None:
    _text(row, "problem")
    _text(row, "answer")


def _check_code(row: Mapping[str, object]) -> None:
    _text(row, "problem")
    fn_name = row.get("fn_name")
    if fn_name is not None and not (isinstance(fn_name, str) and fn_name.isidentifier()):
        raise FieldError("fn_name", f"wanted the name of a Python function, got {brief(fn_name)}")
    if row.get("starter_code") is not None and not isinstance(row["starter_code"], str):
        raise FieldError("starter_code", f"wanted a text, got {brief(row['starter_code'])}")
    for name in ("visible_tests", "hidden_tests"):
        tests = row.get(name)
        if not isinstance(tests, list | tuple):
            raise FieldError(name, f"wanted a list of tests, got {brief(tests)}")
        for number, test in enumerate(tests):
            check_test(test, fn_name, f"{name}[{number}]")
    if not row["hidden_tests"]:
        raise FieldError("hidden_tests", "there is none, so nothing could be graded")


def check_test(test: object, fn_name: str | None, where: str) -> None:
    """Raise ``FieldError`` unless this is a test: {input, output}, as texts for stdin and stdout or as JSON values for a call."""
    if not isinstance(test, Mapping):
        raise FieldError(where, f"wanted {{input, output}}, got {brief(test)}")
    for name in ("input", "output"):
        if name not in test:
            raise FieldError(f"{where}.{name}", "is missing")
        if fn_name is None and not isinstance(test[name], str):
            raise FieldError(f"{where}.{name}", f"without fn_name it is text, got {brief(test[name])}")
    if fn_name is not None and not isinstance(test["input"], list | tuple):
        raise FieldError(
            f"{where}.input", f"with fn_name it is a list of arguments, got {brief(test['input'])}"
        )


def _text(row: Mapping[str, object], name: str) -> None:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise FieldError(name, f"wanted a text, got {brief(value)}" if name in row else "is missing")
    if len(value) > LONGEST_TEXT:
        raise FieldError(name, f"is {len(value):,} characters long (at most {LONGEST_TEXT:,})")


_CHECKS: dict[str, Callable[[Mapping[str, object]], None]] = {
    "qa": _check_qa,
    "code": _check_code,
    "math": _check_math,
}


def brief(value: object) -> str:
    """Return a value as an error message shows it: short, and with its type if it is not plain text."""
    shown = repr(value[:60] if isinstance(value, str | list | tuple) else value)[:60]
    return shown if value is None or isinstance(value, str) else f"{shown} ({type(value).__name__})"
