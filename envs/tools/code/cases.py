"""The many ways in which data sets write tests, as one list of `Case`.

`{input, output}` (also `{stdin, stdout}`, `{inputs, outputs}`, `expected_output`), lists of these, pairs,
columns `{inputs: […], outputs: […], fn_name}`, `{public_tests, private_tests}` (public ones preferred, as
in the parity spec) and JSON text of any of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....agents.basics.frozen import thaw

_INPUT = ("input", "stdin", "inputs")
_OUTPUT = ("output", "stdout", "outputs", "expected_output", "expected")
_MOST_TESTS, _MOST_WRITTEN = 64, 1 << 18  # of a role's own: tests, and characters of each
_GROUPS = ("public_tests", "public_test_cases", "private_tests", "private_test_cases", "tests", "test_cases")


@dataclass(frozen=True, slots=True)
class Case:
    """One test: stdin and stdout as text, or arguments and value as JSON values for a function."""

    input: Any
    expected: Any
    wrapped: bool = False  # columns of calls often hold each expected value in a list of one


def read_tests(tests: object, fn_name: str | None) -> tuple[list[Case], str | None]:
    """The cases, and the function to call: the caller's, else the one that the tests name."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"tests are given as text that is not JSON ({error})") from error
    if isinstance(tests, Mapping):
        fn_name = fn_name or tests.get("fn_name") or None
        group = next((tests[name] for name in _GROUPS if tests.get(name)), None)
        if group is not None:
            return read_tests(group, fn_name)
        return _columns(tests, fn_name), fn_name
    if not isinstance(tests, Sequence):
        raise ValueError(f"tests are a {type(tests).__name__}; expected a list of {{input, output}}")
    if fn_name is None:
        fn_name = next(
            (test["fn_name"] for test in tests if isinstance(test, Mapping) and test.get("fn_name")), None
        )
    return [_one(test, index, fn_name) for index, test in enumerate(tests)], fn_name


def named_function(tests: object) -> str | None:
    """The function that a data set's own tests name, if they do."""
    return read_tests(tests, None)[1]


def written_tests(tests: Sequence[object], fn_name: str | None) -> list[dict[str, object]]:
    """The tests of a role's own that are tests: input and output alone, of a bounded size, and few.

    Whatever else stands in them is dropped, a function's name first of all: how a program is judged
    is the task's to say.
    """
    kept: list[dict[str, object]] = []
    for test in tests:
        if len(kept) == _MOST_TESTS:
            break
        if isinstance(test, Mapping) and "input" in test and "output" in test:
            try:  # what nests too deeply to be written is no test
                plain = {"input": thaw(test["input"]), "output": thaw(test["output"])}
                small = len(json.dumps(plain, default=dict)) <= _MOST_WRITTEN
                read_tests([plain], fn_name)
            except (TypeError, ValueError, RecursionError):
                continue
            kept += [plain] if small else []
    return kept


def _columns(tests: Mapping[str, object], fn_name: str | None) -> list[Case]:
    inputs, outputs = _field(tests, _INPUT, "tests"), _field(tests, _OUTPUT, "tests")
    if fn_name is None and isinstance(inputs, str):
        return [_case(inputs, outputs, fn_name, "tests", wrapped=False)]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("tests with columns of inputs and outputs need two lists of the same length")
    pairs = zip(inputs, outputs, strict=True)
    return [_case(a, b, fn_name, f"tests[{i}]", wrapped=True) for i, (a, b) in enumerate(pairs)]


def _one(test: object, index: int, fn_name: str | None) -> Case:
    where = f"tests[{index}]"
    if isinstance(test, Mapping):
        return _case(_field(test, _INPUT, where), _field(test, _OUTPUT, where), fn_name, where, wrapped=False)
    if isinstance(test, (list, tuple)) and len(test) == 2:
        return _case(test[0], test[1], fn_name, where, wrapped=False)
    raise ValueError(f"{where} is {test!r:.80}; expected {{input, output}}")


def _field(test: Mapping[str, object], names: Sequence[str], where: str) -> object:
    for name in names:
        if name in test:
            return test[name]
    raise ValueError(f"{where} has none of the keys {', '.join(names)}; it has {', '.join(map(str, test))}")


def _case(value: object, expected: object, fn_name: str | None, where: str, *, wrapped: bool) -> Case:
    if fn_name is None:
        return Case(_text(value), _text(expected))
    if isinstance(value, str):  # LiveCodeBench: one argument a line, each as JSON, and the value as JSON
        try:
            value = [json.loads(line) for line in value.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise ValueError(
                f"{where}: arguments given as text must be one JSON value a line ({error})"
            ) from error
    if not isinstance(value, (list, tuple)):
        raise ValueError(
            f"{where}: with fn_name={fn_name!r} the input is a list of arguments, not {value!r:.80}"
        )
    return Case(list(value), expected, wrapped)


def _text(value: object) -> str:
    """Lines as text; what was parsed from JSON by accident (a lone number) as it was written."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return json.dumps(value)
