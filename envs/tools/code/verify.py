"""Verification of a program: `verify_code` runs it on each test, in a process of its own in the sandbox.

    report = verify_code("print(sum(map(int, input().split())))", [{"input": "1 2\\n", "output": "3\\n"}])
    report.all_passed, report.verdicts, report.sandbox

Expected outputs never enter the sandbox. The program's output and return values leave it and are compared here. So a
program that changes its process, its clock or Python's equality changes only its own answer.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ....agents.text.reply_readers import first_tagged, split_thinking
from ..sandbox.launch import SandboxLevel
from ..sandbox.runner import Limits, Program, ProgramResult, resolve, submit
from ..sandbox.values import decode, encode
from .cases import Case, read_tests
from .checkers import (
    Checker,
    same_bytes,
    same_items_in_any_order,
    same_text,
    same_tokens_in_any_order,
    same_value,
)

__all__ = ["CaseReport", "Report", "Verdict", "averify_code", "extract_code", "verify_code"]

CHECKERS = ("standard", "exact", "unordered")
MOST_TESTS = 10_000  # of one program
_AHEAD = 16  # cases that may run before the judge has compared earlier ones
_OUTPUTS = 4  # times `output_mb`: limit on all outputs of one program together
_SHOWN = 2000  # characters of a program's output that a report keeps


class Verdict(str, Enum):
    """Verdict on a program for one test."""

    accepted = "accepted"
    wrong_answer = "wrong_answer"
    time_limit = "time_limit"
    memory_limit = "memory_limit"
    runtime_error = "runtime_error"
    output_limit = "output_limit"
    compile_error = "compile_error"
    sandbox_violation = "sandbox_violation"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class CaseReport:
    """Outcome of one test. `error` and `stdout` contain only what the program itself wrote, and nothing of the test."""

    verdict: Verdict
    error: str
    stdout: str  # its head
    stderr: str  # its end
    value: str | None  # return value of the function, as JSON (its head)
    exit_code: int
    cpu: float
    wall: float
    case: Case

    def explain(self) -> str:
        """Describe the test in a few lines: input, expected output, actual output. Only for roles that may see the test."""
        if self.verdict is Verdict.accepted:
            return "accepted"
        got = self.value if self.value is not None else self.stdout
        parts = [
            ("input", _show(self.case.input)),
            ("expected", _show(self.case.expected)),
            ("got", got.strip()),
        ]
        lines = [f"{self.verdict}: {self.error}" if self.error else str(self.verdict)]
        return "\n".join(lines + [f"{name}: {text[:_SHOWN]}" for name, text in parts])

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON without the test, so hidden tests stay hidden in a trace."""
        names = ("error", "stdout", "stderr", "value", "exit_code", "cpu", "wall")
        return {"verdict": str(self.verdict), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class Report:
    """Report on one program: the cases in the order of its tests, and the level of the sandbox."""

    cases: tuple[CaseReport, ...]
    sandbox: SandboxLevel

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts in the order of the tests."""
        return [case.verdict for case in self.cases]

    @property
    def passed(self) -> int:
        """Number of tests that the program passed."""
        return self.verdicts.count(Verdict.accepted)

    @property
    def total(self) -> int:
        """Number of tests."""
        return len(self.cases)

    @property
    def all_passed(self) -> bool:
        """Flag: the program passed all tests, and there is at least one."""
        return self.total > 0 and self.passed == self.total

    @property
    def pass_rate(self) -> float:
        """Share of tests that the program passed; 0 without tests."""
        return self.passed / self.total if self.total else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON, without the tests."""
        totals = {"passed": self.passed, "total": self.total, "pass_rate": self.pass_rate}
        cases = [case.to_dict() for case in self.cases]
        return {"sandbox": self.sandbox, **totals, "all_passed": self.all_passed, "cases": cases}


def verify_code(
    program: str,
    tests: object,
    time_limit: float = 1.0,
    memory_mb: int = 512,
    fn_name: str | None = None,
    sandbox: str = "auto",
    checker: str | Checker = "standard",
    float_tolerance: float = 1e-6,
    limits: Limits | None = None,
) -> Report:
    """Run `program` on each test, several at a time, and compare its outputs.

    A test is `{input, output}`: texts for stdin and stdout, or with `fn_name` a list of arguments and the expected return
    value (`cases` lists other forms). `checker` is "standard", "exact", "unordered" or a function of (output, expected
    output, input). `limits` replaces `time_limit` and `memory_mb`, and sets all other limits.
    """
    limits = limits or Limits(time_limit=time_limit, memory_mb=memory_mb)
    judge = _Judge(program, tests, limits, fn_name, sandbox, checker, float_tolerance)
    try:
        return judge.report(
            [judge.judge(case, None if run is None else run.result()) for case, run in judge.runs()]
        )
    finally:
        judge.cancel()


async def averify_code(
    program: str,
    tests: object,
    time_limit: float = 1.0,
    memory_mb: int = 512,
    fn_name: str | None = None,
    sandbox: str = "auto",
    checker: str | Checker = "standard",
    float_tolerance: float = 1e-6,
    limits: Limits | None = None,
) -> Report:
    """Do what `verify_code` does without blocking the event loop. A cancellation drops the cases that have not begun."""
    limits = limits or Limits(time_limit=time_limit, memory_mb=memory_mb)
    judge = _Judge(program, tests, limits, fn_name, sandbox, checker, float_tolerance)
    try:
        reports = []
        for case, run in judge.runs():
            if run is None:
                reports.append(judge.judge(case, None))
            else:
                result: ProgramResult = await asyncio.wrap_future(run)
                reports.append(judge.judge(case, result))
        return judge.report(reports)
    finally:
        judge.cancel()


class _Judge:
    """Judge of one program: it runs the tests and compares the outputs."""

    def __init__(
        self,
        program: str,
        tests: object,
        limits: Limits,
        fn_name: str | None,
        sandbox: str,
        checker: str | Checker,
        tolerance: float,
    ) -> None:
        if not callable(checker) and checker not in CHECKERS:
            raise ValueError(f"checker={checker!r}; there are {', '.join(CHECKERS)}, or give a callable")
        self.program, self.limits = program, limits
        self.cases, self.fn_name = read_tests(tests, fn_name)
        self.checker, self.tolerance = checker, tolerance
        if len(self.cases) > MOST_TESTS:
            raise ValueError(
                f"{len(self.cases)} tests for one verdict; at most {MOST_TESTS} are judged at once"
            )
        self.sandbox = resolve(sandbox)
        self.output_left = _OUTPUTS * limits.output_mb << 20  # characters that are read and compared
        self.started: deque[tuple[Case, Future[ProgramResult] | None]] = deque()

    def runs(self) -> Iterator[tuple[Case, Future[ProgramResult] | None]]:
        """Yield the cases in order, with a few more already running. A case that exceeds the limit on outputs has None."""
        waiting = iter(self.cases)
        while True:
            while len(self.started) < _AHEAD and (case := next(waiting, None)) is not None:
                run = submit(self._run(case), self.limits, self.sandbox) if self.output_left > 0 else None
                self.started.append((case, run))
            if not self.started:
                return
            yield self.started.popleft()

    def cancel(self) -> None:
        """Drop the cases that have not begun, after an error or a cancellation."""
        for _, run in self.started:
            if run is not None:
                run.cancel()

    def report(self, judged: Sequence[CaseReport]) -> Report:
        return Report(tuple(judged), self.sandbox)

    def _run(self, case: Case) -> Program:
        if self.fn_name is None:
            return Program(self.program, stdin=case.input)
        return Program(self.program, fn_name=self.fn_name, arguments=encode(case.input))

    def judge(self, case: Case, result: ProgramResult | None) -> CaseReport:
        """Compare the output, and keep only its head, because thirty outputs of 16 MB would fill the host's memory."""
        if result is not None:
            self.output_left -= len(result.stdout) + len(result.value or "")
        if result is None or (result.ok and self.output_left <= 0):
            error = f"all outputs together are past {_OUTPUTS * self.limits.output_mb} MB"
            return CaseReport(Verdict.output_limit, error, "", "", None, 0, 0.0, 0.0, case)
        verdict, error, value = Verdict.wrong_answer, result.error, None
        if not result.ok:
            verdict = Verdict(result.ended)
        else:
            try:
                got: object = result.stdout
                if self.fn_name is not None:
                    got = self._returned(case, result.value or "")
                    value = written(got)[:_SHOWN]
                verdict = Verdict.accepted if self._right(case, got) else Verdict.wrong_answer
            except Exception as fault:  # of a hostile value or the caller's checker: only this case fails
                error = f"could not be compared: {type(fault).__name__}: {fault}"[:_SHOWN]
        stdout, stderr = result.stdout[:_SHOWN], result.stderr[-_SHOWN:]
        return CaseReport(
            verdict, error, stdout, stderr, value, result.exit_code, result.cpu, result.wall, case
        )

    def _returned(self, case: Case, text: str) -> object:
        """Return the value that the function returned. A value much larger than the expected one is not read."""
        if not callable(self.checker) and len(text) > (1 << 20) + 8 * len(encode(case.expected)):
            raise ValueError(f"the value takes {len(text)} characters, far more than the expected one")
        return decode(text)

    def _right(self, case: Case, got: Any) -> bool:
        if self.fn_name is None:
            return self._same_output(case, got)
        if self._same_return(case, got, case.expected):
            return True
        unwrappable = case.wrapped and isinstance(case.expected, list) and len(case.expected) == 1
        return unwrappable and self._same_return(case, got, case.expected[0])

    def _same_output(self, case: Case, got: str) -> bool:
        if callable(self.checker):
            return bool(self.checker(got, case.expected, case.input))
        if self.checker == "exact":
            return same_bytes(got, case.expected)
        if self.checker == "unordered":
            return same_tokens_in_any_order(got, case.expected)
        return same_text(got, case.expected, self.tolerance)

    def _same_return(self, case: Case, got: object, expected: object) -> bool:
        if callable(self.checker):
            return bool(self.checker(got, expected, case.input))
        if self.checker == "unordered":
            return same_items_in_any_order(got, expected, self.tolerance)
        return same_value(got, expected, 0.0 if self.checker == "exact" else self.tolerance)


_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*$", re.MULTILINE)
_MOST_PARSED = 200_000  # characters of code fences that are parsed, beginning with the last fence


def extract_code(text: str) -> str:
    """Return the program in a reply: the first <code>, or else the last code fence that parses, or else the whole text."""
    text = split_thinking(text)[1]
    tagged = first_tagged(text, "code", strip=False)
    text = text if tagged is None else tagged
    marks = list(_FENCE.finditer(text))
    fences = [
        text[opening.end() + 1 : closing.start()]
        for opening, closing in zip(marks[::2], marks[1::2], strict=False)
        if opening[1].lower() in ("", "py", "python", "python3")
    ]
    left = _MOST_PARSED
    for body in reversed(fences):
        left -= len(body) + 1000  # empty fences have a price, too
        if left < 0:
            break
        if _parses(body):
            return body.strip("\r\n")
    return (fences or [text])[-1].strip("\r\n")


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def written(value: object) -> str:
    """Return a value as JSON, or as Python writes it if JSON cannot."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or too deep nesting
        return f"<{type(value).__name__}>"


def _show(value: object) -> str:
    return value.strip() if isinstance(value, str) else written(value)
