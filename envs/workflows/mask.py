"""M-ASK: iterative search by five roles.

    plan -> answer_0 -> for t = 1 … T: search_t -> retrieve -> summary_t -> update_t -> answer_t

The team keeps a *trajectory* of steps t1, t2, …: sub-questions with what is known of them. The planner
lays it out, each turn finds one more piece, the updater files it (into a step, or as a new one), and the
answerer answers from the whole. The searcher ends the episode with `<end>` when nothing is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...agents.frozen import FrozenDict
from ...agents.policies import Call
from ...agents.roles import Custom, FormatError, Role
from ...agents.text.reading import first_tagged, tag_split, tagged
from ..core.workflow import Episode, Outcome, Workflow
from .parts import ANSWER, UNKNOWN, first_line, passages_text

NOTHING = "No useful information"


class Step(NamedTuple):
    """One step of the trajectory: what was asked, and what is known about it."""

    question: str
    answer: str


# rules and parsing: pure functions ---------------------------------------------------------------------

_END = re.compile(r"\s*<end\s*/?>(\s*</end>)?\s*", re.IGNORECASE)
_FILED = re.compile(r"(?:(?:next )?step ?:? ?)?t?([0-9]{1,4})(?: ?[:.|].*)?", re.IGNORECASE)
_STEP = re.compile(r"^t\d+: (.*) \| (.*)$", re.MULTILINE)


def read_plan(text: str) -> FrozenDict:
    """Read a plan: <q1>…</q1><a1>…</a1> up to five times, then <final_answer>…</final_answer>"""
    tags, around = tag_split(text, "[qa][0-9]", "final_answer")
    steps: list[Step] = []
    at, numbered = 0, True
    while (
        at < len(tags)
        and tags[at : at + 4] == _pair(tags[at][1:])
        and not (around[at] + around[at + 2]).strip()
    ):
        numbered = numbered and tags[at][1:] == str(len(steps) + 1)
        steps.append(Step(around[at + 1].strip(), around[at + 3].strip() or UNKNOWN))
        at += 4
    questions = {s.question for s in steps}
    distinct = numbered and "" not in questions and len(questions) == len(steps)
    final = around[at + 1].strip() if tags[at:] == ["final_answer", "/final_answer"] else ""
    if final and 1 <= len(steps) <= 5 and distinct and not (around[at] + around[-1]).strip():
        return FrozenDict(steps=tuple(steps), final=final)
    loose = first_tagged(text, "final_answer")
    kept = [s for s in steps if s.question][:5]
    answer = loose if loose is not None else kept[-1].answer if kept else UNKNOWN
    raise FormatError("a plan is 1–5 numbered q/a pairs and a final answer", {"steps": kept, "final": answer})


def _pair(number: str) -> list[str]:
    return [f"q{number}", f"/q{number}", f"a{number}", f"/a{number}"]


def read_search(text: str) -> FrozenDict:
    """Read a search: <search>query</search> or <end>"""
    query = tagged(text, "search")
    if query and "<" not in query:
        return FrozenDict(search=query)
    if _END.fullmatch(text):
        return FrozenDict(end=True)
    query = "" if _END.match(text) else first_line(text)
    raise FormatError("one <search>…</search> or <end>", {"search": query} if query else {"end": True})


def read_evidence(text: str) -> str:
    """Read evidence: <evidence>at most 75 words</evidence> or No useful information"""
    evidence = tagged(text, "evidence")
    if evidence and len(evidence.split()) <= 75:
        return evidence
    if text.strip().rstrip(".").casefold() == NOTHING.casefold():
        return NOTHING
    raise FormatError("evidence of at most 75 words", first_line(text) or NOTHING)


def read_filing(text: str) -> FrozenDict:
    """<update>tK</update> or <add>tK</add>

    The prompt asks for a step, so "2", "step 2" and the step's whole line "t2: … | …" name it as well as "t2" does;
    what is added needs no number.
    """
    for kind in ("update", "add"):
        place = " ".join((tagged(text, kind) or "")[:400].split())
        number = _FILED.fullmatch(place)
        if number is not None:
            return FrozenDict(kind=kind, step=int(number[1]))
        if kind == "add" and place.casefold() == "next step":
            return FrozenDict(kind=kind, step=0)
    raise FormatError("one <update>tK</update> or <add>tK</add>", {"kind": "add", "step": 0})


def filed(steps: Sequence[Step], filing: Mapping[str, Any], new: Step) -> list[Step]:
    """The trajectory with the new step in place of step K, or at the end (an unknown K appends)."""
    kept, place = list(steps), filing["step"]
    if filing["kind"] == "update" and 1 <= place <= len(kept):
        kept[place - 1] = new
    else:
        kept.append(new)
    return kept


# what each role sees ------------------------------------------------------------------------------------


def told(steps: Sequence[Step]) -> str:
    """The trajectory as the roles read it."""
    lines: list[str] = []
    for asked, known in steps:
        lines.append(f"t{len(lines) + 1}: {asked} | {known}")
    return "\n".join(lines) or "none"


def steps_in(text: str) -> list[Step]:
    """The trajectory back from a prompt that tells it."""
    return [Step(question, answer) for question, answer in _STEP.findall(text)]


def view(question: str, steps: Sequence[Step]) -> str:
    """View of what is known, then the question, so that the question stands next to the reply."""
    return f"Steps:\n{told(steps)}\nQuestion: {question}"


def reader_prompt(docs: Sequence[Mapping[str, str]], query: str) -> str:
    """Prompt of the summarizer: the passages found, then what was searched."""
    return f"Passages:\n{passages_text(docs)}\nQuery: {query}"


def updater_prompt(known: str, steps: Sequence[Step], new: Step) -> str:
    """Prompt of the updater: the view of what is known, the new piece, and its number as a step of its own."""
    return f"{known}\nNew: {new.question} | {new.answer}\nNext step: t{len(steps) + 1}"


ROLES = (
    Role(
        "planner",
        reply=Custom(read_plan, ends=("</final_answer>",), starts=("<q1>",)),
        system="Split the question into steps. Write <q1>step</q1><a1>answer</a1> for each step, then "
        "<final_answer>answer</final_answer>. Write unknown where you do not know.",
    ),
    Role(
        "searcher",
        reply=Custom(read_search, ends=("</search>", "<end>")),
        system="Find what is missing. Write <search>one simple question</search>, or <end> if all is known.",
    ),
    Role(
        "summarizer",
        reply=Custom(read_evidence, ends=("</evidence>",)),
        system="Answer the query from the passages. Write <evidence>answer</evidence>, "
        "or No useful information.",
    ),
    Role(
        "updater",
        reply=Custom(read_filing, ends=("</update>", "</add>")),
        system="Which step does the new evidence answer? Write <update>step</update>, "
        "or <add>next step</add> if it answers none.",
    ),
    Role(
        "answerer",
        reply=ANSWER,
        system="Answer the question from the steps. Write <final_answer>answer</final_answer>.",
    ),
)


class Mask(Workflow):
    """M-ASK with at most `max_turns` searches of `top_k` passages each."""

    roles = ROLES
    tools = ("retrieve",)

    def __init__(self, max_turns: int = 3, top_k: int = 5) -> None:
        if max_turns < 1 or top_k < 1:
            raise ValueError(f"max_turns and top_k must be at least 1, got {max_turns} and {top_k}")
        self.max_turns, self.top_k = max_turns, top_k

    async def run(self, ep: Episode) -> Outcome:
        question = ep.task["question"]
        plan = (await ep.act("planner", f"Question: {question}", turn=0)).value
        steps = plan["steps"] or (Step(question, UNKNOWN),)
        known = view(question, steps)
        answer = await ep.act("answerer", known, turn=0)
        for t in range(1, self.max_turns + 1):
            search = (await ep.act("searcher", known, turn=t)).value
            if "end" in search:
                return Outcome(answer=answer.value, turns=t, ended_by_searcher=True)
            query = search["search"]
            docs = await ep.use("retrieve", query=query, k=self.top_k)
            evidence = (await ep.act("summarizer", reader_prompt(docs, query), turn=t)).value
            new = Step(query, evidence)
            filing = (await ep.act("updater", updater_prompt(known, steps, new), turn=t)).value
            steps = filed(steps, filing, new)
            known = view(question, steps)
            answer = await ep.act("answerer", known, turn=t)
        return Outcome(answer=answer.value, turns=self.max_turns, ended_by_searcher=False)


# the expert: plays every role right, from the same messages and the task's reference --------------------


def hops_of(call: Call) -> Sequence[Mapping[str, str]]:
    """Questions that must be answered, in order; a question without hops is the only one."""
    reference = call.task.reference
    whole = {"question": call.task.view["question"], "answer": reference["answers"][0]}
    return reference.get("hops") or (whole,)


def hops_left(call: Call) -> list[Mapping[str, str]]:
    """The hops that no step of the prompt knows."""
    known = [s.question for s in steps_in(call.messages[-1]["content"]) if s.answer not in (UNKNOWN, NOTHING)]
    return [hop for hop in hops_of(call) if not any(k.startswith(hop["question"]) for k in known)]


def expert(call: Call) -> str:
    """Plans the task's hops, searches them in order, files each answer, ends when the last is known."""
    seen = call.messages[-1]["content"]
    hops, left, steps = hops_of(call), hops_left(call), steps_in(seen)
    if call.role == "planner":
        pairs = "".join(f"<q{i}>{h['question']}</q{i}><a{i}>{UNKNOWN}</a{i}>" for i, h in enumerate(hops, 1))
        return f"{pairs}<final_answer>{UNKNOWN}</final_answer>"
    if call.role == "answerer":
        return f"<final_answer>{UNKNOWN if left else call.task.reference['answers'][0]}</final_answer>"
    if call.role == "searcher":
        if not left:
            return "<end>"
        failed = Step(left[0]["question"], NOTHING) in steps  # then say the title once more: it counts twice
        again = f" {left[0]['title']}" if failed and "title" in left[0] else ""
        return f"<search>{left[0]['question']}{again}</search>"
    if call.role == "summarizer":
        query = seen.rpartition("\nQuery: ")[2]
        answer = next((h["answer"] for h in hops if query.startswith(h["question"])), None)
        found = answer is not None and answer in seen.rpartition("\nQuery: ")[0]
        return f"<evidence>{answer}</evidence>" if found or "hops" not in call.task.reference else NOTHING
    new = next(line for line in seen.splitlines() if line.startswith("New: ")).removeprefix("New: ")
    for number, step in enumerate(steps, 1):
        if new.startswith(step.question):
            return f"<update>t{number}</update>"
    return f"<add>t{len(steps) + 1}</add>"
