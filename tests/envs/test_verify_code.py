"""Verdicts: each kind, every valid program that other judges fail, every wrong one that they pass."""

from __future__ import annotations

import asyncio
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.envs.tools import verify_code
from unitymas.envs.tools.code.checkers import same_text, same_value
from unitymas.envs.tools.code.verify import Report, Verdict, averify_code, extract_code
from unitymas.envs.tools.sandbox.runner import Limits, SandboxError, resolve

try:
    resolve("auto")
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)


def verdict(program: str, given: Any = "", expected: Any = "", **options: Any) -> str:
    report = verify_code(program, [{"input": given, "output": expected}], **options)
    assert report.total == 1
    return str(report.verdicts[0])


# --- the eight verdicts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, expected",
    [
        ("print(int(input()) + 1)", "accepted"),
        ("print(input())", "wrong_answer"),
        ("while True: pass", "time_limit"),
        ("x = [0] * 10**9", "memory_limit"),
        ("raise RuntimeError('connection time out')", "runtime_error"),  # a word is not a time limit
        ("import sys; sys.exit(3)", "runtime_error"),
        ("while True: print('x' * 10**6)", "output_limit"),
        ("def f(:", "compile_error"),
        ("x = '\0'", "compile_error"),
        ("import socket; socket.socket()", "sandbox_violation"),
    ],
)
def test_verdicts(program: str, expected: str) -> None:
    assert verdict(program, "1\n", "2\n") == expected


def test_an_error_while_running_is_not_one_of_compiling() -> None:
    assert verdict("exec('def f(:')") == "runtime_error"


def test_report() -> None:
    tests = [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}, {"input": "3", "output": "secret"}]
    report = verify_code("n = input()\nif n == '2': raise ValueError(n)\nprint(n)", tests)
    assert report.verdicts == ["accepted", "runtime_error", "wrong_answer"]
    assert (report.passed, report.total, report.all_passed) == (1, 3, False)
    assert report.pass_rate == pytest.approx(1 / 3)
    assert report.sandbox in ("bubblewrap", "namespaces")
    assert report.cases[1].error == "ValueError: 2" and 'File "program.py", line 2' in report.cases[1].stderr
    assert report.cases[1].stderr.count('File "') == 1  # no line of the sandbox's own
    assert "secret" not in json.dumps(report.to_dict()) and "secret" in report.cases[2].explain()


def test_no_tests_is_not_all_passed() -> None:
    assert not verify_code("print()", []).all_passed


# --- valid programs that other judges fail ------------------------------------------------------------


@pytest.mark.parametrize(
    "program, given, expected",
    [
        ("from math import *\nprint(__builtins__.pow(3, 200, 13) if 0 else 9)", "", "9"),
        ("print(pow(3, 200, 13))", "", "9"),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "1 2\n3", "6"),
        ("import sys\nsys.stdout.buffer.write(b'6')", "", "6"),
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc"),
        ("print(open(0).read())", "x y\n", "x y"),
        ("print(open('/dev/stdin').read())", "x", "x"),
        ("import os\nos.write(1, os.read(0, 99))", "hi\n", "hi\n"),
        ("from __future__ import annotations\nprint(1)", "", "1"),
        ("import os\nprint(5, flush=True)\nos._exit(0)", "", "5"),
        ("import sys\nprint(5)\nsys.exit()", "", "5"),
        ("print(5)\nexit(0) if 'exit' in dir(__builtins__) else quit() if 0 else None", "", "5"),
        ("import atexit\natexit.register(print, 'late')", "", "late"),
        ("import threading\nthreading.Thread(target=lambda: print('t')).start()", "", "t"),
        ("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
         "def f(n): return n and f(n - 1) + 1\nt = threading.Thread(target=lambda: print(f(50000)))\nt.start(); t.join()",
         "", "50000"),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1) + 1\nprint(f(20000))", "", "20000"),
        ("def f(n): return n and f(n - 1) + 1\nprint(f(980))", "", "980"),
        ("if __name__ == '__main__': print('main')", "", "main"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))", "", "P(x=1)"),
        ("import pickle\nclass P: pass\npickle.loads(pickle.dumps(P()))\nprint('ok')", "", "ok"),
        ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", "", "7"),
        ("from multiprocessing import Pool\ndef f(x): return x * x\nwith Pool(2) as p: print(sum(p.map(f, range(4))))", "", "14"),
        ("from concurrent.futures import ThreadPoolExecutor as T\nwith T(3) as t: print(sum(t.map(abs, range(4))))", "", "6"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "", "3"),
        ("import heapq, bisect, collections, itertools, functools, string, re, decimal, fractions, random, datetime\nprint(1)", "", "1"),
        ("print('é ∑ 漢')", "", "é ∑ 漢"),
        ("\ufeffprint(1)", "", "1"),
        ("import signal\nprint(1)", "", "1"),
        ("try:\n    [0] * 10**10\nexcept MemoryError:\n    print('small')", "", "small"),
        ("print('x' * 10**6)", "", "x" * 10**6),
        ("print(len(input()))", "y" * 3_000_000, "3000000"),
    ],
)  # fmt: skip
def test_valid_programs_pass(program: str, given: str, expected: str) -> None:
    report = verify_code(program, [{"input": given, "output": expected}], time_limit=5.0)
    assert report.all_passed, report.cases[0]


