"""The world as a tool: it takes the state and the moves, and gives the next state. Pure, so forks are free.

What moves a team makes, and what each role had proposed, thus stand in the trace; rewards read them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.tasks import DataSet
from ...tools.tool import Tool
from . import GAMES
from .game import Game, S

SHOWN = 600  # characters of a program's output that roles see


def walk(game: Game[S], state: S, moves: Sequence[str]) -> tuple[S, int, str]:
    """Make the moves until one is refused or the game is solved: the state, the steps taken, the refused move.

    A refused move costs its step, and so does a turn without any move.
    """
    steps = 0
    for move in moves:
        if game.solved(state):
            break
        steps += 1
        after = game.play(state, move)
        if after is None:
            return state, steps, move
        state = after
    return state, max(steps, 1), ""


def advance(
    game: str, state: str, moves: Sequence[str], proposals: Mapping[str, object]
) -> dict[str, object]:
    """`walk` on texts; `proposals` (the moves by role) are kept for rewards and change nothing."""
    rules = GAMES[game]
    after, steps, refused = walk(rules, rules.state(state), moves)
    return {"state": rules.text(after), "steps": steps, "refused": refused, "solved": rules.solved(after)}


def world(data: DataSet) -> Tool:
    """The tool `world`."""
    return Tool(advance, name="world", blocking=False)


def python(data: DataSet) -> Tool:
    """The tool `python`: a role's program, run in the sandbox with the board as its input."""
    return Tool(_run, name="python")


def _run(program: str, board: str, seconds: float) -> dict[str, str]:
    from ...tools.sandbox.runner import Limits, run_python

    ran = run_python(program, board, limits=Limits(time_limit=seconds))
    fault = "" if ran.ok else (ran.error or ran.ended).strip()
    return {"ended": str(ran.ended), "printed": ran.stdout.strip()[:SHOWN], "error": fault[-SHOWN:]}
