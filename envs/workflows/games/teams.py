"""The teams that play the games; the same three programs for every game.

    solo    one planner moves
    duo     a proposer suggests, a critic approves or corrects; light enough for a tiny model
    tool    a coder writes a program that prints moves, a planner decides (Stronger-MAS)

Every prompt shows the current board. With `moves=1` a reply is one of the board's moves and nothing else, which an engine can
enforce as a choice. With more moves it ends in <plan>…</plan>, and other text may come first. A malformed reply neither moves
nor approves. It costs a step.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ....agents.policies import Call
from ....agents.roles import Choice, Custom, Format, FormatError, Reply, Role, Tags
from ...core.records import Picture
from ...core.tasks import DataSet, Task
from ...core.trace import Trace
from ...core.workflow import Episode, Outcome, Workflow, WorkflowError, unknown
from ..parts import PROMPTS
from . import GAMES
from .game import GAME_TASK, AnyGame, Level, Solution, data_set
from .simulator import walk

APPROVE = "approve"
SEES = ("board", "facts", "last", "most")
_PLAN = re.compile(r"<plan>([^<]*)</plan>\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class ReadPlan:
    """Reader of the <plan>…</plan> at the end of a reply: 1 to `most` moves, or the word of approval."""

    game: AnyGame
    most: int
    approval: bool = False

    def __call__(self, text: str) -> Solution:
        match = _PLAN.search(text)
        if match is None:
            raise FormatError("the reply does not end in <plan>…</plan>")
        if self.approval and match[1].strip().casefold() == APPROVE:
            return (APPROVE,)
        moves = self.game.read_plan(match[1])
        if moves is None or len(moves) > self.most:
            raise FormatError(f"no 1 to {self.most} moves inside <plan>")
        return moves


@dataclass(frozen=True)
class ReadMove:
    """Reader of one move and nothing else, or of the word of approval. It does not know the board."""

    game: AnyGame
    approval: bool = False

    def __call__(self, text: str) -> Solution:
        moves = self.game.read_plan(text)
        if self.approval and text.strip().casefold() == APPROVE:
            return (APPROVE,)
        if moves is None or len(moves) != 1:
            raise FormatError("one move and nothing else")
        return moves


@lru_cache(maxsize=256)
def _choice(options: Solution) -> Choice:
    return Choice(*options)


class GameTeam(Workflow, ABC):
    """Base of the three teams. The team moves in turns, until the game is solved or the steps are used up.

    `difficulty` is the name of a level or settings of the game. `moves` is the largest number of moves in a turn. `max_steps`
    replaces the game's own limit. Another `task_seed` gives other tasks.
    """

    schema = GAME_TASK
    tools: tuple[str, ...] = ("world",)

    def __init__(
        self,
        game: str,
        difficulty: str | Level = "normal",
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
        """Return the roles, with the rules of the game in their prompts."""

    @abstractmethod
    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        """Return the moves to make, and the moves that each role proposed. `last` describes the result of the last turn."""

    def make_tasks(self, split: str, size: int | None) -> DataSet:
        """Return the tasks of a split."""
        return data_set(self.game, split, size, self.level, self.task_seed)

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
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

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        first, second = self.game.samples
        one = first if self.moves == 1 else ""
        reply = one or f"<plan>{first}, {second}</plan>"
        return {"rules": self.game.rules, "one": one, "most": self.moves, "reply": reply}

    def seen(self, board: str, last: str) -> dict[str, str]:
        """Return the fields of a prompt: the board and its facts."""
        facts = self.game.facts(self.game.state(board))
        return {"board": board, "facts": facts, "last": last, "most": str(self.moves)}

    def format(self, board: str = "", approval: bool = False) -> Format:
        """Return the format of a reply: a choice among the board's moves, or a plan."""
        first = f"{APPROVE} | " if approval else ""
        if self.moves > 1:
            says = f"<plan>{first}move, move, …</plan>"
            return Custom(ReadPlan(self.game, self.moves, approval), says, ends=("</plan>",))
        if not board:
            return Custom(ReadMove(self.game, approval), f"{first}one move")
        words = (APPROVE,) if approval else ()
        return _choice((*words, *self.game.moves(self.game.state(board))))

    def picture(self, trace: Trace, task: Task) -> Picture:
        """Return the current board as an array of pixels."""
        return self.game.picture(self.game.state(self.scene(trace, task)))

    def scene(self, trace: Trace, task: Task) -> str:
        """Return the current board as text."""
        made = trace.uses("world")
        return str(made[-1].result["state"] if made else task.view["start"])


