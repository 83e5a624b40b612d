"""The teams that play the games; the same three programs for every game.

    solo    one planner moves
    duo     a proposer suggests, a critic approves or corrects; light enough for a tiny model
    tool    a coder writes a program that prints moves, a planner decides (Stronger-MAS)

Every prompt shows the board as it is now. With `moves=1` a reply is one of the board's moves and nothing else (a
choice, which an engine can enforce); with more it ends in <plan>…</plan>, and thinking may stand before. A
malformed reply neither moves nor approves: it costs a step.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....agents.policies import Call
from ....agents.roles import Choice, Custom, Format, FormatError, Reply, Role, Tags
from ...core.tasks import DataSet, Task
from ...core.trace import Trace
from ...core.workflow import Episode, Outcome, Workflow, WorkflowError, unknown
from . import GAMES
from .game import GAME_TASK, Game, Solution, data_set
from .simulator import walk

APPROVE = "approve"
_PLAN = re.compile(r"<plan>([^<]*)</plan>\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class ReadPlan:
    """Reads the <plan>…</plan> that a reply ends in: 1 to `most` moves, or the word of approval."""

    game: Game
    most: int
    approval: bool = False

    def __call__(self, said: str) -> Solution:
        found = _PLAN.search(said)
        if found is None:
            raise FormatError("the reply does not end in <plan>…</plan>")
        if self.approval and found[1].strip().casefold() == APPROVE:
            return (APPROVE,)
        moves = self.game.read_plan(found[1])
        if moves is None or len(moves) > self.most:
            raise FormatError(f"no 1 to {self.most} moves inside <plan>")
        return moves


@lru_cache(maxsize=256)
def _choice(options: Solution) -> Choice:
    return Choice(*options)


class GameTeam(Workflow, ABC):
    """Base of the three teams: a board that moves on with each turn, until solved or out of steps.

    `difficulty` is a level's name or settings of the game's own; `moves` is the most a turn may make;
    `max_steps` replaces the game's own limit; `task_seed` gives other tasks.
    """

    schema = GAME_TASK
    tools: tuple[str, ...] = ("world",)

    def __init__(
        self,
        game: str,
        difficulty: str | Mapping[str, Any] = "normal",
        moves: int = 1,
        max_steps: int | None = None,
        max_turns: int | None = None,
        task_seed: int = 0,
    ) -> None:
        if game not in GAMES:
            raise unknown("game", game, GAMES)
        for name, value in (("moves", moves), ("max_steps", max_steps), ("max_turns", max_turns)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.game = GAMES[game]
        self.level = self.game.level(difficulty)
        self.moves, self.max_steps, self.max_turns = moves, max_steps, max_turns
        self.task_seed = task_seed
        self.roles = self.make_roles()

    @abstractmethod
    def make_roles(self) -> tuple[Role, ...]:
        """The roles, told this game's rules."""

    @abstractmethod
    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        """The moves to make, and what each role had proposed. `last` says what became of the last turn."""

    def make_tasks(self, split: str, size: int | None) -> DataSet:
        """The environment's own tasks."""
        return data_set(self.game, split, size, self.level, self.task_seed)

    async def run(self, ep: Episode) -> Outcome:
        game = self.game
        if ep.task.game != game.name:
            raise WorkflowError(
                f"task {ep.task.id!r} is of the game {ep.task.game!r}; this plays {game.name!r}"
            )
        start = game.state(ep.task.start)
        board, last, solved, steps, turns = game.text(start), "", game.solved(start), 0, 0
        limit = self.max_steps or game.limit(start)
        while not solved and steps < limit and turns < (self.max_turns or limit):
            moves, proposals = await self.decide(ep, board, last)
            went = await ep.use(
                "world", game=game.name, state=board, moves=moves[: limit - steps], proposals=proposals
            )
            board, solved = went["state"], went["solved"]
            steps, turns = steps + went["steps"], turns + 1
            last = f"{went['refused']} was refused." if went["refused"] else "" if moves else "Nobody moved."
        return Outcome(solved=solved, steps=steps, turns=turns, board=board)

    def prompt(self, board: str, last: str, *more: str) -> str:
        """The board, an empty line, what there is to know about it."""
        lines = (self.game.facts(self.game.state(board)), *([f"Last: {last}"] if last else ()), *more)
        return "\n".join((f"{board}\n", *lines))

    def format(self, board: str = "", approval: bool = False) -> Format:
        """Format of a move: a choice among the board's moves, or a plan."""
        if self.moves == 1 and board:
            words = (APPROVE,) if approval else ()
            return _choice((*words, *self.game.moves(self.game.state(board))))
        first = f"{APPROVE} | " if approval else ""
        says = f"{first}one move" if self.moves == 1 else f"<plan>{first}move, move, …</plan>"
        return Custom(ReadPlan(self.game, self.moves, approval), says, ends=("</plan>",))

    @property
    def how(self) -> str:
        """The end of a system prompt: how to say what one wants to do."""
        if self.moves == 1:
            return "Reply with one move and nothing else."
        return f"Think, then end with <plan>move, move</plan>: at most {self.moves} moves."

    def picture(self, trace: Trace, task: Task) -> Any:
        """The board as it stands, as an array of pixels."""
        return self.game.picture(self.game.state(self.scene(trace, task)))

    def scene(self, trace: Trace, task: Task) -> str:
        """The board as it stands, as text."""
        made = trace.uses("world")
        return str(made[-1].result["state"] if made else task.view["start"])


