"""Reflective code: plan, code, verify, reflect, for at most `max_turns` turns.

    planner_t -> coder_t -> verify (tool) -> done if the visible tests pass, else reflector_t -> next turn

Roles see the visible tests and the program's results on them, and never the hidden tests. The verifier returns the results
on the hidden tests as its private part, for the rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...agents.basics.frozen import View
from ...agents.policies import Call
from ...agents.roles import Custom, FormatError, Role
from ...agents.text.reply_readers import between, tag_split
from ..core.tasks import CODE
from ..core.workflow import Episode, Outcome, Workflow
from ..tools.defaults import Checked
from .parts import PROMPTS

STATE = 12_000  # characters of earlier turns that a prompt may hold


@dataclass(frozen=True)
class ReadTag:
    """Reader of exactly one `<name>…</name>`. A malformed reply still gives its text, so that it can be run."""

    name: str

    def __call__(self, text: str) -> str:
        opening, closing = f"<{self.name}>", f"</{self.name}>"
        tags, around = tag_split(text, self.name, most=3)
        alone = tags == [self.name, f"/{self.name}"] and not (around[0] + around[2]).strip()
        loose = around[1] if alone else between(text, (opening,), (closing,))
        if not alone and loose is not None:
            loose = loose[len(opening) : -len(closing)]
        inside = (text if loose is None else loose).strip("\n").rstrip()
        if alone and inside:
            return inside
        raise FormatError(f"one {opening}…{closing}", inside)


def one_tag(name: str) -> Custom:
    """Return the reply format of all three roles."""
    return Custom(ReadTag(name), says=f"<{name}>…</{name}>", ends=(f"</{name}>",))


def middle_cut(text: str, most: int) -> str:
    """Cut a text to `most` characters, by leaving out its middle."""
    return text if len(text) <= most else f"{text[: most // 2]}\n…\n{text[-most // 2 :]}"


def tests_text(tests: Sequence[Mapping[str, object]], most: int = 3) -> str:
    """Return the first visible tests as text, with their expected outputs."""
    return middle_cut(
        "\n".join(f"{_plain(t['input'])} -> {_plain(t['output'])}" for t in tests[:most]), 3_000
    )


def _plain(value: object) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value)


def problem_fields(task: View) -> dict[str, str]:
    """Return the fields of the problem for the prompts of all roles: its text and the visible tests."""
    return {
        "problem": task.problem, "fn_name": task.get("fn_name") or "", "tests": tests_text(task.visible_tests),
    }  # fmt: skip


def checked_text(checked: Checked) -> str:
    """Describe the results on the visible tests: how many passed, and the first failure."""
    line = f"{checked['passed']} of {checked['total']} tests pass"
    return f"{line}\n{middle_cut(checked['first_failure'], 600)}" if checked.get("first_failure") else line


def history_text(turns: Sequence[Mapping[str, str]]) -> str:
    """Return the programs of all turns as text, with their test results and the advice."""
    parts = []
    for turn in turns:
        parts.append(f"Program:\n{turn['program']}\nResult: {turn['result']}")
        if "advice" in turn:
            parts.append(f"Advice: {turn['advice']}")
    return middle_cut("\n".join(parts), STATE)


def turns_text(turns: Sequence[Mapping[str, str]]) -> str:
    """Return all turns as text, with plans, each under a heading."""
    parts = []
    for number, turn in enumerate(turns, 1):
        advice = f"\nAdvice: {turn['advice']}" if "advice" in turn else ""
        parts.append(
            f"Turn {number}\nPlan:\n{turn['plan']}\nProgram:\n{turn['program']}\nResult: {turn['result']}{advice}"
        )
    return middle_cut("\n".join(parts), STATE)


SEES = ("problem", "fn_name", "tests", "history", "turns")
ROLES = (
    Role("planner", reply=one_tag("pseudocode"), sees=SEES),
    Role("coder", reply=one_tag("code"), sees=(*SEES, "starter_code", "plan")),
    Role("reflector", reply=one_tag("reflection"), sees=(*SEES, "plan", "program", "result")),
)


class Code(Workflow):
    """Team of planner, coder and reflector, which writes and improves a program."""

    roles = ROLES
    tools = ("verify",)
    schema = CODE
    prompts = PROMPTS / "code.yaml"

    def __init__(self, max_turns: int = 3) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"attempts": self.max_turns}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        task = ep.task
        problem = problem_fields(task)
        turns: list[dict[str, str]] = []
        code = ""
        for t in range(self.max_turns):
            seen = {**problem, "history": history_text(turns), "turns": turns_text(turns)}
            plan = (await ep.act("planner", seen, turn=t)).value
            start = {"starter_code": task.get("starter_code") or "", "plan": plan}
            code = (await ep.act("coder", {**seen, **start}, turn=t)).value
            checked = await ep.use("verify", program=code, fn_name=task.get("fn_name"))
            if checked["passed"] == checked["total"]:
                return Outcome(code=code, turns=t + 1, visible_passed=True)
            now = {"plan": plan, "program": code, "result": checked_text(checked)}
            turns.append(now)
            if t + 1 < self.max_turns:
                seen = {**seen, "history": history_text(turns), **now}
                now["advice"] = (await ep.act("reflector", seen, turn=t)).value
        return Outcome(code=code, turns=self.max_turns, visible_passed=False)


def expert(call: Call) -> str:
    """Return the task's own solution, at once."""
    reference = call.task.reference
    if call.role == "planner":
        return f"<pseudocode>{(reference.get('steps') or ('write the program',))[0]}</pseudocode>"
    if call.role == "coder":
        return f"<code>\n{reference['solution']}\n</code>"
    return "<reflection>Follow the plan exactly.</reflection>"
