"""Lessons of the tiny model: drills, and episodes that apprentices play.

An *apprentice* plays the roles of a real environment, on tasks of the train split. It has the expert's skills: the reply
format, finding an answer in passages, asking one simple question, adding up. It has no strategy: it picks one of several
habits at random, good or bad ones. So a model that learns from apprentices has every skill that a team needs, and has yet
to learn by reinforcement when to use which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...agents.policies import Call
from ...agents.team import Team
from ...envs.core.arena import Arena
from ...envs.core.drivers import play
from ...envs.core.tasks import Task
from ...envs.data.mini.programs import run_solution
from ...envs.data.mini.world import Dice
from ...envs.registry import make_arena
from ...envs.tools.tool import Tool
from ...envs.workflows.games import GAMES
from ...envs.workflows.mask import NOTHING, hops_of, steps_in
from ...envs.workflows.parts import UNKNOWN
from .drills import DRILLS, Lesson

MIX = {
    "mask-hotpotqa": 10, "mask-nq": 1, "rag-hotpotqa": 2, "rag-evidence-hotpotqa": 2, "rag-summary-hotpotqa": 2,
    "rag-rewrite-hotpotqa": 2, "code-deepcoder": 5, "math-deepscaler": 5, "chain-deepscaler": 1,
    "debate-deepscaler": 1, "solver-verifier-deepscaler": 1, "search-router-hotpotqa": 1, "coder-tester-deepcoder": 1,
    "planpath-duo": 1, "sokoban-duo": 1, "sudoku-duo": 1, "blocksworld-duo": 1, "eight-queens-duo": 1,
}  # fmt: skip
"""Frequency of each environment's apprentices."""

LONGEST = 16
"""Largest number of replies from one episode that become lessons, because the boards of a long game are similar."""


# apprentices -------------------------------------------------------------------------------------------


@dataclass
class Apprentice:
    """Policy that plays every role of one environment: a habit if its role has one, else the expert's reply."""

    expert: Callable[[Call], str]
    dice: Dice
    habits: Mapping[str, Callable[[Call, Dice, str], str]]
    said: list[Lesson] = field(default_factory=list)
    sees_reference = True

    def act(self, call: Call) -> str:
        """Reply to a call, and record it as a lesson."""
        reply = self.expert(call)
        habit = self.habits.get(call.role)
        if habit is not None:
            reply = habit(call, self.dice, reply)
        messages = tuple({"role": m["role"], "content": str(m["content"])} for m in call.messages)
        self.said.append((*messages, {"role": "assistant", "content": reply}))
        return reply


def is_bridge(call: Call) -> bool:
    """Tell whether the second hop needs the answer of the first."""
    hops = hops_of(call)
    return len(hops) == 2 and hops[0]["answer"] in hops[1]["question"]


def askable(call: Call) -> list[str]:
    """Return the questions that can be asked at the start. The second hop of a bridge needs the answer of the first."""
    hops, question = hops_of(call), call.task.view["question"]
    return [hops[0]["question"], question] if is_bridge(call) else [hop["question"] for hop in hops]


def known_in(call: Call) -> dict[str, str]:
    """Return the questions of the prompt's steps that have an answer, with their answers."""
    steps = steps_in(call.messages[-1]["content"])
    return {question: answer for question, answer in steps if answer not in (UNKNOWN, NOTHING)}


def plan(call: Call, dice: Dice, expert: str) -> str:
    """Reply with a plan of one or several steps, without an answer."""
    question = call.task.view["question"]
    steps = dice.pick(([question], askable(call), askable(call)[:1]))
    pairs = "".join(f"<q{i}>{q}</q{i}><a{i}>{UNKNOWN}</a{i}>" for i, q in enumerate(steps, 1))
    return f"{pairs}<final_answer>{UNKNOWN}</final_answer>"


def search(call: Call, dice: Dice, expert: str) -> str:
    """Reply with a random search (the whole question, a step, or an open hop), or with the end."""
    question = call.task.view["question"]
    steps = [q for q, _ in steps_in(call.messages[-1]["content"])]
    known = known_in(call)
    left = [hop["question"] for hop in hops_of(call) if hop["question"] not in known]
    reachable = left[:1] if is_bridge(call) else left
    roll = dice.random()
    if not left or question in known:
        return "<end>" if roll < 0.6 else f"<search>{dice.pick([question, *steps])}</search>"
    if roll < 0.1:
        return "<end>"
    if roll < 0.45:
        return f"<search>{question}</search>"
    if roll < 0.65 and steps:
        return f"<search>{dice.pick(steps)}</search>"
    return f"<search>{dice.pick(reachable)}</search>"


