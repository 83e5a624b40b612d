"""Tests that a role wrote: whatever they hold, the hidden verdict stays what it is without them.

pytest tests/attacks/test_written_tests.py --fuzz 100000
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from unitymas.envs.core.tasks import CODE, Task
from unitymas.envs.tools.defaults import verify
from unitymas.envs.tools.sandbox.runner import SandboxError, resolve

try:
    resolve("auto")
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

READ = "print(sum(map(int, input().split())))"
CALL = "def add(a, b):\n    return a + b\ndef wrong(*rest):\n    return None"
STDIN = {"input": "1 2\n", "output": "3\n"}
ARGUMENTS = {"input": [1, 2], "output": 3}


def task(fn_name: str | None) -> Task:
    test = ARGUMENTS if fn_name else STDIN
    solution = CALL if fn_name else READ
    row = {
        "id": "t",
        "problem": "add",
        "visible_tests": [test],
        "hidden_tests": [test, test],
        "solution": solution,
    }
    return Task.of(row | ({"fn_name": fn_name} if fn_name else {}), CODE)


def judged(tests: Any, fn_name: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The public and the private part of a verdict over a tester's tests."""
    result = verify(None).fn(CALL if fn_name else READ, fn_name, task(fn_name), tests)  # type: ignore[arg-type]
    json.dumps([result.public, result.private])
    return result.public, result.private


def deep(levels: int, of: type = list) -> Any:
    """A value inside of so many lists, or tables."""
    value: Any = 1
    for _ in range(levels):
        value = [value] if of is list else {"a": value}
    return value


@pytest.mark.parametrize("fn_name", [None, "add"])
@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2", "output": "3", "fn_name": "wrong"}],
        [{"input": [1, 2], "output": 3, "fn_name": "wrong"}],
        [{"input": "\ud800", "output": "3"}],
        [{"input": ["\ud800", 1], "output": "\udfff"}],
        [{"input": {"a": 1}, "output": None}],
        [{"stdin": "1", "stdout": "1"}],
        {"public_tests": [STDIN], "fn_name": "wrong"},
        "[]",
        None,
        [],
        [None, 7, "x", []],
        [{"input": "9" * 10**6, "output": "9"}],
        [{"input": [float("nan"), float("inf")], "output": float("nan")}],
        [{"input": [deep(100), 1], "output": deep(100)}],
        [{"input": [deep(400), 1], "output": 3}],
        [{"input": [deep(970), 1], "output": 3}],
        [{"input": [deep(3000), 1], "output": deep(3000)}, STDIN],
        [{"input": [deep(900, dict), 1], "output": deep(900, dict)}],
        [{"input": "[" * 5000, "output": "]"}],
        [{"input": "[" * 900 + "]" * 900 + "\n1", "output": "3"}],
        [{"input": [10**5000, 1], "output": 3}],
        [{"input": [10**4000, 1], "output": 10**4000 + 1}],
        [{"input": "9" * 5000 + "\n1", "output": "3"}],
        [{"input": [1e400, 1], "output": -0.0}],
        [{"input": [{"nan": float("nan")}, 1], "output": {"": None}}],
        [STDIN] * 10_000,
        [{"input": "1 2\n" + " " * 250_000, "output": "x" * 10_000}] * 64,
        [{"input": "1\x002", "output": "\x00"}],
        [{"input": "1 2\r\n", "output": "3\r\n"}],
        [{"input": [{"\ud800": 1}, 2], "output": {"\udfff": 1}}],
        [{"input": "\x1b[2J1 2", "output": "\x1b]0;x\x07"}],
        [{"input": [["__import__", "os"], ["list", 0]], "output": ["set", [1]]}],
        [{"input": '[["list", 0]]', "output": '[["dict", 0]]'}],
        [
            {
                "input": [1, 2],
                "output": 3,
                "checker": "exact",
                "time_limit": 1e-9,
                "sandbox": "unsafe",
                "limits": {},
            }
        ],
        [{"input": "import os; os._exit(0)", "output": ""}],
        [{"input": True, "output": False}, {"input": "", "output": ""}, {"input": [], "output": None}],
        [{"input": list(range(5000)), "output": 3}],
        [{"input": {"__class__": "x", "__reduce__": 1}, "output": {"$ref": "#"}}],
        [["1 2", "3"], [[1, 2], 3], {"tests": [STDIN], "input": [1, 2], "output": 3}],
        [{"input": [{str(i): i for i in range(20_000)}, 1], "output": 3}],
    ],
)
def test_the_hidden_verdict_stands(tests: Any, fn_name: str | None) -> None:
    _, private = judged(tests, fn_name)
    assert (private["passed"], private["total"], private["pass_rate"]) == (2, 2, 1.0)


def test_tests_that_are_none_cost_their_author_alone() -> None:
    public, private = judged([STDIN, {"input": 1}, {"input": "\ud800", "output": "3", "fn_name": "f"}], None)
    assert private["golden"] == pytest.approx(1 / 3) and private["pass_rate"] == 1.0
    assert (public["passed"], public["total"]) == (1, 2)


# --- the fuzzer -----------------------------------------------------------------------------------------

KEYS = (
    "input",
    "output",
    "stdin",
    "outputs",
    "fn_name",
    "public_tests",
    "checker",
    "time_limit",
    "\ud800",
    "",
)
TEXTS = (
    "",
    "1 2\n",
    "\ud800",
    "\x00",
    "\udc80",
    "nan",
    "é" * 99,
    "[1, 2]",
    "1\n2",
    "wrong",
    "add",
    "__import__",
    "\r",
)
NUMBERS = (0, -1, 10**40, 1e308, float("nan"), float("-inf"), True, None)


def anything(chance: random.Random, depth: int = 0) -> Any:
    """JSON data of every kind, most of it out of place."""
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind < 2:
        return chance.choice(TEXTS)
    if kind < 4:
        return chance.choice(NUMBERS)
    items = [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return items if kind == 4 else {chance.choice(KEYS): item for item in items}


def hostile(chance: random.Random) -> Any:
    """A list of tests, some nearly right."""
    tests = []
    for _ in range(chance.randrange(4)):
        test = dict(chance.choice((STDIN, ARGUMENTS)))
        for _ in range(chance.randrange(3)):
            test[chance.choice(KEYS)] = anything(chance)
        tests.append(anything(chance) if chance.random() < 0.2 else test)
    return anything(chance) if chance.random() < 0.1 else tests


def test_fuzzed_lists_of_tests(fuzz: int) -> None:
    chance = random.Random(0)
    for n in range(max(20, fuzz // 10)):  # each costs some six programs
        tests, fn_name = hostile(chance), chance.choice((None, "add"))
        _, private = judged(tests, fn_name)
        assert (private["passed"], private["total"]) == (2, 2), (n, tests, fn_name)