def test_wildcard_import_leaves_pow_alone() -> None:
    """`from os import *` and friends were made to shadow the built-in in the harness this one replaces."""
    program = (
        "from collections import *\nfrom itertools import *\nfrom heapq import *\nprint(pow(2, 10, 1000))"
    )
    assert verdict(program, "", "24") == "accepted"


def test_numpy() -> None:
    pytest.importorskip("numpy")
    assert verdict("import numpy as np\nprint(np.arange(4) @ np.arange(4))", "", "14") == "accepted"
    calls = "import numpy as np\ndef f(x): return np.array(x) * 2"
    assert verdict(calls, [[1, 2]], [2, 4], fn_name="f") == "accepted"
    assert verdict("import numpy as np\nnp.ones((1 << 20, 1 << 10))") == "memory_limit"


# --- calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, arguments, expected, right",
    [
        ("def f(s, n): return s * n", ["ab", 2], "abab", True),
        ("def f(b): return not b", [True], False, True),
        ("def f(b): return 1", [True], True, True),  # MBPP 414's own solution
        ("def f(b): return 'true'", [True], True, False),
        ("def f(x): return x + 1e-9", [1.0], 1.0, True),
        ("def f(x): return x + 1e-3", [1.0], 1.0, False),
        ("def f(x): return 1000001", [1], 1000000, False),
        ("def f(x): return 2.0", [1], 2, True),
        ("def f(x): return 2.0000001", [1], 2, False),
        ("def f(x): return 10**30 + 1", [1], 10**30, False),
        ("def f(x): return '2'", [1], 2, False),
        ("def f(): return None", [], None, True),
        ("def f(): return (1, [2, (3,)])", [], [1, [2, [3]]], True),
        ("def f(): return {1: 'a'}", [], {"1": "a"}, True),
        ("def f(): return {3, 1, 2}", [], [1, 2, 3], True),
        ("def f(): return range(3)", [], [0, 1, 2], True),
        ("def f(x): return [1]", [0], 1, False),
        ("class Solution:\n    def f(self, x: List[int]) -> int: return max(x)", [[1, 3]], 3, True),
        ("def f(x):\n    print('noise')\n    return x", [5], 5, True),
        ("if __name__ == '__main__': input()\ndef f(): return 1", [], 1, True),
        ("class E:\n    def __eq__(self, other): return True\ndef f(): return E()", [], 1, False),
        ("class S(str):\n    def __eq__(self, other): return True\ndef f(): return S('x')", [], "y", False),
        ("def f(): return float('nan')", [], 1.0, False),
    ],
)  # fmt: skip
def test_calls(program: str, arguments: list[Any], expected: Any, right: bool) -> None:
    assert (verdict(program, arguments, expected, fn_name="f") == "accepted") is right


