"""The peers' math and search teams, with their faults mended.

    solver-verifier   Dr. MAS: solve, have it checked, solve again if rejected
    search-router     Dr. MAS: a verifier routes to the searcher or to the answerer
    debate            MARTI: several debaters, several rounds, majority vote
    chain             MARTI: generate, verify, refine; majority vote of what was boxed

A malformed verdict is never an approval: it counts as "reject" (or "no, not enough is known").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...agents.policies import Call
from ...agents.roles import Boxed, Role, Tags
from ..core.tasks import MATH
from ..core.workflow import Episode, Outcome, Workflow
from .mask import NOTHING
from .parts import ANSWER, UNKNOWN, first_line, passages_text

BOXED = "Solve the problem step by step and write the answer in \\boxed{}."


class SolverVerifier(Workflow):
    """Team of a solver and a verifier: at most `max_loops` solutions; between two of them the verifier approves or rejects."""

    schema = MATH
    roles = (
        Role("solver", reply=Boxed(), system=BOXED),
        Role(
            "verifier",
            reply=Tags("verify", verify=("approve", "reject"), otherwise="reject"),
            system="Check the solution. Write <verify>approve</verify> or <verify>reject</verify>.",
        ),
    )

    def __init__(self, max_loops: int = 2) -> None:
        if max_loops < 1:
            raise ValueError(f"max_loops must be at least 1, got {max_loops}")
        self.max_loops = max_loops

    async def run(self, ep: Episode) -> Outcome:
        context = f"Problem: {ep.task.problem}"
        answer = ""
        for loop in range(self.max_loops):
            solved = await ep.act("solver", context, turn=loop)
            answer = solved.value or answer
            context = f"{context}\nSolver: {solved.text}"
            if loop + 1 == self.max_loops:
                break
            verdict = await ep.act("verifier", context, turn=loop)
            if verdict.value == "approve":
                return Outcome(answer=answer, loops=loop + 1, approved=True)
            context = f"{context}\nVerifier: {verdict.text}"
        return Outcome(answer=answer, loops=self.max_loops, approved=False)


class SearchRouter(Workflow):
    """The verifier says whether enough is known: no -> search, yes -> answer; the last step always answers."""

    tools = ("retrieve",)
    roles = (
        Role(
            "verifier",
            reply=Tags("verify", verify=("yes", "no"), otherwise="no"),
            system="Is the answer in what was found? Write <verify>yes</verify> or <verify>no</verify>.",
        ),
        Role(
            "searcher",
            reply=Tags("search"),
            system="Find what is missing. Write <search>one simple question</search>.",
        ),
        Role(
            "answerer",
            reply=ANSWER,
            system="Answer the question from what was found. Write <final_answer>answer</final_answer>.",
        ),
    )

    def __init__(self, max_steps: int = 4, top_k: int = 3) -> None:
        if max_steps < 1 or top_k < 1:
            raise ValueError(f"max_steps and top_k must be at least 1, got {max_steps} and {top_k}")
        self.max_steps, self.top_k = max_steps, top_k

    async def run(self, ep: Episode) -> Outcome:
        question, found, searches = f"Question: {ep.task.question}", "none", 0
        for step in range(self.max_steps - 1):
            verdict = await ep.act("verifier", f"Found:\n{found}\n{question}", turn=step)
            if verdict.value == "yes":
                break
            query = await ep.act("searcher", f"Found:\n{found}\n{question}", turn=step)
            docs = await ep.use("retrieve", query=query.value or first_line(query.text), k=self.top_k)
            text = f"Query: {query.value or first_line(query.text)}\n{passages_text(docs)}"
            found = text if found == "none" else f"{found}\n{text}"
            searches += 1
        reply = await ep.act("answerer", f"Found:\n{found}\n{question}")
        return Outcome(answer=reply.value, searches=searches)


class Debate(Workflow):
    """Debaters answer side by side, round by round; each sees up to `others` answers of its peers, shuffled."""

    schema = MATH

    def __init__(self, debaters: int = 3, rounds: int = 2, others: int = 5) -> None:
        if debaters < 2 or rounds < 1:
            raise ValueError(f"a debate needs 2 or more debaters and a round, got {debaters} and {rounds}")
        self.rounds, self.others = rounds, others
        self.roles = (Role("debater", instances=debaters, reply=Boxed(), system=BOXED),)

    async def run(self, ep: Episode) -> Outcome:
        cast = ep.cast("debater")
        problem = f"Problem: {ep.task.problem}"
        said: Sequence[str] = ()
        boxed: list[str | None] = []
        for turn in range(self.rounds):
            prompts = [self.prompt(ep, problem, said, i) for i in range(len(cast))]
            replies = await ep.all(*(ep.act(a, p, turn=turn) for a, p in zip(cast, prompts, strict=True)))
            said, boxed = [r.text for r in replies], [r.value for r in replies]
        return Outcome(answer=majority(boxed))

    def prompt(self, ep: Episode, problem: str, said: Sequence[str], me: int) -> str:
        """The problem, and after the first round the peers' solutions and one's own."""
        if not said:
            return problem
        peers = [text for i, text in enumerate(said) if i != me]
        ep.rng.shuffle(peers)
        others = "\n".join(f"Other: {text}" for text in peers[: self.others])
        return f"{problem}\nYou: {said[me]}\n{others}"


class Chain(Workflow):
    """Generator, verifier, refiner; each boxes its answer, and the majority of the three counts."""

    schema = MATH
    roles = (
        Role("generator", reply=Boxed(), system=BOXED),
        Role("verifier", reply=Boxed(), system="Check the solution and write the right answer in \\boxed{}."),
        Role("refiner", reply=Boxed(), system="Improve the solution and write the answer in \\boxed{}."),
    )

    async def run(self, ep: Episode) -> Outcome:
        problem = f"Problem: {ep.task.problem}"
        first = await ep.act("generator", problem)
        second = await ep.act("verifier", f"{problem}\nSolution: {first.text}")
        third = await ep.act("refiner", f"{problem}\nSolution: {first.text}\nFeedback: {second.text}")
        return Outcome(answer=majority([third.value, second.value, first.value]))


def majority(answers: Sequence[str | None]) -> str:
    """The answer most often given, the earliest of equals; empty where nobody gave one."""
    given = [" ".join(a.split()) for a in answers if a]
    return Counter(given).most_common(1)[0][0] if given else ""


def expert(call: Call) -> str:
    """Right in every seat: solves from the reference, approves what is right, searches the task's hops."""
    task = call.task
    seen = call.messages[-1]["content"]
    if "answer" in task.reference:
        answer = task.reference["answer"]
        if call.role == "verifier" and "<verify>" in call.messages[0]["content"]:
            return (
                f"<verify>{'approve' if f'{{{answer}}}' in seen.split('Solver: ')[-1] else 'reject'}</verify>"
            )
        return f"{task.reference.get('solution') or ''} \\boxed{{{answer}}}".strip()
    hops = task.reference.get("hops") or ()
    left = [h for h in hops if f"Query: {h['question']}" not in seen]
    if call.role == "verifier":
        return f"<verify>{'no' if left else 'yes'}</verify>"
    if call.role == "searcher":
        return f"<search>{left[0]['question'] if left else NOTHING}</search>"
    return f"<final_answer>{UNKNOWN if left and hops else task.reference['answers'][0]}</final_answer>"