class Solo(GameTeam):
    """Team of one planner."""

    prompts = PROMPTS / "games_solo.yaml"

    def make_roles(self) -> tuple[Role, ...]:
        """Make the roles for the game."""
        return (Role("planner", reply=self.format(), sees=SEES),)

    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        """Ask the roles for the moves of this turn."""
        seen = self.seen(board, last)
        moves = moves_of(await ep.act("planner", seen, reply=self.format(board), anchor=board))
        return moves, {"planner": moves}


class Duo(GameTeam):
    """Team of a proposer, who suggests moves, and a critic, who approves them or replies with better ones."""

    prompts = PROMPTS / "games_duo.yaml"

    def make_roles(self) -> tuple[Role, ...]:
        """Make the roles for the game."""
        return (
            Role("proposer", reply=self.format(), sees=SEES),
            Role("critic", reply=self.format(approval=True), sees=(*SEES, "proposal")),
        )

    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        """Ask the roles for the moves of this turn."""
        seen = self.seen(board, last)
        reply = await ep.act("proposer", seen, reply=self.format(board), anchor=board)
        proposed = moves_of(reply)
        proposal = ", ".join(proposed) or "none"
        reply = await ep.act(
            "critic",
            {**seen, "proposal": proposal},
            reply=self.format(board, approval=True),
            anchor=f"{board}\nProposal: {proposal}",
        )
        moves = moves_of(reply)
        moves = proposed if moves == (APPROVE,) else moves
        return moves, {"proposer": proposed, "critic": moves}


class ToolTeam(GameTeam):
    """Team of a coder, whose program reads the board and prints moves, and a planner, who sees them and decides."""

    tools = ("world", "python")
    prompts = PROMPTS / "games_tool.yaml"

    def __init__(
        self,
        game: str,
        difficulty: str | Level = "normal",
        moves: int = 64,
        max_steps: int | None = None,
        max_turns: int | None = 4,
        task_seed: int = 0,
        seconds: float = 5.0,
    ) -> None:
        self.seconds = seconds
        super().__init__(game, difficulty, moves, max_steps, max_turns, task_seed)

    def make_roles(self) -> tuple[Role, ...]:
        """Make the roles for the game."""
        return (
            Role("coder", reply=Tags("code"), sees=SEES),
            Role("planner", reply=self.format(), sees=(*SEES, "printed")),
        )

    async def decide(self, ep: Episode, board: str, last: str) -> tuple[Solution, dict[str, Solution]]:
        """Ask the roles for the moves of this turn."""
        seen = self.seen(board, last)
        code = await ep.act("coder", seen, anchor=board)
        printed, suggested = "nothing; there was no program", None
        if code.ok:
            ran = await ep.use("python", program=code.value, board=board, seconds=self.seconds)
            suggested = None if ran["error"] else self.game.read_plan(ran["printed"])
            printed = f"{ran['ended']}: {ran['error']}" if ran["error"] else ran["printed"] or "nothing"
        anchor = f"{board}\nProgram printed: {printed}"
        seen = {**seen, "printed": printed}
        moves = moves_of(await ep.act("planner", seen, reply=self.format(board), anchor=anchor))
        return moves, {"coder": suggested or (), "planner": moves}


def moves_of(reply: Reply) -> Solution:
    """Return the moves of a reply; none for a malformed one."""
    if not reply.ok:
        return ()
    return (reply.value,) if isinstance(reply.value, str) else tuple(reply.value)


def expert(call: Call) -> str:
    """Return a shortest solution from the board that the role sees. The critic approves moves that lose no step."""
    game = GAMES[call.task.view["game"]]
    state = game.state(call.fields["board"])
    best = game.best(state) or game.moves(state)[:1]
    if call.role == "critic":
        proposed = game.read_plan(call.fields["proposal"])
        if proposed is not None:
            after, steps, _ = walk(game, state, proposed)
            rest_of = game.best(after)
            if rest_of is not None and steps + len(rest_of) == len(best):
                return APPROVE if call.choices else f"<plan>{APPROVE}</plan>"
    if call.role == "coder":
        return f'<code>\nprint("{", ".join(best)}")\n</code>'
    return best[0] if call.choices else f"<plan>{', '.join(best[: int(call.fields['most'])])}</plan>"
