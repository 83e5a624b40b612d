"""M-ASK: iterative search by five roles.

    plan -> answer_0 -> for t = 1 … T: search_t -> retrieve -> summary_t -> update_t -> answer_t

The team has a *trajectory* of steps t1, t2, …: sub-questions with their answers so far. The planner writes the first
trajectory. Each turn finds one piece of evidence, the updater puts it into a step or adds a step, and the answerer answers
from the whole trajectory. The searcher ends the episode with `<end>` if nothing is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from ...agents.basics.frozen import FrozenDict
from ...agents.policies import Call
from ...agents.roles import Custom, FormatError, Role
from ...agents.text.reply_readers import first_tagged, tag_reader, tag_split, tagged
from ..core.workflow import Episode, Outcome, Workflow
from .parts import ANSWER, PROMPTS, UNKNOWN, first_line, passages_text

NOTHING = "No useful information"


class Step(NamedTuple):
    """Step of the trajectory: a sub-question, and its answer so far."""

    question: str
    answer: str


# rules and parsing: pure functions ---------------------------------------------------------------------

_query, _evidence = tag_reader("search"), tag_reader("evidence")
_END = re.compile(r"\s*<end\s*/?>(\s*</end>)?\s*", re.IGNORECASE)
_FILED = re.compile(r"(?:(?:next )?step ?:? ?)?t?([0-9]{1,4})(?: ?[:.|].*)?", re.IGNORECASE)
_PLAIN_FILING = re.compile(r"\s*<(update|add)>\s*t([0-9]{1,4})\s*</\1>\s*")
_PLAIN_PLAN = re.compile("(?:".join(
    rf"\s*<q{n}>([^<]*)</q{n}>\s*<a{n}>([^<]*)</a{n}>" for n in range(1, 6)
) + ")?" * 4 + r"\s*<final_answer>([^<]*)</final_answer>\s*")  # fmt: skip
_STEP = re.compile(r"^t\d+: (.*) \| (.*)$", re.MULTILINE)


def read_plan(text: str) -> FrozenDict:
    """Read a plan: <q1>…</q1><a1>…</a1> up to five times, then <final_answer>…</final_answer>"""
    plain = _PLAIN_PLAN.fullmatch(text)
    if plain is not None:  # the usual case; the code below handles the others
        *parts, last = [part.strip() for part in plain.groups() if part is not None]
        pairs = {parts[n]: Step(parts[n], parts[n + 1] or UNKNOWN) for n in range(0, len(parts), 2)}
        if last and "" not in pairs and 2 * len(pairs) == len(parts):
            return FrozenDict({"steps": tuple(pairs.values()), "final": last})
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
    query = _query(text)
    if query and "<" not in query:
        return FrozenDict({"search": query})
    if _END.fullmatch(text):
        return FrozenDict(end=True)
    query = "" if _END.match(text) else first_line(text)
    raise FormatError("one <search>…</search> or <end>", {"search": query} if query else {"end": True})


def read_evidence(text: str) -> str:
    """Read evidence: <evidence>at most 75 words</evidence> or No useful information"""
    evidence = _evidence(text)
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
    plain = _PLAIN_FILING.fullmatch(text)
    if plain is not None:  # nearly always
        return FrozenDict({"kind": plain[1], "step": int(plain[2])})
    for kind in ("update", "add"):
        place = " ".join((tagged(text, kind) or "")[:400].split())
        number = _FILED.fullmatch(place)
        if number is not None:
            return FrozenDict(kind=kind, step=int(number[1]))
        if kind == "add" and place.casefold() == "next step":
            return FrozenDict(kind=kind, step=0)
    raise FormatError("one <update>tK</update> or <add>tK</add>", {"kind": "add", "step": 0})


class Filing(TypedDict):
    """Place of a new step: it replaces step K (`update`), or is added at the end (`add`)."""

    kind: str
    step: int


def filed(steps: Sequence[Step], filing: Filing, new: Step) -> list[Step]:
    """Return the trajectory with the new step in place of step K, or at its end. An unknown K means the end."""
    kept, place = list(steps), filing["step"]
    if filing["kind"] == "update" and 1 <= place <= len(kept):
        kept[place - 1] = new
    else:
        kept.append(new)
    return kept


# what each role sees ------------------------------------------------------------------------------------


def told(steps: Sequence[Step]) -> str:
    """Return the trajectory as text for the roles."""
    lines: list[str] = []
    for asked, known in steps:
        lines.append(f"t{len(lines) + 1}: {asked} | {known}")
    return "\n".join(lines) or "none"


def steps_in(text: str) -> list[Step]:
    """Return the trajectory that a text of `told` contains."""
    return [Step(question, answer) for question, answer in _STEP.findall(text)]


def filing(question: str, known: str, steps: Sequence[Step], new: Step, prediction: str) -> dict[str, str]:
    """Return the fields of the updater's prompt: the trajectory, the new step, and the number it would have at the end."""
    return {
        "question": question, "steps": known, "query": new.question, "evidence": new.answer,
        "next": str(len(steps) + 1), "prediction": prediction,
    }  # fmt: skip