NESTED = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({1, 2}, {1, 2}),
        (frozenset({"a"}), {"a"}),
        ((1, (2, [3])), (1, (2, [3]))),
        ({1: "a", None: "b", (2, 3): [4]}, {1: "a", None: "b", (2, 3): [4]}),
        (math.nan, math.nan),
        ([math.inf, -math.inf], [math.inf, -math.inf]),
        (b"\x00\xff", b"\x00\xff"),
        (Fraction(1, 3), Fraction(1, 3)),
        (Decimal("0.10"), Decimal("0.1")),
        (Fraction(1, 2), 0.5),
        (1 + 2j, 1 + 2j),
        (10**4000, 10**4000),
        ("\ud800", "\ud800"),
        (NESTED, NESTED),
    ],
)
def test_any_plain_value_crosses_both_ways(given: Any, expected: Any) -> None:
    same_kind = f"def f(x):\n    assert type(x).__name__ == {type(given).__name__!r}\n    return x"
    assert verdict(same_kind, [given], expected, fn_name="f") == "accepted"
    assert verdict(same_kind, [given], [given], fn_name="f") == "wrong_answer"


def test_a_fraction_too_long_to_be_reduced_is_not_read() -> None:
    """Two numbers of two million bits: reducing them took 2.6 s of the judge's own time, and more as they grow."""
    program = (
        "from fractions import Fraction\nfrom random import getrandbits\ndef f():\n    made = object.__new__(Fraction)\n"
        "    made._numerator, made._denominator = getrandbits(2_000_000), getrandbits(2_000_000)\n    return made"
    )
    (case,) = verify_code(program, [{"input": [], "output": 5}], fn_name="f").cases
    assert (case.verdict, "a fraction of more than" in case.error) == ("wrong_answer", True)


def test_items_in_any_order_are_equal_as_in_python() -> None:
    for returned, expected in (("[2.0, 1]", [1, 2]), ("[(1, 2), [3]]", [[3], [1, 2]]), ("{3, 1}", [1, 3])):
        program = f"def f(): return {returned}"
        assert verdict(program, [], expected, fn_name="f", checker="unordered") == "accepted"
    assert verdict("def f(): return [1, 1, 2]", [], [1, 2, 2], fn_name="f", checker="unordered") != "accepted"


def test_all_outputs_of_a_verdict_are_bounded() -> None:
    """Nine outputs of 1 MB where 4 MB are read: the rest is neither compared nor run."""
    report = verify_code("print('x' * 10**6)", [["", "x" * 10**6]] * 40, limits=Limits(output_mb=1))
    assert report.verdicts == ["accepted"] * 4 + ["output_limit"] * 36
    assert report.cases[-1].wall == 0.0 and "past 4 MB" in report.cases[-1].error


def test_the_number_of_tests_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most 10000"):
        verify_code("print()", [["", ""]] * 10_001)


def test_a_value_of_colliding_keys_is_not_built() -> None:
    """Thousands of integers with one hash would take the host minutes to put into a set."""
    program = "import sys\ndef f(): return {k * sys.hash_info.modulus for k in range(200)}"
    assert verdict(program, [], {1}, fn_name="f") == "wrong_answer"


def test_a_call_that_never_returns_its_value() -> None:
    for program in (
        "import os\nos._exit(0)",
        "import sys\nsys.exit()",
        "def g(): pass",
        "def f(): raise KeyError",
    ):
        assert verdict(program, [], None, fn_name="f") == "runtime_error"


def test_a_forked_process_has_no_say_in_the_verdict() -> None:
    fork = "import os\npid = os.fork()\nif pid == 0: raise ValueError('child')\nos.waitpid(pid, 0)\n"
    assert verdict(fork + "print(1)", "", "1") == "accepted"
    both = "def f():\n    import os\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\n    return 1 if pid else 2"
    assert verdict(both, [], 1, fn_name="f") == "accepted"


def test_each_case_has_its_own_process() -> None:
    """Module state does not carry over, and a crash spoils one case only."""
    program = "seen = []\ndef f(x):\n    seen.append(x)\n    if x == 2:\n        import os; os.kill(0, 11); os._exit(9)\n    return len(seen)"
    report = verify_code(program, [{"input": [n], "output": 1} for n in (1, 2, 3)], fn_name="f")
    assert report.verdicts == ["accepted", "runtime_error", "accepted"]


