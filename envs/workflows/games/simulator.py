"""World of a game as a pure tool: it takes the state and the moves, and returns the next state.

So the trace holds the moves of the team and the proposals of each role, which the rewards read. Forks need no copy of the
world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.tasks import DataSet
from ...tools.tool import Tool
from . import GAMES
from .game import Game, S

SHOWN = 600  # characters of a program's output that roles see


def walk(game: Game[S], state: S, moves: Sequence[str]) -> tuple[S, int, str]:
    """Make the moves until one is refused or the game is solved. Return the state, the number of steps, the refused move.

    A refused move counts as a step. A turn without a move counts as one step, too.
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
    """Do what `walk` does, on states as text. `proposals`, the moves by role, are only recorded, for the rewards."""
    rules = GAMES[game]
    after, steps, refused = walk(rules, rules.state(state), moves)
    return {"state": rules.text(after), "steps": steps, "refused": refused, "solved": rules.solved(after)}


def world(data: DataSet) -> Tool:
    """Return the tool `world`."""
    return Tool(advance, name="world", blocking=False)


def python(data: DataSet) -> Tool:
    """Return the tool `python`, which runs a role's program in the sandbox, with the board as its input."""
    return Tool(_run, name="python")


def _run(program: str, board: str, seconds: float) -> dict[str, str]:
    from ...tools.sandbox.runner import Limits, run_python

    ran = run_python(program, board, limits=Limits(time_limit=seconds))
    fault = "" if ran.ok else (ran.error or ran.ended).strip()
    return {"ended": str(ran.ended), "printed": ran.stdout.strip()[:SHOWN], "error": fault[-SHOWN:]}
