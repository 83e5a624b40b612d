"""Adapters that turn records of published programming data sets into code tasks.

Tests are published in a dozen shapes: parallel lists, JSON in text, call arguments line by line, compressed pickles,
assert statements. ``tests_of`` turns all of them into {input, output}. If a data set does not say which tests are visible,
the first few are visible and the rest are hidden.

Assertions never run in the process of the program that they judge, because the program could change them. They become
calls with an expected value. A task is dropped if none of its assertions is such a call (random inputs, sets).
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import NoReturn

from .fields import Record, decoded, pick, row_id, spoken, text
from .qa_adapters import TaskRow
from .row_schemas import FieldError, TestRow, brief

MOST_SHOWN = 3  # visible tests, if the data set names none
MOST_TESTS = 50  # of a task; some problems have thousands
LONGEST_TEST = 100_000  # characters of one test
LARGEST_PICKLE = 64 << 20

_TESTS = (
    "tests", "test_cases", "verification_info", "input_output", "reward_model.ground_truth", "reward_model.answer",
    "reward_model.target", "reward_model", "answer", "label", "extra_info.tests",
)  # fmt: skip
_NAMES = ("fn_name", "function_name", "func_name")


def code(record: Record) -> TaskRow | None:
    """Read a programming problem with tests, under the field names that public data sets use."""
    if "test_list" in record:
        return mbpp(record)
    problem = _statement(
        spoken(record, "problem", "question", "query", "question_content", "description", "text")
    )
    fn_name = find_fn_name(record)
    shown, hidden = (
        _visible(record, fn_name),
        tests_of(pick(record, "hidden_tests", "private_tests"), fn_name),
    )
    if not shown and not hidden:
        shown = tests_of(pick(record, "extra_info.public_test_cases", "public_test_cases"), fn_name)
        hidden = tests_of(pick(record, "extra_info.private_test_cases", "private_test_cases"), fn_name)
    if not hidden:
        hidden = shown + tests_of(pick(record, *_TESTS), fn_name)
        shown = []
    return task(record, problem, shown, hidden, fn_name)


def _visible(record: Record, fn_name: str | None) -> list[TestRow]:
    return tests_of(pick(record, "visible_tests", "public_tests"), fn_name)


def task(
    record: Record, problem: str, shown: list[TestRow], hidden: list[TestRow], fn_name: str | None
) -> TaskRow:
    """Return the row of a task. If there are no visible tests, the first few hidden ones become visible."""
    shown, hidden = _sensible(shown)[:MOST_SHOWN], _sensible(hidden)
    if not shown:
        cut = min(MOST_SHOWN, len(hidden) // 2)
        shown, hidden = hidden[:cut], hidden[cut:]
    row: TaskRow = {
        "id": row_id(record, problem),
        "problem": problem,
        "visible_tests": shown,
        "hidden_tests": hidden,
    }
    starter = pick(record, "starter_code", "metadata.starter_code", "extra_info.starter_code")
    if isinstance(starter, str) and starter.strip():
        row["starter_code"] = starter
    if fn_name:
        row["fn_name"] = fn_name
    return row


def _sensible(tests: list[TestRow]) -> list[TestRow]:
    small = [test for test in tests if sum(len(str(value)) for value in test.values()) <= LONGEST_TEST]
    return (small or tests)[:MOST_TESTS]


def _statement(problem: str) -> str:
    """Return the problem's text without the prompt that some data sets put around it."""
    problem = problem.rpartition("### Question:")[2]
    for marker in ("### Format:", "### Answer:"):
        problem = problem.partition(marker)[0]
    return problem.strip()


# ----------------------------------------------------------------------------- tests


def find_fn_name(record: Record) -> str | None:
    """Return the name of the function to call, from the record, its tests, metadata, extra_info or label."""
    for name in (*_NAMES, "entry_point"):
        if isinstance(record.get(name), str) and record[name].strip():
            return str(record[name]).strip()
    places = (
        "tests",
        "test_cases",
        "verification_info",
        "input_output",
        "metadata",
        "extra_info",
        "label",
        "reward_model",
    )
    return next(
        (candidate for place in places for candidate in _names_within(decoded(record.get(place)), 4)), None
    )