@pytest.mark.parametrize(
    "program",
    [
        "import json\njson.dumps = lambda *a, **k: '7'\njson.loads = lambda *a: []\ndef f(): return 7",
        "import builtins\nbuiltins.all = builtins.bool = lambda *a: True\nint.__eq__ if 0 else None\ndef f(): return 6",
        "import sys\nfor m in list(sys.modules.values()):\n    for n in dir(m):\n        if 'same' in n or 'verdict' in n: setattr(m, n, lambda *a: True)\ndef f(): return 6",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    print({k: v for k, v in frame.f_locals.items() if 'expect' in k})\n    frame = frame.f_back\ndef f(): return 6",
        "import os\nos.write(3, b'{\"value\": \"7\"}\\n')\nos._exit(0)",
        "import os\ndef f():\n    for fd in range(3, 60):\n        try: os.write(fd, b'{\"verdict\": \"accepted\"}\\n')\n        except OSError: pass\n    return 7",
    ],
)  # fmt: skip
def test_patching_the_judge_from_inside(program: str) -> None:
    """What compares is elsewhere; what was expected (8) is not in there to be found."""
    report = verify_code(program, [{"input": [], "output": 8}], fn_name="f")
    assert not report.all_passed


# --- forms of tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2", "output": "3"}],
        [{"stdin": "1 2", "stdout": "3"}],
        [{"input": "1 2", "expected_output": "3"}],
        [["1 2", "3"]],
        {"inputs": ["1 2", "2 2"], "outputs": ["3", "4"]},
        {"input": "1 2", "output": "3"},
        {
            "public_tests": {"input": ["1 2"], "output": ["3"]},
            "private_tests": {"input": ["1 2"], "output": ["9"]},
        },
        '[{"input": "1 2", "output": "3"}]',
        json.dumps({"inputs": [["1 2"]], "outputs": [["3"]]}),
    ],
)
def test_forms_of_stdin_tests(tests: Any) -> None:
    assert verify_code("print(sum(map(int, input().split())))", tests).all_passed


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"},
        {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"},
        [{"input": "1\n2", "output": "3", "fn_name": "f"}],
        json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}),
    ],
)
def test_forms_of_call_tests(tests: Any) -> None:
    assert verify_code("def f(a, b): return a + b", tests).all_passed


@pytest.mark.parametrize(
    "tests, said",
    [
        ([{"in": 1}], "tests[0] has none of the keys input"),
        ("{", "not JSON"),
        (7, "expected a list"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
    ],
)
def test_malformed_tests(tests: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("]", r"\]")):
        verify_code("print()", tests)


def test_arguments_must_be_a_list() -> None:
    with pytest.raises(ValueError, match="list of arguments"):
        verify_code("def f(): pass", [{"input": 3, "output": 3}], fn_name="f")


# --- checkers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "got, expected, right",
    [
        ("1000001", "1000000", False),
        ("1000000", "1000000", True),
        ("007", "7", True),
        ("-0", "0", True),
        ("5.0", "5", True),
        ("5.0000001", "5", False),
        ("0.33333334", "0.333333333", True),
        ("0.3334", "0.3333333", False),
        ("1e3", "1000.0", True),
        ("nan", "1.0", False),
        ("inf", "1.5", False),
        ("1_000", "1000", False),
        ("YES", "yes", True),
        ("Yes\nno", "YES\nNO", True),
        ("True", "true", False),
        ("1 2\n3", "1 2 3", False),
        ("1  2 \n\n3\n", "1 2\n3", True),
        ("", "", True),
        ("", "0", False),
        ("9" * 500, "9" * 499 + "8", False),
        ("1e999999999", "1.5", False),
    ],
)
def test_standard_text(got: str, expected: str, right: bool) -> None:
    assert same_text(got, expected, 1e-6) is right


@given(st.integers(), st.integers())
def test_integers_compare_exactly(got: int, expected: int) -> None:
    assert same_text(str(got), str(expected), 1e-6) is (got == expected)
    assert same_value(got, expected, 1e-6) is (got == expected)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.floats(-1e-3, 1e-3))
def test_floats_compare_as_isclose_does(expected: float, error: float) -> None:
    got = expected * (1 + error)
    near = math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6)
    if abs(abs(got - expected) / max(1.0, abs(expected)) - 1e-6) > 1e-8:
        assert same_value(got, float(expected), 1e-6) is (
            abs(got - expected) <= 1e-6 * max(1.0, abs(expected))
        )
        assert near or not same_value(got, float(expected), 1e-6)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_values_without_floats_compare_as_python_does(got: Any, expected: Any) -> None:
    assert same_value(got, expected, 1e-6) is (got == expected)
    assert same_value(got, got, 0.0)


