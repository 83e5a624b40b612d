"""Reflective code: plan, code, verify, reflect, for at most `max_turns` turns.

    planner_t -> coder_t -> verify (tool) -> done if the visible tests pass, else reflector_t -> next turn

Roles see the visible tests and what the program did on them, never the hidden ones: the verifier returns
the hidden tests' result as its private part, for the rewards alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...agents.policies import Call
from ...agents.roles import Custom, FormatError, Role
from ...agents.text.reading import between, tag_split
from ..core.tasks import CODE
from ..core.workflow import Episode, Outcome, Workflow

STATE = 12_000  # characters of earlier turns that a prompt may hold


@dataclass(frozen=True)
class ReadTag:
    """Exactly one `<name>…</name>`; what is malformed still gives its text, so that it can be run."""

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
    """The reply format of all three roles."""
    return Custom(ReadTag(name), says=f"<{name}>…</{name}>", ends=(f"</{name}>",))


def middle_cut(text: str, most: int) -> str:
    """Keep the first and the last half of what is too long."""
    return text if len(text) <= most else f"{text[: most // 2]}\n…\n{text[-most // 2 :]}"


def tests_text(tests: Sequence[Mapping[str, Any]], most: int = 3) -> str:
    """The first visible tests with their expected outputs."""
    return middle_cut(
        "\n".join(f"{_plain(t['input'])} -> {_plain(t['output'])}" for t in tests[:most]), 3_000
    )


def _plain(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value)


def problem_text(task: Any) -> str:
    """The problem as every role reads it: what to write, and the visible tests."""
    how = f"Write a function {task.fn_name}." if task.get("fn_name") else "Read stdin and print."
    return f"Problem: {task.problem}\n{how}\nTests:\n{tests_text(task.visible_tests)}"


def checked_text(checked: Mapping[str, Any]) -> str:
    """Text about the visible tests: how many passed, and the first failure."""
    line = f"{checked['passed']} of {checked['total']} tests pass"
    return f"{line}\n{middle_cut(checked['first_failure'], 600)}" if checked.get("first_failure") else line


ROLES = (
    Role(
        "planner",
        reply=one_tag("pseudocode"),
        system="Plan a Python program for the problem. Write <pseudocode>plan</pseudocode>.",
    ),
    Role(
        "coder",
        reply=one_tag("code"),
        system="Write the Python program of the plan. Write <code>program</code>.",
    ),
    Role(
        "reflector",
        reply=one_tag("reflection"),
        system="Say what is wrong with the program and how to mend it. Write <reflection>advice</reflection>.",
    ),
)


class Code(Workflow):
    """Plan, code, verify, reflect."""

    roles = ROLES
    tools = ("verify",)
    schema = CODE

    def __init__(self, max_turns: int = 3) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns

    async def run(self, ep: Episode) -> Outcome:
        task = ep.task
        problem = problem_text(task)
        past: list[str] = []
        code = ""
        for t in range(self.max_turns):
            before = f"\nEarlier:\n{middle_cut(chr(10).join(past), STATE)}" if past else ""
            plan = (await ep.act("planner", problem + before, turn=t)).value
            start = f"\nStart from:\n{task.starter_code}" if task.get("starter_code") else ""
            code = (await ep.act("coder", f"{problem}{before}{start}\nPlan: {plan}", turn=t)).value
            checked = await ep.use("verify", program=code, fn_name=task.get("fn_name"))
            if checked["passed"] == checked["total"]:
                return Outcome(code=code, turns=t + 1, visible_passed=True)
            past.append(f"Program:\n{code}\nResult: {checked_text(checked)}")
            if t + 1 < self.max_turns:
                now = f"{problem}\nEarlier:\n{middle_cut(chr(10).join(past), STATE)}"
                past.append(f"Advice: {(await ep.act('reflector', now, turn=t)).value}")
        return Outcome(code=code, turns=self.max_turns, visible_passed=False)


def expert(call: Call) -> str:
    """The task's own solution, at once."""
    reference = call.task.reference
    if call.role == "planner":
        return f"<pseudocode>{(reference.get('steps') or ('write the program',))[0]}</pseudocode>"
    if call.role == "coder":
        return f"<code>\n{reference['solution']}\n</code>"
    return "<reflection>Follow the plan exactly.</reflection>"