def _names_within(value: object, depth: int) -> Iterator[str]:
    if depth and isinstance(value, Mapping):
        for name in _NAMES:
            if isinstance(value.get(name), str) and value[name].strip():
                yield value[name].strip()
        for inner in value.values():
            yield from _names_within(decoded(inner), depth - 1)
    elif depth and isinstance(value, list):
        for inner in value[:1]:  # all tests of a task call the same function
            yield from _names_within(decoded(inner), depth - 1)


def tests_of(value: object, fn_name: str | None) -> list[TestRow]:
    """Return tests in any published shape as a list of {input, output}."""
    value = decoded(value)
    if value is None:
        return []
    if isinstance(value, Mapping):
        return _tests_of_mapping(value, fn_name)
    if not isinstance(value, list):
        raise FieldError("tests", f"wanted tests, got {brief(value)}")
    return [_test(decoded(test), fn_name, f"tests[{number}]") for number, test in enumerate(value)]


def _tests_of_mapping(value: Mapping[str, object], fn_name: str | None) -> list[TestRow]:
    for inner in ("test_cases", "tests", "ground_truth"):
        if inner in value:
            return tests_of(value[inner], fn_name)
    inputs, outputs = (_list_under(value, *names) for names in (("inputs", "input"), ("outputs", "output")))
    if inputs is None or outputs is None:
        raise FieldError("tests", f"wanted inputs and outputs, got the fields {brief(sorted(value))}")
    if len(inputs) != len(outputs):
        raise FieldError("tests", f"{len(inputs)} inputs but {len(outputs)} outputs")
    return [_pair(argument, output, fn_name) for argument, output in zip(inputs, outputs, strict=True)]


def _list_under(value: Mapping[str, object], *names: str) -> list[object] | None:
    items = next((value[name] for name in names if name in value), None)
    return items if isinstance(items, list) else None


def _test(test: object, fn_name: str | None, where: str) -> TestRow:
    if not isinstance(test, Mapping):
        raise FieldError(where, f"wanted {{input, output}}, got {brief(test)}")
    argument = next((test[name] for name in ("input", "inputs", "stdin") if name in test), None)
    output = next(
        (test[name] for name in ("output", "outputs", "expected_output", "stdout") if name in test), None
    )
    if argument is None:
        raise FieldError(f"{where}.input", "is missing")
    if output is None and not any(name in test for name in ("output", "outputs", "expected_output")):
        raise FieldError(f"{where}.output", "is missing")
    return _pair(argument, output, fn_name)


def _pair(argument: object, output: object, fn_name: str | None) -> TestRow:
    if fn_name is None:
        return {"input": _as_text(argument), "output": _as_text(output)}
    if isinstance(argument, str):  # LiveCodeBench: one JSON argument a line
        argument = [_json_or_text(line) for line in argument.split("\n") if line.strip()]
        output = _json_or_text(output) if isinstance(output, str) else output
    return {"input": argument if isinstance(argument, list) else [argument], "output": output}


def _as_text(value: object) -> str:
    return (
        "\n".join(str(line) for line in value)
        if isinstance(value, list)
        else str("" if value is None else value)
    )


