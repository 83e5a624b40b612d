"""Readers of tests, which data sets write in many forms, as a list of `Case`.

The forms are `{input, output}` (also `{stdin, stdout}`, `{inputs, outputs}`, `expected_output`), lists of these, pairs,
columns `{inputs: […], outputs: […], fn_name}`, `{public_tests, private_tests}` (the public tests are used if there are
any), and JSON text of any of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....agents.basics.frozen import thaw

_INPUT = ("input", "stdin", "inputs")
_OUTPUT = ("output", "stdout", "outputs", "expected_output", "expected")
_MOST_TESTS, _MOST_WRITTEN = 64, 1 << 18  # limits for tests of a role: their number, and characters of each
_GROUPS = ("public_tests", "public_test_cases", "private_tests", "private_test_cases", "tests", "test_cases")


@dataclass(frozen=True, slots=True)
class Case:
    """Test of a program: stdin and stdout as texts, or arguments and result of a function as JSON values."""

    input: Any
    expected: Any
    wrapped: bool = False  # in columns of calls, each expected value is often in a list of one


def read_tests(tests: object, fn_name: str | None) -> tuple[list[Case], str | None]:
    """Return the cases and the name of the function to call: `fn_name`, or else the function that the tests name."""
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
    """Return the function that the tests name, or None."""
    return read_tests(tests, None)[1]


def written_tests(tests: Sequence[object], fn_name: str | None) -> list[dict[str, object]]:
    """Return the valid tests that a role wrote, with input and output only. Their number and size are limited.

    All other fields are dropped, such as the name of a function, because only the task decides how a program is judged.
    """
    kept: list[dict[str, object]] = []
    for test in tests:
        if len(kept) == _MOST_TESTS:
            break
        if isinstance(test, Mapping) and "input" in test and "output" in test:
            try:  # a value that is nested too deeply to be written is no test
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
    """Return lines as one text. A value that was parsed from JSON by mistake (a number alone) is written as text again."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return json.dumps(value)
