"""Worker process of symbolic comparisons, so that no answer can hang or kill the trainer.

It reads one JSON line ``{"predictions", "golds", "seconds"}`` at a time and writes "1", "0" or "e" (the grader failed on
this input). Each comparison has a limit of *processor* time. At the limit the kernel ends the process with SIGPROF, even
inside C code such as 9**9**9. The load of the machine does not matter. Memory is limited, too, files cannot be written,
and the environment is empty. ``processes.py`` starts a new process when it is needed.

The file is run by its path. The trainer never imports it, because it loads sympy.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

MEMORY = 3 << 30


def main() -> None:
    """Answer comparisons until standard input ends."""
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(20_000)
    _grader(), _numerals()  # the slow imports, before limits and before the first clock starts
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = _private_stdout()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            verdict = "1" if equal(asked["predictions"], asked["golds"]) else "0"
        except Exception:  # sympy may raise any error on hostile input: not equal
            verdict = "e"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(verdict, file=answers, flush=True)


def equal(predictions: list[str], golds: list[str]) -> bool:
    """Tell whether any reading of the predictions equals any reading of the gold answers."""
    readings = [reading for text in golds for reading in _parsed(text)]
    return any(_same(want, got) for text in predictions for got in _parsed(text) for want in readings)


def _parsed(text: str) -> list[object]:
    parse, _, targets = _grader()
    readings: list[object] = parse(text, targets, parsing_timeout=None)
    return readings


def _same(gold: object, prediction: object) -> bool:
    """Compare rational numbers with ``numerals.close``, and others with math-verify, except for its rounding errors."""
    _, verify, _ = _grader()
    left, right = _rational(gold), _rational(prediction)
    if left is not None and right is not None:
        return bool(_numerals().close(left, right))
    return bool(verify(gold, prediction, timeout_seconds=None)) and not _far_apart(gold, prediction)


def _rational(value: object) -> Fraction | None:
    """Return the exact value of an expression that is a rational number (2^10, 0.25), else None. Percentages give None."""
    import sympy

    if not isinstance(value, sympy.Expr) or value.free_symbols or value.has(sympy.UnevaluatedExpr):
        return None
    value = value.doit()
    if isinstance(value, sympy.Rational):
        return Fraction(int(value.p), int(value.q))
    if isinstance(value, sympy.Float) and value.is_finite:
        return Fraction(str(value))
    return None


def _far_apart(gold: Any, prediction: Any) -> bool:
    """Tell whether two numbers differ relatively. math-verify ignores tiny differences, so e^-100 would equal 0."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (gold, prediction)):
        return False
    if any(side.has(sympy.UnevaluatedExpr) for side in (gold, prediction)):
        return False  # percentages have two readings
    left, right = abs(sympy.N(gold, 30)), abs(sympy.N(prediction, 30))
    if not (left.is_Float or left.is_Rational) or not (right.is_Float or right.is_Rational):
        return False
    return bool(max(left, right) < 1e-6 and abs(left - right) > 1e-6 * max(left, right))


def _grader() -> tuple[Callable[..., Any], Callable[..., bool], list[object]]:
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    return parse, verify, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


@cache
def _numerals() -> ModuleType:
    """Load ``numerals.py`` by its path, because this file runs outside the package."""
    path = Path(__file__).with_name("numerals.py")
    spec = importlib.util.spec_from_file_location("numerals", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["numerals"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _private_stdout() -> TextIO:
    """Return the pipe to the parent, and drop all other output, so that prints of the libraries never mix with answers."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return answers


if __name__ == "__main__":
    main()
