"""M-ASK without a fixed order: a router chooses who acts next, when to use the tool, and when to stop.

    router -> planner | searcher | retrieve | summarizer | updater | answerer | stop -> router -> …

The roles and their prompts are those of `mask.py`. Their results are on a *desk*: steps, a query, its passages, the evidence
in them, an answer. A move is possible if its inputs are on the desk. When evidence is filed, query, passages and evidence
are cleared. A malformed move does nothing and costs a turn. The move `stop` returns the latest answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...agents.policies import Call
from ...agents.roles import Choice, Role
from ..core.workflow import Episode, Outcome, Workflow
from . import mask
from .mask import ROLES, Step, filed, filing, told
from .parts import PROMPTS, UNKNOWN, passages_text

STOP = "stop"
NEEDS = {"retrieve": "query", "summarizer": "passages", "updater": "evidence", STOP: "answer"}
MOVES = ("planner", "searcher", "retrieve", "summarizer", "updater", "answerer", STOP)
ROUTER = Role(
    "router",
    reply=Choice(*MOVES),
    sees=("question", "steps", "query", "passages", "evidence", "answer", "last", "moves"),
)


@dataclass
class Desk:
    """Results of the team so far."""

    question: str
    steps: list[Step] = field(default_factory=list)
    query: str = ""
    queries: list[str] = field(default_factory=list)
    passages: Sequence[Mapping[str, str]] = ()
    evidence: str = ""
    answer: str = ""
    complete: bool = False
    """Flag: the searcher replied that nothing is missing."""
    last: str = "none"
    """Role that acted last."""

    def open(self) -> tuple[str, ...]:
        """Return the possible moves: those whose inputs are on the desk."""
        return tuple(move for move in MOVES if move not in NEEDS or getattr(self, NEEDS[move]))

    def shown(self) -> dict[str, str]:
        """Return the desk as fields of the router's prompt."""
        return {
            "question": self.question, "steps": told(self.steps), "passages": str(len(self.passages)),
            "query": "nothing is missing" if self.complete else self.query or "none",
            "evidence": self.evidence or "none", "answer": self.answer or "none", "last": self.last,
            "moves": ", ".join(self.open()),
        }  # fmt: skip


class MaskRouter(Workflow):
    """M-ASK in which a router makes at most `max_moves` moves. A search returns `top_k` passages."""

    roles = (ROUTER, *ROLES)
    tools = ("retrieve",)
    prompts = (PROMPTS / "mask.yaml", PROMPTS / "mask_router.yaml")

    def __init__(self, max_moves: int = 16, top_k: int = 5) -> None:
        if max_moves < 1 or top_k < 1:
            raise ValueError(f"max_moves and top_k must be at least 1, got {max_moves} and {top_k}")
        self.max_moves, self.top_k = max_moves, top_k

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"searches": self.max_moves}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        desk, moves = Desk(ep.task.question), 0
        while moves < self.max_moves:
            choice = await ep.act("router", desk.shown(), reply=Choice(*desk.open()), turn=moves)
            if choice.value == STOP:
                return Outcome(answer=desk.answer or UNKNOWN, moves=moves, stopped=True)
            if choice.ok:
                await self.move(ep, desk, choice.value, moves)
            moves += 1
        return Outcome(answer=desk.answer or UNKNOWN, moves=moves, stopped=False)

    async def move(self, ep: Episode, desk: Desk, who: str, turn: int) -> None:
        """Call a role or the tool, and put the result on the desk."""
        known, desk.last = {"question": desk.question, "steps": told(desk.steps)}, who
        if who == "planner":
            plan = (await ep.act(who, {"question": desk.question}, turn=turn)).value
            desk.steps = list(plan["steps"]) or desk.steps
        elif who == "searcher":
            queries = "\n".join(f"{i}. {query}" for i, query in enumerate(desk.queries, 1))
            seen = {**known, "queries": queries}
            search = (await ep.act(who, seen, turn=turn)).value
            desk.query, desk.complete = search.get("search", ""), "end" in search
            desk.queries += [desk.query] if desk.query else []
            desk.passages, desk.evidence = (), ""
        elif who == "retrieve":
            desk.passages = await ep.use("retrieve", query=desk.query, k=self.top_k)
        elif who == "summarizer":
            seen = {"passages": passages_text(desk.passages), "query": desk.query}
            desk.evidence = (await ep.act(who, seen, turn=turn)).value
        elif who == "updater":
            new = Step(desk.query, desk.evidence)
            seen = filing(desk.question, known["steps"], desk.steps, new, desk.answer or UNKNOWN)
            desk.steps = filed(desk.steps, (await ep.act(who, seen, turn=turn)).value, new)
            desk.query, desk.passages, desk.evidence = "", (), ""
        else:
            desk.answer = (await ep.act(who, known, turn=turn)).value


def expert(call: Call) -> str:
    """Make no more moves than needed: search hop by hop for what is left, then answer, then stop."""
    if call.role != "router":
        return mask.expert(call)
    for move in ("updater", "summarizer", "retrieve"):
        if call.choices and move in call.choices:
            return move
    if call.fields["answer"] not in ("none", UNKNOWN):
        return STOP
    return "searcher" if mask.hops_left(call) else "answerer"