@settings(max_examples=15, deadline=None)
@given(st.lists(JSON, max_size=4))
def test_values_cross_unchanged(values: list[Any]) -> None:
    assert verdict("def f(x): return x", [values], values, fn_name="f", checker="exact") == "accepted"


def test_named_and_own_checkers() -> None:
    assert verdict("print('b a')", "", "a b", checker="unordered") == "accepted"
    assert verdict("print('a  b')", "", "a b", checker="exact") == "wrong_answer"
    assert verdict("def f(): return [2, 1]", [], [1, 2], fn_name="f", checker="unordered") == "accepted"
    assert (
        verdict("print(4)", "2", "any", checker=lambda got, want, given: int(got) % int(given) == 0)
        == "accepted"
    )
    with pytest.raises(ValueError, match="standard"):
        verify_code("print()", [], checker="fuzzy")


def test_a_checker_that_chokes_on_an_answer() -> None:
    report = verify_code("print('x')", [["", "1"]], checker=lambda got, want, given: int(got) == int(want))
    assert report.verdicts == [Verdict.wrong_answer] and "ValueError" in report.cases[0].error


def test_hostile_values() -> None:
    deep = "def f():\n    x = []\n    for _ in range({n}): x = [x]\n    return x"
    for n in (900, 100_000):
        assert verdict(deep.format(n=n), [], 1, fn_name="f") in ("wrong_answer", "runtime_error")
    assert verdict("def f(): return 10**5000", [], 1, fn_name="f") == "wrong_answer"


# --- the rest -----------------------------------------------------------------------------------------


def test_limits() -> None:
    with pytest.raises(ValueError, match="memory_mb is 0"):
        verify_code("print()", [["", ""]], memory_mb=0)
    assert verdict("x = bytes(300 << 20)", memory_mb=200) == "memory_limit"
    assert verdict("x = bytes(300 << 20)", memory_mb=400) == "accepted"
    assert (
        verdict("import time\ntime.sleep(0.5)", limits=Limits(0.2)) == "accepted"
    )  # sleep is not processor time


def test_refuses_an_unknown_level() -> None:
    with pytest.raises(ValueError, match="namespaces"):
        verify_code("print()", [], sandbox="docker")


def test_unsafe_says_so_and_judges_alike() -> None:
    report = verify_code("print(input())", [["a", "a"], ["b", "c"]], sandbox="unsafe")
    assert report.sandbox == "unsafe" and report.verdicts == ["accepted", "wrong_answer"]
    assert verdict("while True: pass", sandbox="unsafe", limits=Limits(0.2)) == "time_limit"


def test_many_at_once_asynchronously() -> None:
    async def judge() -> list[Report]:
        return await asyncio.gather(*(averify_code("print(input())", [[str(n), str(n)]]) for n in range(40)))

    assert all(report.all_passed for report in asyncio.run(judge()))


def test_order_is_kept() -> None:
    tests = [{"input": str(n), "output": str(n % 3)} for n in range(30)]
    report = verify_code("n = int(input())\nprint(n % 3 if n % 5 else -1)", tests)
    assert [case.case.input for case in report.cases] == [test["input"] for test in tests]
    assert [v == "accepted" for v in report.verdicts] == [n % 5 != 0 for n in range(30)]


@pytest.mark.parametrize(
    "reply, code",
    [
        ("<code>\nprint(1)\n</code> and <code>print(2)</code>", "print(1)"),
        ("<code>```python\nprint(1)\n```</code>", "print(1)"),
        ("a\n```python\nprint(1)\n```\nb\n```py\nprint(2)\n```\n", "print(2)"),
        ("```python\nprint(1)\n```\n```python\nprint(\n```\n", "print(1)"),
        ("```\nprint(1)\n```\n```bash\nls -l\n```\n", "print(1)"),
        ("print(1)", "print(1)"),
    ],
)
def test_extract_code(reply: str, code: str) -> None:
    assert extract_code(reply) == code