class Solo(GameTeam):
    """One planner moves."""

    def make_roles(self) -> tuple[Role, ...]:
        return (Role("planner", reply=self.format(), system=f"{self.game.rules} {self.how}"),)

    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        prompt = self.prompt(board, last)
        moves = moves_of(await ep.act("planner", prompt, reply=self.format(board), anchor=board))
        return moves, {"planner": moves}


class Duo(GameTeam):
    """A proposer suggests moves; the critic approves them or says better ones, and those are made."""

    def make_roles(self) -> tuple[Role, ...]:
        critic = (
            f"Another proposes a move. Reply {APPROVE} if it is good, else a better move, and nothing else."
        )
        if self.moves > 1:
            critic = (
                f"Another proposes moves. If they are good, end with <plan>{APPROVE}</plan>. Else: {self.how}"
            )
        return (
            Role("proposer", reply=self.format(), system=f"{self.game.rules} {self.how}"),
            Role("critic", reply=self.format(approval=True), system=f"{self.game.rules} {critic}"),
        )

    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        said = await ep.act("proposer", self.prompt(board, last), reply=self.format(board), anchor=board)
        proposed = moves_of(said)
        proposal = f"Proposal: {', '.join(proposed) or 'none'}"
        said = await ep.act(
            "critic",
            self.prompt(board, last, proposal),
            reply=self.format(board, approval=True),
            anchor=f"{board}\n{proposal}",
        )
        moves = moves_of(said)
        moves = proposed if moves == (APPROVE,) else moves
        return moves, {"proposer": proposed, "critic": moves}


class ToolTeam(GameTeam):
    """A coder's program reads the board and prints moves; the planner sees them and decides."""

    tools = ("world", "python")

    def __init__(
        self,
        game: str,
        difficulty: str | Mapping[str, Any] = "normal",
        moves: int = 64,
        max_steps: int | None = None,
        max_turns: int | None = 4,
        task_seed: int = 0,
        seconds: float = 5.0,
    ) -> None:
        self.seconds = seconds
        super().__init__(game, difficulty, moves, max_steps, max_turns, task_seed)

    def make_roles(self) -> tuple[Role, ...]:
        code = (
            "Write a Python program that reads the board from standard input and prints the moves, parted by "
            "commas. Write <code>program</code>."
        )
        plan = f"A colleague's program has printed moves; they may be wrong. Check them. {self.how}"
        return (
            Role("coder", reply=Tags("code"), system=f"{self.game.rules} {code}"),
            Role("planner", reply=self.format(), system=f"{self.game.rules} {plan}"),
        )

    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        code = await ep.act("coder", self.prompt(board, last), anchor=board)
        printed, suggested = "nothing; there was no program", None
        if code.ok:
            ran = await ep.use("python", program=code.value, board=board, seconds=self.seconds)
            suggested = None if ran["error"] else self.game.read_plan(ran["printed"])
            printed = f"{ran['ended']}: {ran['error']}" if ran["error"] else ran["printed"] or "nothing"
        heard = f"Program printed: {printed}"
        prompt, anchor = self.prompt(board, last, heard), f"{board}\n{heard}"
        moves = moves_of(await ep.act("planner", prompt, reply=self.format(board), anchor=anchor))
        return moves, {"coder": suggested or (), "planner": moves}


def moves_of(said: Reply) -> Solution:
    """The moves of a reply; a malformed one has none."""
    if not said.ok:
        return ()
    return (said.value,) if isinstance(said.value, str) else tuple(said.value)


def expert(call: Call) -> str:
    """A shortest solution from the board that the prompt shows; the critic approves what loses no step."""
    game = GAMES[call.task.view["game"]]
    shown, _, rest = call.messages[-1]["content"].partition("\n\n")
    state = game.state(shown)
    best = game.best(state) or game.moves(state)[:1]
    if call.role == "critic":
        proposed = game.read_plan(rest.rpartition("Proposal: ")[2])
        if proposed is not None:
            after, steps, _ = walk(game, state, proposed)
            rest_of = game.best(after)
            if rest_of is not None and steps + len(rest_of) == len(best):
                return APPROVE if call.choices else f"<plan>{APPROVE}</plan>"
    if call.role == "coder":
        return f'<code>\nprint("{", ".join(best)}")\n</code>'
    most = re.search(r"at most (\d+) moves", call.messages[0]["content"])
    return best[0] if call.choices or most is None else f"<plan>{', '.join(best[: int(most[1])])}</plan>"