def _json_or_text(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# ------------------------------------------------------------------- peculiar sets


def codecontests(record: Record) -> TaskRow:
    """Read a record of CodeContests. Public tests are visible, private and generated tests are hidden."""
    hidden = [
        test for name in ("private_tests", "generated_tests") for test in tests_of(record.get(name), None)
    ]
    row = task(record, text(record, "description"), tests_of(record.get("public_tests"), None), hidden, None)
    return row | {"id": text(record, "name")}


def livecodebench(record: Record) -> TaskRow:
    """Read a record of LiveCodeBench. Public tests are visible. Private tests are hidden; they are a compressed pickle of JSON."""
    fn_name = find_fn_name(record)
    hidden = tests_of(_unpacked(record.get("private_test_cases")), fn_name)
    shown = tests_of(record.get("public_test_cases"), fn_name)
    return task(record, text(record, "question_content"), shown, hidden, fn_name)


class _OnlyText(pickle.Unpickler):
    """Unpickler of plain values. It refuses any class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise FieldError("private_test_cases", f"refused: its pickle wants to import {module}.{name}")


def _unpacked(value: object) -> object:
    value = decoded(value)
    if not isinstance(value, str):
        return value
    try:
        inflated = zlib.decompressobj().decompress(base64.b64decode(value), LARGEST_PICKLE)
        return decoded(_OnlyText(io.BytesIO(inflated)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, MemoryError) as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError("private_test_cases", f"cannot be unpacked ({error})") from error


def humaneval(record: Record) -> TaskRow | None:
    """Read a record of HumanEval, with the assertions of ``check`` as tests. Three of the 164 have no usable assertion."""
    fn_name, prompt = text(record, "entry_point"), text(record, "prompt")
    check = next(
        (node for node in _parsed(text(record, "test")).body if isinstance(node, ast.FunctionDef)), None
    )
    asserts = [node for node in (check.body if check else []) if isinstance(node, ast.Assert)]
    tests = [test for node in asserts if (test := called(node, "candidate"))]
    if not tests:
        return None
    row = task(record, prompt, [], tests, fn_name)
    return row | {
        "starter_code": prompt + "\n",
        "solution": f"{prompt}\n{record.get('canonical_solution', '')}",
    }


# Their solutions distinguish tuples from lists, or 0 from False, which JSON cannot express: no program could pass.
_MBPP_BEYOND_JSON = {75, 114, 143, 278, 414}


def mbpp(record: Record) -> TaskRow | None:
    """Read a record of MBPP. Its assertions name the function. The first is visible; all others are hidden."""
    lines = [line for name in ("test_list", "challenge_test_list") for line in record.get(name) or []]
    if not lines or not all(isinstance(line, str) for line in lines):
        raise FieldError("test_list", f"wanted assert statements, got {brief(lines)}")
    nodes = [node for line in lines for node in _parsed(line).body]
    fn_name = _asked_for(nodes)
    tests = [test for node in nodes if isinstance(node, ast.Assert) and (test := called(node, fn_name))]
    if record.get("task_id") in _MBPP_BEYOND_JSON or len(tests) < 2:
        return None
    problem = f"{text(record, 'text', 'prompt', 'problem')}\nYour code should pass this test:\n{lines[0]}"
    row = task(record, problem, tests[:1], tests[1:], fn_name)
    return row | {"id": f"mbpp-{row['id']}", "solution": str(record.get("code", ""))}


def _parsed(program: str) -> ast.Module:
    try:
        return ast.parse(program.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FieldError("test", f"not Python: {brief(program)} ({error})") from error


def _asked_for(nodes: list[ast.stmt]) -> str:
    """Return the name of the first function in the assertions that is not a built-in, or "" if there is none."""
    calls = [call.func.id for node in nodes for call in ast.walk(node)
             if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]  # fmt: skip
    if not calls:
        raise FieldError("test_list", "the assertions call no function")
    return next((name for name in calls if not hasattr(builtins, name)), calls[0])


def called(node: ast.Assert, fn_name: str) -> TestRow | None:
    """Turn ``assert f(1, (2, 3)) == 3`` into {input: [1, [2, 3]], output: 3}. Return None for other assertions.

    ``assert f(x)`` expects True, ``assert not f(x)`` expects False, and ``abs(f(x) - 3) < 1e-6`` expects 3, because floats
    are compared with this tolerance.
    """
    test = node.test
    expected: ast.expr = ast.Constant(True)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, expected = test.operand, ast.Constant(False)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        test, expected = _compared(test)
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == fn_name):
        return None
    try:
        values = [_jsonable(ast.literal_eval(part)) for part in (*test.args, expected)]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return None if test.keywords else {"input": values[:-1], "output": values[-1]}


def _compared(test: ast.Compare) -> tuple[ast.expr, ast.expr]:
    """Return the two sides of ``a == b`` or ``abs(a - b) < 1e-6``. Other comparisons are returned whole, as both sides."""
    left, right = test.left, test.comparators[0]
    if isinstance(test.ops[0], ast.Eq | ast.Is):
        return left, right
    tight = isinstance(right, ast.Constant) and isinstance(right.value, float) and right.value <= 1e-6
    if tight and isinstance(test.ops[0], ast.Lt) and isinstance(left, ast.Call) and len(left.args) == 1:
        inner = left.args[0]
        plain = isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub)
        if plain and isinstance(inner, ast.BinOp) and ast.unparse(left.func) in ("abs", "math.fabs"):
            return inner.left, inner.right
    return test, right


def _jsonable(value: object) -> object:
    """Return a value as JSON has it, with tuples as lists. Raise ``ValueError`` for values that JSON does not have."""
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _jsonable(part) for key, part in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"JSON has no {type(value).__name__}")
