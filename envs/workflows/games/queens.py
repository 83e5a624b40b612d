"""Eight queens (or six, or ten): a queen in every row so that none attacks another; some stand from the start."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from ...core.records import Picture
from .game import Game, Solution
from .pictures import paint


class QueensState(NamedTuple):
    """Column of each row's queen (from 1; 0 for none), and the same for the fixed queens."""

    queens: tuple[int, ...]
    fixed: tuple[int, ...]


@lru_cache(maxsize=8)
def solutions(side: int) -> tuple[tuple[int, ...], ...]:
    """Return every way to place all queens."""
    boards: list[tuple[int, ...]] = []

    def place(queens: tuple[int, ...], columns: int, down: int, up: int) -> None:
        if len(queens) == side:
            boards.append(queens)
            return
        for column in range(side):
            bit = 1 << column
            if not (columns | down | up) & bit:
                place((*queens, column + 1), columns | bit, (down | bit) << 1, (up | bit) >> 1)

    place((), 0, 0, 0)
    return tuple(boards)


def draw(rng: random.Random, mine: Callable[[str], bool], side: int, fixed: int) -> QueensState | None:
    """Draw some queens of a random solution, which are fixed."""
    whole = rng.choice(solutions(side))
    rows = rng.sample(range(side), fixed)
    kept = tuple(column if row in rows else 0 for row, column in enumerate(whole))
    state = QueensState(kept, kept)
    return state if mine(text(state)) else None


def parse(text: str) -> QueensState:
    """Read a board from two lines, `Queens:` and `Fixed:`, each with a column or "." for every row."""
    parts = (line.partition(":") for line in text.strip().splitlines())
    lines = {name: rest for name, _, rest in parts}
    if set(lines) != {"Queens", "Fixed"}:
        raise ValueError(f"eight-queens needs the lines 'Queens: …' and 'Fixed: …': {text!r:.120}")
    queens, fixed = (tuple(0 if w == "." else int(w) for w in lines[k].split()) for k in ("Queens", "Fixed"))
    fits = len(queens) == len(fixed) and all(f in (0, q) for q, f in zip(queens, fixed, strict=True))
    if not fits or not 4 <= len(queens) <= 12 or not all(0 <= q <= len(queens) for q in queens):
        raise ValueError(f"rows of 4 to 12 columns (or .), the fixed ones alike in both: {text!r:.120}")
    return QueensState(queens, fixed)


def text(state: QueensState) -> str:
    """Write the board as text."""

    def told(columns: tuple[int, ...]) -> str:
        return " ".join(str(column) if column else "." for column in columns)

    return f"Queens: {told(state.queens)}\nFixed: {told(state.fixed)}"


def facts(state: QueensState) -> str:
    """Tell what a reader of the board would work out first."""
    pairs = ", ".join(f"{a + 1} and {b + 1}" for a, b in attacks(state))
    return f"Rows without a queen: {state.queens.count(0)}. Rows that attack each other: {pairs or 'none'}."


def attacks(state: QueensState) -> list[tuple[int, int]]:
    """Return the pairs of rows whose queens attack each other."""
    placed = [(row, column) for row, column in enumerate(state.queens) if column]
    return [(r, s) for (r, c), (s, d) in combinations(placed, 2) if c == d or s - r == abs(c - d)]


def moves(state: QueensState) -> tuple[str, ...]:
    """List every move of this board."""
    numbers = range(1, len(state.queens) + 1)
    return tuple(f"{row} {column}" for row in numbers for column in numbers)


def play(state: QueensState, move: str) -> QueensState | None:
    """Return the board with a row's queen in another column, or None if the move is refused. Fixed queens never move."""
    row, column = map(int, move.split())
    side = len(state.queens)
    if (
        not (0 < row <= side and 0 < column <= side)
        or state.fixed[row - 1]
        or state.queens[row - 1] == column
    ):
        return None
    return state._replace(queens=(*state.queens[: row - 1], column, *state.queens[row:]))


def solved(state: QueensState) -> bool:
    """Tell whether the goal is reached."""
    return 0 not in state.queens and not attacks(state)


def left(state: QueensState) -> float:
    """Return the number of rows without a queen plus the number of pairs that attack each other."""
    return state.queens.count(0) + len(attacks(state))


def solve(state: QueensState) -> Solution | None:
    """Return the moves to the nearest solution with the fixed queens: one move for each row that differs."""
    fits = [
        s
        for s in solutions(len(state.queens))
        if all(f in (0, q) for q, f in zip(s, state.fixed, strict=True))
    ]
    if not fits:
        return None
    plans = (
        [(row, to) for row, (at, to) in enumerate(zip(state.queens, whole, strict=True), 1) if at != to]
        for whole in fits
    )
    return tuple(f"{row} {column}" for row, column in min(plans, key=len))


def limit(state: QueensState) -> int:
    """Return the steps that an episode from this start may take."""
    return 3 * state.fixed.count(0)


def picture(state: QueensState) -> Picture:
    """Paint the board."""
    side, bad = len(state.queens), {row for pair in attacks(state) for row in pair}
    shade = {(r, c): "shade" for r in range(side) for c in range(side) if (r + c) % 2}
    marks = {
        (row, column - 1): ("disc", "bad" if row in bad else "ink" if state.fixed[row] else "player")
        for row, column in enumerate(state.queens)
        if column
    }
    return paint(side, side, shade, marks)


GAME = Game(
    name="eight-queens",
    rules=(
        "Place a queen in every row so that no two share a column or a diagonal. The line Queens tells the column of "
        "each row's queen, row by row, and . where there is none. A move is row column, such as 2 5; it places that "
        "row's queen, or moves it. Fixed queens cannot be moved. Take as few moves as possible."
    ),
    move=r"\d+ \d+",
    levels={
        "easy": {"side": 8, "fixed": 6},
        "normal": {"side": 8, "fixed": 4},
        "hard": {"side": 10, "fixed": 3},
    },
    draw=draw, parse=parse, text=text, facts=facts, moves=moves, play=play, solved=solved, left=left,
    solve=solve, samples=("2 5", "4 1"), limit=limit, picture=picture,
)  # fmt: skip