def summarize(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the answer that the passages give to the query, which is a hop or the whole question."""
    passages, _, query = call.messages[-1]["content"].rpartition("\nQuery: ")
    answer = read_for(call, query, passages)
    return NOTHING if answer is None else f"<evidence>{answer}</evidence>"


def read_for(call: Call, query: str, passages: str) -> str | None:
    """Return the answer to a hop, or to the whole question, if the passages that it needs are shown, else None."""
    titles = {line.split(": ", 1)[0] for line in passages.splitlines()}
    hops = hops_of(call)
    for hop in hops:
        if query == hop["question"]:
            return hop["answer"] if hop["title"] in titles else None
    whole = query == call.task.view["question"] and all(hop["title"] in titles for hop in hops)
    return str(call.task.reference["answers"][0]) if whole else None


def update(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the step to update or add: the expert's choice, or any other."""
    steps = steps_in(call.messages[-1]["content"])
    roll = dice.random()
    if roll < 0.5:
        return expert
    if roll < 0.75 and steps:
        return f"<update>t{1 + dice.below(len(steps))}</update>"
    return f"<add>t{len(steps) + 1}</add>"


def answer(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the answer if the steps hold it, else with "unknown" or the answer of some step."""
    answers = known_in(call)
    question, gold = call.task.view["question"], call.task.reference["answers"][0]
    if question in answers:
        reply = answers[question]
    elif all(hop["question"] in answers for hop in hops_of(call)):
        reply = gold
    else:
        reply = dice.pick([UNKNOWN, *answers.values()])
    return f"<final_answer>{reply}</final_answer>"


def decompose(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the whole question, or with the questions that can be asked at the start."""
    question = call.task.view["question"]
    return json.dumps({"sub_queries": dice.pick(([question], askable(call), askable(call)[:1]))})


def evidence(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the evidence about the query, or "unknown"."""
    passages, _, query = call.messages[-1]["content"].rpartition("\nQuery: ")
    extract = read_for(call, query, passages)
    return f"<sub_evidence>{extract or UNKNOWN}</sub_evidence>"


def sub_answers(call: Call, dice: Dice, expert: str) -> str:
    """Reply with an answer to each numbered query of the prompt."""
    queries = call.messages[-1]["content"].rpartition("\nQuestion: ")[0]
    parts = re.split(r"^\d+\. ", queries, flags=re.MULTILINE)[1:]
    answers = [read_for(call, *part.split("\n", 1)) for part in parts if "\n" in part]
    return json.dumps({"sub_answers": [answer or UNKNOWN for answer in answers]})


def rewrite(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the question, or with one that can be asked at the start."""
    return f"<rewrite_query>{dice.pick([call.task.view['question'], *askable(call)])}</rewrite_query>"


def select(call: Call, dice: Dice, expert: str) -> str:
    """Reply with one or two of the passages."""
    lines = call.messages[-1]["content"].rpartition("\nQuestion: ")[0].splitlines()[1:]
    titles = [hop["title"] for hop in hops_of(call)]
    useful = [line for line in lines if line.split(": ", 1)[0] in titles]
    choice = useful if useful and dice.random() < 0.5 else [dice.pick(lines or ["none"])]
    return f"<selected_docs>{' '.join(choice[:2])}</selected_docs>"


def found_answer(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the answer if the prompt holds enough evidence for it, else with "unknown"."""
    context = call.messages[-1]["content"].rpartition("\nQuestion: ")[0]
    gold = call.task.reference["answers"][0]
    hops = hops_of(call)
    enough = all(hop["answer"] in context for hop in hops) or (
        gold in context and " or " not in call.task.view["question"]
    )
    return f"<final_answer>{gold if enough else UNKNOWN}</final_answer>"


def program(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the program, sometimes with an error. After advice there is no error."""
    if dice.random() > 0.35 or "Advice: " in call.messages[-1]["content"]:
        return expert
    code = call.task.reference["solution"]
    slips = (
        (" > ", " >= "),
        (" >= ", " > "),
        (" + ", " - "),
        (" - ", " + "),
        (" * ", " + "),
        ("max", "min"),
        ("min", "max"),
    )
    fitting = [code.replace(a, b) for a, b in slips if a in code]
    numbers = re.findall(r"\b\d+\b", code)
    fitting += [code.replace(n, str(int(n) + 1), 1) for n in numbers]
    return f"<code>\n{dice.pick(fitting or [code])}\n</code>"


def advise(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the last line of a right program."""
    right = call.task.reference["solution"].splitlines()[-1].strip()
    return f"<reflection>The last line should be {right}</reflection>"


def slip(text: str, dice: Dice) -> str:
    """Return a solution text with a wrong result in its last step."""
    head, equals, tail = text.rpartition(" = ")
    wrong = int(tail.rstrip(".")) + dice.pick([-10, -2, -1, 1, 2, 10])
    return f"{head}{equals}{max(wrong, 0)}."


def solve(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the solution, sometimes with an error in its last step."""
    if dice.random() > 0.3:
        return expert
    working = slip(call.task.reference["solution"], dice)
    result = working.rpartition(" = ")[2].rstrip(".")
    return f"<solution>{working}</solution><answer>{result}</answer>"


def check(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the right verdict on the solution."""
    right = f"<answer>{call.task.reference['answer']}</answer>" in call.messages[-1]["content"]
    if right:
        return expert
    return "<status>incorrect</status><error_type>calculation</error_type><feedback>check the last step</feedback>"


def propose(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the expert's move, or with any legal one."""
    return expert if dice.random() < 0.5 else dice.pick(call.choices or (expert,))


def approve(call: Call, dice: Dice, expert: str) -> str:
    """Reply with the expert's verdict, or approve."""
    return expert if dice.random() < 0.5 else "approve"


HABITS: dict[str, dict[str, Callable[[Call, Dice, str], str]]] = {
    "mask": {"planner": plan, "searcher": search, "summarizer": summarize, "updater": update, "answerer": answer},
    "rag": {"decomposer": decompose, "evidence": evidence, "summarizer": sub_answers, "rewriter": rewrite,
            "selector": select, "answerer": found_answer},
    "code": {"coder": program, "reflector": advise},
    "math": {"solver": solve, "verifier": check},
    **dict.fromkeys(GAMES, {"proposer": propose, "critic": approve}),
}  # fmt: skip


def verify_ours(program: str, fn_name: str | None, task: Task) -> dict[str, object]:
    """Run a program on the visible tests, in this process. The programs come from our own generator and are safe."""
    tests = list(task.view["visible_tests"])
    verdicts, failure = [], ""
    for test in tests:
        case = list(test["input"]) if fn_name else test["input"].rstrip("\n")
        got = run_solution(program, case, fn_name)
        verdicts.append("accepted" if got == test["output"] else "wrong_answer")
        if got != test["output"] and not failure:
            parts = {"input": test["input"], "expected": test["output"], "got": got}
            failure = "\n".join(
                ["wrong_answer", *(f"{name}: {str(part).strip()}" for name, part in parts.items())]
            )
    passed = verdicts.count("accepted")
    return {"passed": passed, "total": len(tests), "verdicts": verdicts, "first_failure": failure}


# lessons ----------------------------------------------------------------------------------------------


class School:
    """Generator of an endless stream of lessons, the same for the same seed."""

    def __init__(self, seed: int = 0, tasks: int = 4096) -> None:
        self.dice = Dice("lessons", seed)
        self.blocks = tasks // 8
        self.seats = [env for env, weight in MIX.items() for _ in range(weight)]
        self.arenas = {env: self._arena(env, tasks) for env in MIX}

    @staticmethod
    def _arena(env: str, tasks: int) -> Arena:
        tools = {"verify": Tool(verify_ours, "verify", task=True)} if env.startswith("code-") else None
        if env.startswith(
            tuple(GAMES)
        ):  # games make their own tasks; few are enough, as each has many boards
            return make_arena(env, split="train", size=min(tasks, 512), reward=None, prompts="short")
        return make_arena(
            env, split="train", data="mini", size=tasks, reward=None, tools=tools, prompts="short"
        )

    def lessons(self, drills: float) -> Iterator[list[Lesson]]:
        """Yield lessons in groups with a common beginning: drills with the probability `drills`, else an episode."""
        while True:
            if self.dice.random() < drills:
                yield self.dice.pick(DRILLS)(self.dice, self.blocks)
            else:
                yield self.episode(self.dice.pick(self.seats))

    def episode(self, env: str) -> list[Lesson]:
        """Play one episode with an apprentice, and return its replies as lessons."""
        arena = self.arenas[env]
        ids = arena.task_ids
        task = arena.task(ids[self.dice.below(len(ids))])
        habits = next((own for name, own in HABITS.items() if env.startswith(name)), {})
        assert arena.expert is not None
        apprentice = Apprentice(arena.expert, self.dice, habits)
        team = Team({"*": apprentice}).bind(arena.roles)
        play(arena.start(task, self.dice.below(1 << 30)), team, arena)
        return self.dice.shuffled(apprentice.said)[:LONGEST]