ROLES = (
    Role("planner", reply=Custom(read_plan, ends=("</final_answer>",), starts=("<q1>",)), sees=("question",)),
    Role(
        "searcher",
        reply=Custom(read_search, ends=("</search>", "<end>")),
        sees=("question", "steps", "queries"),
    ),
    Role("summarizer", reply=Custom(read_evidence, ends=("</evidence>",)), sees=("passages", "query")),
    Role(
        "updater",
        reply=Custom(read_filing, ends=("</update>", "</add>")),
        sees=("question", "steps", "query", "evidence", "next", "prediction"),
    ),
    Role("answerer", reply=ANSWER, sees=("question", "steps")),
)


class Mask(Workflow):
    """M-ASK with at most `max_turns` searches of `top_k` passages each."""

    roles = ROLES
    tools = ("retrieve",)
    prompts = PROMPTS / "mask.yaml"

    def __init__(self, max_turns: int = 3, top_k: int = 5) -> None:
        if max_turns < 1 or top_k < 1:
            raise ValueError(f"max_turns and top_k must be at least 1, got {max_turns} and {top_k}")
        self.max_turns, self.top_k = max_turns, top_k

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"searches": self.max_turns}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        question, queries = ep.task["question"], ""
        plan = (await ep.act("planner", {"question": question}, turn=0)).value
        steps = plan["steps"] or (Step(question, UNKNOWN),)
        known = told(steps)
        answer = (await ep.act("answerer", {"question": question, "steps": known}, turn=0)).value
        for t in range(1, self.max_turns + 1):
            seen = {"question": question, "steps": known, "queries": queries}
            search = (await ep.act("searcher", seen, turn=t)).value
            if "end" in search:
                return Outcome(answer=answer, turns=t, ended_by_searcher=True)
            query = search["search"]
            queries += f"\n{t}. {query}" if queries else f"{t}. {query}"
            docs = await ep.use("retrieve", query=query, k=self.top_k)
            seen = {"passages": passages_text(docs), "query": query}
            new = Step(query, (await ep.act("summarizer", seen, turn=t)).value)
            seen = filing(question, known, steps, new, answer)
            place = (await ep.act("updater", seen, turn=t)).value
            steps = filed(steps, place, new)
            known = told(steps)
            answer = (await ep.act("answerer", {"question": question, "steps": known}, turn=t)).value
        return Outcome(answer=answer, turns=self.max_turns, ended_by_searcher=False)


# the expert: plays every role right, from the same messages and the task's reference --------------------


def hops_of(call: Call) -> Sequence[Mapping[str, str]]:
    """Return the simple questions that lead to the answer, in order. For a question without hops, return the question."""
    reference = call.task.reference
    whole = {"question": call.task.view["question"], "answer": reference["answers"][0]}
    return reference.get("hops") or (whole,)


def hops_left(call: Call) -> list[Mapping[str, str]]:
    """Return the hops without an answer in the steps of the prompt."""
    known = [s.question for s in steps_in(call.fields["steps"]) if s.answer not in (UNKNOWN, NOTHING)]
    return [hop for hop in hops_of(call) if not any(k.startswith(hop["question"]) for k in known)]


def expert(call: Call) -> str:
    """Plan the task's hops, search them in order, file each answer, and end when the last is known."""
    seen, hops = call.fields, hops_of(call)
    if call.role == "planner":
        pairs = "".join(f"<q{i}>{h['question']}</q{i}><a{i}>{UNKNOWN}</a{i}>" for i, h in enumerate(hops, 1))
        return f"{pairs}<final_answer>{UNKNOWN}</final_answer>"
    if call.role == "summarizer":
        answer = next((h["answer"] for h in hops if seen["query"].startswith(h["question"])), None)
        found = answer is not None and answer in seen["passages"]
        return f"<evidence>{answer}</evidence>" if found or "hops" not in call.task.reference else NOTHING
    steps = steps_in(seen["steps"])
    if call.role == "updater":
        for number, step in enumerate(steps, 1):
            if seen["query"].startswith(step.question):
                return f"<update>t{number}</update>"
        return f"<add>t{len(steps) + 1}</add>"
    left = hops_left(call)
    if call.role == "answerer":
        return f"<final_answer>{UNKNOWN if left else call.task.reference['answers'][0]}</final_answer>"
    if not left:
        return "<end>"
    failed = Step(left[0]["question"], NOTHING) in steps  # then say the title once more: it counts twice
    again = f" {left[0]['title']}" if failed and "title" in left[0] else ""
    return f"<search>{left[0]['question']}{again}</search>"
