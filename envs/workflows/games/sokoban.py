"""Sokoban: push every box $ onto a goal. Boxes can be pushed, never pulled, so a wrong push may be final.

The game follows PettingLLMs' Sokoban (side 6 in its scripts, one box, rooms carved in 25 steps). There, a push onto a goal
earns 1 and a push off it costs 0.5, so a loop of both pays. Here both are parts of one potential, and no loop pays.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...core.records import Picture
from .game import Game, Solution
from .grid import DIRECTIONS, MOVE, Cell, beside, distance, drawn, only, signs, told
from .pictures import paint

ON, OFF = "*+", "$@"  # a box and the player: on a goal, and off it


class SokobanState(NamedTuple):
    """Size of the room, and the places of walls, goals, boxes and player."""

    height: int
    width: int
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    at: Cell


def draw(
    rng: random.Random, mine: Callable[[str], bool], side: int, boxes: int, carve: int
) -> SokobanState | None:
    """Draw a room, carved by a random walk. Boxes stand off the goals, and not in dead corners."""
    cell = (rng.randrange(1, side - 1), rng.randrange(1, side - 1))
    free = {cell}
    for _ in range(carve):
        to = beside(cell, rng.choice(tuple(DIRECTIONS)))
        if 0 < to[0] < side - 1 and 0 < to[1] < side - 1:
            cell = to
            free.add(cell)
    if len(free) < 2 * boxes + 3:
        return None
    goals = rng.sample(sorted(free), boxes)
    spots = sorted(c for c in alive(free, goals) if min(distance(c, goal) for goal in goals) > 1)
    if len(spots) < boxes:
        return None
    put = rng.sample(spots, boxes)
    at = rng.choice(sorted(free.difference(goals, put)))
    walls = frozenset((r, c) for r in range(side) for c in range(side) if (r, c) not in free)
    state = SokobanState(side, side, walls, frozenset(goals), frozenset(put), at)
    return state if mine(text(state)) else None


def parse(text: str) -> SokobanState:
    """Read a board with Sokoban's usual signs, and `_` for floor."""
    board = signs(text, "_#.$*@+")
    height, width = (max(axis) + 1 for axis in zip(*board, strict=True))

    def cells(of: str) -> frozenset[Cell]:
        return frozenset(cell for cell, sign in board.items() if sign in of)

    state = SokobanState(height, width, cells("#"), cells(".*+"), cells("$*"), only(cells("@+"), "player @"))
    if len(state.goals) != len(state.boxes) or not state.boxes:
        raise ValueError(
            f"the room has {len(state.boxes)} boxes and {len(state.goals)} goals; they must be as many"
        )
    return state


def text(state: SokobanState) -> str:
    """Write the board as text."""

    def sign(cell: Cell) -> str:
        signs = ON if cell in state.goals else OFF
        if cell in state.boxes:
            return signs[0]
        if cell == state.at:
            return signs[1]
        return "." if cell in state.goals else "#" if cell in state.walls else "_"

    return drawn(state.height, state.width, sign)


def facts(state: SokobanState) -> str:
    """Tell what a reader of the board would work out first."""
    boxes = "; ".join(map(told, sorted(state.boxes)))
    goals = "; ".join(map(told, sorted(state.goals)))
    free = [name for name in DIRECTIONS if play(state, name) is not None]
    return f"You: {told(state.at)}. Boxes: {boxes}. Goals: {goals}. Possible: {', '.join(free) or 'none'}."


def moves(state: SokobanState) -> tuple[str, ...]:
    """List every move of this board."""
    return tuple(DIRECTIONS)


def play(state: SokobanState, move: str) -> SokobanState | None:
    """Return the board after a move, or None if it is refused."""
    to = beside(state.at, move)
    if to not in state.boxes:
        return state._replace(at=to) if _open(state, to) else None
    beyond = beside(to, move)
    if not _open(state, beyond) or beyond in state.boxes:
        return None
    return state._replace(at=to, boxes=state.boxes - {to} | {beyond})


def _open(state: SokobanState, cell: Cell) -> bool:
    return 0 <= cell[0] < state.height and 0 <= cell[1] < state.width and cell not in state.walls


def solved(state: SokobanState) -> bool:
    """Tell whether the goal is reached."""
    return state.boxes == state.goals


def left(state: SokobanState) -> float:
    """Return the sum of the boxes' distances to their nearest goals, plus 10 for each box on no goal (1 after λ = 0.1)."""
    far = sum(min(distance(box, goal) for goal in state.goals) for box in state.boxes)
    return far + 10 * len(state.boxes - state.goals)


Standing = tuple[Cell, frozenset[Cell]]
"""Cell of the player, and cells of the boxes."""


def alive(floor: set[Cell], goals: Iterable[Cell]) -> set[Cell]:
    """Return the cells from which a single box in the room can be pushed to a goal. On any other cell it is lost."""
    reached = set(goals)
    queue = deque(reached)
    while queue:
        row, column = queue.popleft()
        for down, right in DIRECTIONS.values():  # pull the box to `to`: the player needs the cell beyond it
            to = (row + down, column + right)
            if to in floor and to not in reached and (to[0] + down, to[1] + right) in floor:
                reached.add(to)
                queue.append(to)
    return reached


def solve(state: SokobanState) -> Solution | None:
    """Return a shortest solution or None, by breadth-first search over (player, boxes) without lost boxes."""
    cells = {(r, c) for r in range(state.height) for c in range(state.width)} - state.walls
    safe = alive(cells, state.goals)
    first = (state.at, state.boxes)
    came: dict[Standing, tuple[Standing, str]] = {first: (first, "")}
    queue = deque([first] if state.boxes <= safe else [])
    while queue:
        now = at, boxes = queue.popleft()
        if boxes == state.goals:
            plan: list[str] = []
            while now != first:
                now, move = came[now]
                plan.append(move)
            return tuple(reversed(plan))
        for name, (down, right) in DIRECTIONS.items():
            to, pushed = (at[0] + down, at[1] + right), boxes
            if to in boxes:
                beyond = (to[0] + down, to[1] + right)
                if beyond in boxes or beyond not in safe:
                    continue
                pushed = boxes - {to} | {beyond}
            if to in cells and (to, pushed) not in came:
                came[to, pushed] = (now, name)
                queue.append((to, pushed))
    return None


def limit(state: SokobanState) -> int:
    """Return the steps that an episode from this start may take."""
    return 10 * state.height


def picture(state: SokobanState) -> Picture:
    """Paint the board."""
    colours = {cell: "wall" for cell in state.walls} | dict.fromkeys(state.goals, "goal")
    marks = {box: ("box", "done" if box in state.goals else "block") for box in state.boxes}
    return paint(state.height, state.width, colours, {**marks, state.at: ("disc", "player")})


GAME = Game(
    name="sokoban",
    rules=(
        "Push every box onto a goal. @ is you, $ a box, . a goal, * a box on a goal, + you on a goal, _ floor, # wall. "
        "A move is up, down, left or right; you push a box by walking into it, if the cell behind it is free. "
        "Boxes cannot be pulled. Take as few moves as possible."
    ),
    move=MOVE,
    levels={
        "easy": {"side": 6, "boxes": 1, "carve": 80},
        "normal": {"side": 6, "boxes": 1, "carve": 25},
        "hard": {"side": 7, "boxes": 2, "carve": 40},
    },
    draw=draw, parse=parse, text=text, facts=facts, moves=moves, play=play, solved=solved, left=left,
    solve=solve, samples=("up", "left"), limit=limit, picture=picture,
)  # fmt: skip
