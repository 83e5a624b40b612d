"""What a role says is read in time linear in its length, whatever it is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

import unitymas
from unitymas.agents.policies import FoolPolicy
from unitymas.agents.roles import Format, read_reply
from unitymas.envs.tools.code.verify import extract_code
from unitymas.envs.tools.math.equal import extract_answer
from unitymas.envs.tools.retrieval.index.terms import Analyzer
from unitymas.envs.workflows.parts import first_line
from unitymas.rewards.metrics import exact_match, f1

from .texts import hostile, tags_of

MB = 1_000_000
SECONDS = 1.0  # of processor time; the slowest takes a quarter of it


def registered_formats() -> dict[str, Format]:
    """Every way in which a role of a registered environment is read: as declared, and as asked in an episode."""
    formats: dict[str, Format] = {}
    for id in unitymas.list_envs():
        known = unitymas.spec(id)
        asked = [role.reply for role in known.roles]
        if id.endswith(("-solo", "-duo", "-tool")):  # these ask with the board's own moves
            (trace,) = unitymas.rollout(id, FoolPolicy(), tasks=1, budget={"requests": 4})
            asked += [node.format for node in trace.acts()]
        for form in asked:
            key = f"{type(form).__name__} {form.describe()[:60]} {getattr(form, 'read', '')!s:.60}"
            formats.setdefault(key, form)
    return formats


FORMATS = registered_formats()


def test_all_environments_are_here() -> None:
    assert len(unitymas.list_envs()) >= 30 and len(FORMATS) >= 30
    kinds = {type(form).__name__ for form in FORMATS.values()}
    assert kinds >= {"Tags", "Json", "Choice", "Boxed", "Custom", "ToolCalls"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_registered_format_reads_a_megabyte_in_a_second(name: str) -> None:
    form = FORMATS[name]
    for attack, text in hostile(MB, tags_of(f"{form.describe()} {' '.join(form.stop)}")):
        for lenient in (True, False):
            began = time.process_time()
            reply = read_reply(form, text, "0", lenient)
            taken = time.process_time() - began
            assert taken < SECONDS, f"{attack}: {taken:.2f} s"
            assert reply.said == text


READERS: dict[str, Callable[[str], Any]] = {
    "extract_code": extract_code,
    "extract_answer": extract_answer,
    "first_line": first_line,
    "f1": lambda text: f1(text, ["the Eiffel tower", " ".join(map(str, range(31)))]),
    "f1, as the reference": lambda text: f1("x", [text]),
    "exact_match": lambda text: exact_match(text, ["x"]),
    "a query's words": Analyzer(),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_replies_besides_is_linear_too(name: str) -> None:
    for attack, text in hostile(MB, ("code", "answer", "final_answer")):
        began = time.process_time()
        READERS[name](text)
        taken = time.process_time() - began
        assert taken < SECONDS, f"{attack}: {taken:.2f} s"


def test_fuzz(fuzz: int) -> None:
    """Random splices of what formats look for: nothing raises, and nothing of the text is lost."""
    rng = random.Random(16)
    forms = list(FORMATS.values())
    words = [
        "{", "}", '"', "\\boxed{", "<think>", "</think>", "```", "\n", " ", "t1", "7", "approve", "up", ",", "\ud800",
        "İ", "\x00", "<tool>", "</tool>", '{"name": "a"', "null", "1e999", "NaN", "<end>", "<plan>", "</plan>",
    ]  # fmt: skip
    for _ in range(fuzz):
        form = rng.choice(forms)
        tags = [
            mark
            for t in tags_of(f"{form.describe()} {' '.join(form.stop)}")
            for mark in (f"<{t}>", f"</{t}>")
        ]
        text = "".join(rng.choices(words + tags * 3, k=rng.randrange(1, 60)))
        for lenient in (None, True, False):
            reply = read_reply(form, text, "0", lenient)
            assert reply.said == text and "think>" not in reply.text.lower()
