"""Math and search teams of Dr. MAS and MARTI, without the faults of their code.

    solver-verifier   Dr. MAS: a solver solves, a verifier checks; a rejected solution is solved again
    search-router     Dr. MAS: a verifier routes to the searcher or to the answerer
    debate            MARTI: several debaters, several rounds, majority vote
    chain             MARTI: generate, verify, refine; majority vote of the boxed answers

A malformed verdict is never an approval: it counts as "reject", or as "no" to the question whether enough is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...agents.policies import Call
from ...agents.roles import Boxed, Role, Tags
from ..core.tasks import MATH
from ..core.workflow import Episode, Outcome, Workflow
from .mask import NOTHING
from .parts import ANSWER, PROMPTS, UNKNOWN, first_line, passages_text


class SolverVerifier(Workflow):
    """Team of a solver and a verifier, with at most `max_loops` solutions. The verifier approves or rejects each but the last."""

    schema = MATH
    prompts = PROMPTS / "solver_verifier.yaml"
    roles = (
        Role("solver", reply=Boxed(), sees=("problem", "said")),
        Role(
            "verifier",
            reply=Tags("verify", verify=("approve", "reject"), otherwise="reject"),
            sees=("problem", "said"),
        ),
    )

    def __init__(self, max_loops: int = 2) -> None:
        if max_loops < 1:
            raise ValueError(f"max_loops must be at least 1, got {max_loops}")
        self.max_loops = max_loops

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"loops": self.max_loops}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        problem, lines, answer = ep.task.problem, list[str](), ""
        for loop in range(self.max_loops):
            solved = await ep.act("solver", {"problem": problem, "said": "\n".join(lines)}, turn=loop)
            answer = solved.value or answer
            lines.append(f"Solver: {solved.text}")
            if loop + 1 == self.max_loops:
                break
            verdict = await ep.act("verifier", {"problem": problem, "said": "\n".join(lines)}, turn=loop)
            if verdict.value == "approve":
                return Outcome(answer=answer, loops=loop + 1, approved=True)
            lines.append(f"Verifier: {verdict.text}")
        return Outcome(answer=answer, loops=self.max_loops, approved=False)


class SearchRouter(Workflow):
    """Team in which a verifier decides whether enough is known: no -> search, yes -> answer. The last step always answers."""

    tools = ("retrieve",)
    prompts = PROMPTS / "search_router.yaml"
    roles = (
        Role(
            "verifier",
            reply=Tags("verify", verify=("yes", "no"), otherwise="no"),
            sees=("question", "found"),
        ),
        Role("searcher", reply=Tags("search"), sees=("question", "found")),
        Role("answerer", reply=ANSWER, sees=("question", "found")),
    )

    def __init__(self, max_steps: int = 4, top_k: int = 3) -> None:
        if max_steps < 1 or top_k < 1:
            raise ValueError(f"max_steps and top_k must be at least 1, got {max_steps} and {top_k}")
        self.max_steps, self.top_k = max_steps, top_k

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"steps": self.max_steps - 1}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        seen, searches = {"question": ep.task.question, "found": "none"}, 0
        for step in range(self.max_steps - 1):
            verdict = await ep.act("verifier", seen, turn=step)
            if verdict.value == "yes":
                break
            query = await ep.act("searcher", seen, turn=step)
            docs = await ep.use("retrieve", query=query.value or first_line(query.text), k=self.top_k)
            text = f"Query: {query.value or first_line(query.text)}\n{passages_text(docs)}"
            seen = {**seen, "found": f"{seen['found']}\n{text}" if searches else text}
            searches += 1
        reply = await ep.act("answerer", seen)
        return Outcome(answer=reply.value, searches=searches)


class Debate(Workflow):
    """Team of debaters that answer at the same time, in rounds. Each sees up to `others` answers of its peers, shuffled."""

    schema = MATH
    prompts = PROMPTS / "debate.yaml"

    def __init__(self, debaters: int = 3, rounds: int = 2, others: int = 5) -> None:
        if debaters < 2 or rounds < 1:
            raise ValueError(f"a debate needs 2 or more debaters and a round, got {debaters} and {rounds}")
        self.rounds, self.others = rounds, others
        self.roles = (Role("debater", instances=debaters, reply=Boxed(), sees=("problem", "own", "others")),)

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"debaters": self.roles[0].instances, "rounds": self.rounds}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        cast = ep.cast("debater")
        problem = ep.task.problem
        solutions: Sequence[str] = ()
        boxed: list[str | None] = []
        for turn in range(self.rounds):
            seen = [{"problem": problem, **self.heard(ep, solutions, i)} for i in range(len(cast))]
            replies = await ep.all(*(ep.act(a, s, turn=turn) for a, s in zip(cast, seen, strict=True)))
            solutions, boxed = [r.text for r in replies], [r.value for r in replies]
        return Outcome(answer=majority(boxed))

    def heard(self, ep: Episode, solutions: Sequence[str], me: int) -> dict[str, str]:
        """Return the fields of a prompt after the first round: the debater's own solution and those of its peers."""
        if not solutions:
            return {"own": "", "others": ""}
        peers = [text for i, text in enumerate(solutions) if i != me]
        ep.rng.shuffle(peers)
        return {"own": solutions[me], "others": "\n".join(f"Other: {text}" for text in peers[: self.others])}


class Chain(Workflow):
    """Team of generator, verifier and refiner. Each boxes an answer, and the majority of the three counts."""

    schema = MATH
    prompts = PROMPTS / "chain.yaml"
    roles = (
        Role("generator", reply=Boxed(), sees=("problem",)),
        Role("verifier", reply=Boxed(), sees=("problem", "solution")),
        Role("refiner", reply=Boxed(), sees=("problem", "solution", "feedback")),
    )

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        problem = ep.task.problem
        first = await ep.act("generator", {"problem": problem})
        second = await ep.act("verifier", {"problem": problem, "solution": first.text})
        seen = {"problem": problem, "solution": first.text, "feedback": second.text}
        third = await ep.act("refiner", seen)
        return Outcome(answer=majority([third.value, second.value, first.value]))


def majority(answers: Sequence[str | None]) -> str:
    """Return the most frequent answer, and of equally frequent ones the first; "" if there is none."""
    plain = [" ".join(a.split()) for a in answers if a]
    return Counter(plain).most_common(1)[0][0] if plain else ""


def expert(call: Call) -> str:
    """Reply right in every role: solve from the reference, approve a right solution, search the task's hops."""
    task, seen = call.task, call.fields
    if "answer" in task.reference:
        answer = task.reference["answer"]
        if call.role == "verifier" and "said" in seen:
            right = f"{{{answer}}}" in seen["said"].split("Solver: ")[-1]
            return f"<verify>{'approve' if right else 'reject'}</verify>"
        return f"{task.reference.get('solution') or ''} \\boxed{{{answer}}}".strip()
    hops = task.reference.get("hops") or ()
    left = [h for h in hops if f"Query: {h['question']}" not in seen["found"]]
    if call.role == "verifier":
        return f"<verify>{'no' if left else 'yes'}</verify>"
    if call.role == "searcher":
        return f"<search>{left[0]['question'] if left else NOTHING}</search>"
    return f"<final_answer>{UNKNOWN if left and hops else task.reference['answers'][0]}</final_answer>"
