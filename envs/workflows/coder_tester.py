"""Coder and tester (Stronger-MAS): one writes the program, the other writes tests for it.

    coder_t | tester_t side by side -> verify (tool): the program on the tester's tests -> done if all pass

The tester is rewarded for tests that a right program passes, the coder for hidden tests that its program passes. In the next
turn, both see the results of the last program on the last tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...agents.policies import Call
from ...agents.roles import Custom, FormatError, Role, first_json_object
from ..core.tasks import CODE
from ..core.workflow import Episode, Outcome, Workflow
from .code import checked_text, one_tag, problem_fields, tests_text
from .parts import PROMPTS

MOST = 4  # tests of a tester's reply that are run
SEES = ("problem", "fn_name", "tests", "program", "written", "result")


def read_tests(text: str) -> list[dict[str, object]]:
    """Read the tests of a reply: {"tests": [{"input": …, "output": …}]}"""
    reply = first_json_object(text) or {}
    rows = reply.get("tests")
    tests = [t for t in rows if _is_test(t)][:MOST] if isinstance(rows, list) else []
    if not tests or len(tests) < min(len(rows), MOST):  # type: ignore[arg-type]
        raise FormatError('{"tests": [{"input": …, "output": …}]}', tests)
    return tests


def _is_test(test: object) -> bool:
    return isinstance(test, dict) and isinstance(test.get("input"), str | list) and "output" in test


class CoderTester(Workflow):
    """Team of a coder and a tester, for at most `max_turns` turns. Each program runs on the tester's tests of its turn."""

    schema = CODE
    tools = ("verify",)
    prompts = PROMPTS / "coder_tester.yaml"
    roles = (
        Role("coder", reply=one_tag("code"), sees=SEES),
        Role("tester", reply=Custom(read_tests), sees=SEES),
    )

    def __init__(self, max_turns: int = 3) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"attempts": self.max_turns, "most": MOST}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        task = ep.task
        seen = {**problem_fields(task), "program": "", "written": "", "result": ""}
        code = ""
        for t in range(self.max_turns):
            coded, tested = await ep.all(ep.act("coder", seen, turn=t), ep.act("tester", seen, turn=t))
            code = coded.value
            checked = await ep.use("verify", program=code, fn_name=task.get("fn_name"), tests=tested.value)
            if checked["total"] and checked["passed"] == checked["total"]:
                return Outcome(code=code, turns=t + 1, agreed=True)
            written = tests_text(tested.value, MOST)
            seen = {**seen, "program": code, "written": written, "result": checked_text(checked)}
        return Outcome(code=code, turns=self.max_turns, agreed=False)


def expert(call: Call) -> str:
    """Return the task's own solution, and as the tester's tests two of its hidden ones."""
    reference = call.task.reference
    if call.role == "coder":
        return f"<code>\n{reference['solution']}\n</code>"
    tests = [{"input": t["input"], "output": t["output"]} for t in reference["hidden_tests"][:2]]
    return json.dumps({"tests": tests})
