"""Plan-path: walk from P to G on a grid with walls, in as few steps as possible.

The game follows PettingLLMs' plan-path (10×10, obstacle rate 0.22). There, later prompts show the first position. Here every
prompt shows the walker's current position.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...core.records import Picture
from .game import Game, Solution
from .grid import DIRECTIONS, MOVE, Cell, beside, distance, drawn, only, signs, told
from .pictures import paint


class PathState(NamedTuple):
    """Places of the walls, the goal and the walker."""

    height: int
    width: int
    walls: frozenset[Cell]
    goal: Cell
    at: Cell


def draw(rng: random.Random, mine: Callable[[str], bool], side: int, walls: float) -> PathState | None:
    """Draw random walls, and two free cells that are not neighbours."""
    cells = [(r, c) for r in range(side) for c in range(side)]
    blocked = frozenset(cell for cell in cells if rng.random() < walls)
    free = [cell for cell in cells if cell not in blocked]
    if len(free) < 2:
        return None
    at, goal = rng.sample(free, 2)
    state = PathState(side, side, blocked, goal, at)
    return state if distance(at, goal) > 1 and mine(text(state)) else None


def parse(text: str) -> PathState:
    """Read a board. `X` is the walker on the goal."""
    cells = signs(text, ".#PGX")
    height, width = (max(axis) + 1 for axis in zip(*cells, strict=True))
    return PathState(
        height,
        width,
        frozenset(cell for cell, sign in cells.items() if sign == "#"),
        only((cell for cell, sign in cells.items() if sign in "GX"), "goal G"),
        only((cell for cell, sign in cells.items() if sign in "PX"), "walker P"),
    )


def text(state: PathState) -> str:
    """Write the board as text."""

    def sign(cell: Cell) -> str:
        if cell == state.at:
            return "X" if cell == state.goal else "P"
        return "G" if cell == state.goal else "#" if cell in state.walls else "."

    return drawn(state.height, state.width, sign)


def facts(state: PathState) -> str:
    """Tell what a reader of the board would work out first."""
    free = [name for name in DIRECTIONS if play(state, name) is not None]
    return f"P: {told(state.at)}. G: {told(state.goal)}. Free: {', '.join(free) or 'none'}."


def moves(state: PathState) -> tuple[str, ...]:
    """List every move of this board."""
    return tuple(DIRECTIONS)


def play(state: PathState, move: str) -> PathState | None:
    """Return the board after a move, or None if it is refused."""
    to = beside(state.at, move)
    inside = 0 <= to[0] < state.height and 0 <= to[1] < state.width
    return state._replace(at=to) if inside and to not in state.walls else None


def solved(state: PathState) -> bool:
    """Tell whether the goal is reached."""
    return state.at == state.goal


def left(state: PathState) -> float:
    """Return the Manhattan distance to the goal."""
    return distance(state.at, state.goal)


def solve(state: PathState) -> Solution | None:
    """Return a shortest solution or None, by breadth-first search from the goal to the walker."""
    cells = {(r, c) for r in range(state.height) for c in range(state.width)} - state.walls
    toward: dict[Cell, str] = {state.goal: ""}
    queue = deque([state.goal])
    while queue and state.at not in toward:
        row, column = queue.popleft()
        for name, (down, right) in DIRECTIONS.items():
            before = (row - down, column - right)
            if before in cells and before not in toward:
                toward[before] = name
                queue.append(before)
    if state.at not in toward:
        return None
    plan, cell = [], state.at
    while cell != state.goal:
        plan.append(toward[cell])
        cell = beside(cell, toward[cell])
    return tuple(plan)


def limit(state: PathState) -> int:
    """Return the steps that an episode from this start may take."""
    return 2 * (state.height + state.width)


def picture(state: PathState) -> Picture:
    """Paint the board."""
    colours = {cell: "wall" for cell in state.walls} | {state.goal: "goal"}
    return paint(state.height, state.width, colours, {state.at: ("disc", "player")})


GAME = Game(
    name="planpath",
    rules=(
        "Walk from P to G on the map. . is free, # is a wall. Rows are counted from the top, columns from the left. "
        "A move is up, down, left or right; it must lead to a free cell of the map. Take as few moves as possible."
    ),
    move=MOVE,
    levels={
        "easy": {"side": 5, "walls": 0.2},
        "normal": {"side": 10, "walls": 0.22},
        "hard": {"side": 16, "walls": 0.3},
    },
    draw=draw, parse=parse, text=text, facts=facts, moves=moves, play=play, solved=solved, left=left,
    solve=solve, samples=("up", "left"), limit=limit, picture=picture,
)  # fmt: skip
