"""Sudoku of side 4, 6, 8 or 9: fill the grid. The clues cannot be changed, and there is exactly one solution.

The game follows PettingLLMs' Sudoku. There, any valid grid counts even if it contradicts the clues, test puzzles are also
training puzzles, and uniqueness is not checked. Here a move writes one number into a cell that is no clue, and may replace an
earlier move. The solved grid of a puzzle decides its split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...core.records import Picture
from .game import Game, Solution
from .pictures import paint

BOXES = {4: (2, 2), 6: (2, 3), 8: (2, 4), 9: (3, 3)}  # side -> a box's height and width
FREE: Mapping[int, Sequence[tuple[int, ...]]] = {  # side -> by the bits of what is taken, what is free
    side: [tuple(n for n in range(1, side + 1) if not taken >> n & 1) for taken in range(2 << side)]
    for side in BOXES
}


class SudokuState(NamedTuple):
    """Numbers by row (0 for an empty cell), and the cells that the team has filled."""

    side: int
    grid: tuple[int, ...]
    own: frozenset[int]

    def clues(self) -> tuple[int, ...]:
        """Grid without the numbers that the team has filled in."""
        return tuple(0 if place in self.own else number for place, number in enumerate(self.grid))


@lru_cache(maxsize=8)
def peers(side: int) -> tuple[tuple[int, ...], ...]:
    """Return the cells in the row, column or box of each cell."""
    if side not in BOXES:
        raise ValueError(f"a sudoku of side {side}; sides are {', '.join(map(str, BOXES))}")
    high, wide = BOXES[side]

    def met(a: int, b: int) -> bool:
        (r, c), (s, d) = divmod(a, side), divmod(b, side)
        return a != b and (r == s or c == d or (r // high, c // wide) == (s // high, d // wide))

    places = range(side * side)
    return tuple(tuple(b for b in places if met(a, b)) for a in places)


@lru_cache(maxsize=8)
def units(side: int) -> tuple[tuple[int, int, int], ...]:
    """Return the units of each cell: the numbers of its row, column and box among all 3 × side units."""
    high, wide = BOXES[side]
    cells = [divmod(place, side) for place in range(side * side)]
    return tuple((r, side + c, 2 * side + r // high * high + c // wide) for r, c in cells)


def completions(
    side: int, grid: list[int], most: int, rng: random.Random | None = None
) -> list[tuple[int, ...]]:
    """Return up to `most` valid completions. The search always fills the cell with the fewest possible numbers."""
    lines, grids = units(side), []
    taken = [0] * 3 * side  # by row, column and box: a bit for each number that stands there
    for place, number in enumerate(grid):
        bit = 1 << number
        for unit in lines[place] if number else ():
            if taken[unit] & bit:
                return []
            taken[unit] |= bit

    def fill(empty: list[int]) -> None:
        if not empty:
            grids.append(tuple(grid))
            return
        best, options = -1, tuple(range(side + 1))
        for place in empty:
            row, column, box = lines[place]
            fits = FREE[side][taken[row] | taken[column] | taken[box]]
            if len(fits) < len(options):
                best, options = place, fits
                if len(fits) < 2:
                    break
        rest = [place for place in empty if place != best]
        for number in rng.sample(options, len(options)) if rng else options:
            bit = 1 << number
            grid[best] = number
            for unit in lines[best]:
                taken[unit] |= bit
            fill(rest)
            for unit in lines[best]:
                taken[unit] ^= bit
            if len(grids) >= most:
                break
        grid[best] = 0

    fill([place for place, number in enumerate(grid) if not number])
    return grids


@lru_cache(maxsize=4096)
def answer(side: int, clues: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the only completion of the clues, or None if there is none or more than one."""
    grids = completions(side, list(clues), 2)
    return grids[0] if len(grids) == 1 else None


def draw(rng: random.Random, mine: Callable[[str], bool], side: int, empty: int) -> SudokuState | None:
    """Draw a random full grid, and empty cell after cell as long as no other number fits there.

    Splits share no full grid.
    """
    peers(side)
    grid = list(completions(side, [0] * side * side, 1, rng)[0])
    if not mine(str(grid)):
        return None
    gone = 0
    for place in rng.sample(range(side * side), side * side):
        if gone == empty:
            break
        kept = grid[place]
        others = [*grid[:place], 0, *grid[place + 1 :]]
        if any(completions(side, _with(others, place, n), 1) for n in range(1, side + 1) if n != kept):
            continue
        grid, gone = others, gone + 1
    return SudokuState(side, tuple(grid), frozenset()) if gone == empty else None


def _with(grid: list[int], place: int, number: int) -> list[int]:
    return [*grid[:place], number, *grid[place + 1 :]]


def parse(text: str) -> SudokuState:
    """Read a board: rows of numbers, and after `Own:` the cells that the team has filled, if there are any."""
    board, _, rest = text.partition("Own:")
    rows = [[0 if word == "." else int(word) for word in line.split()] for line in board.strip().splitlines()]
    side = len(rows)
    if any(len(row) != side or not all(0 <= n <= side for n in row) for row in rows):
        raise ValueError(f"this is no square of . and the numbers 1 to {side}: {board!r:.120}")
    peers(side)
    own = [tuple(map(int, pair.split())) for pair in rest.strip(" .").split(",") if pair.strip()]
    return SudokuState(
        side, tuple(n for row in rows for n in row), frozenset((r - 1) * side + c - 1 for r, c in own)
    )


def text(state: SudokuState) -> str:
    """Write the board as text."""
    side = state.side
    words = [str(n) if n else "." for n in state.grid]
    board = "\n".join(" ".join(words[r * side : (r + 1) * side]) for r in range(side))
    own = ", ".join(f"{place // side + 1} {place % side + 1}" for place in sorted(state.own))
    return f"{board}\nOwn: {own}" if own else board


def facts(state: SudokuState) -> str:
    """Tell what a reader of the board would work out first."""
    clashes = len(clashing(state))
    return f"Empty cells: {state.grid.count(0)}. Cells in conflict: {clashes}."


def clashing(state: SudokuState) -> list[int]:
    """Return the cells whose number stands twice in a row, column or box."""
    around, grid = peers(state.side), state.grid
    return [p for p, n in enumerate(grid) if n and any(grid[q] == n for q in around[p])]


def moves(state: SudokuState) -> tuple[str, ...]:
    """List every move of this board."""
    numbers = range(1, state.side + 1)
    return tuple(f"{r} {c} {n}" for r in numbers for c in numbers for n in numbers)


def play(state: SudokuState, move: str) -> SudokuState | None:
    """Return the board after a move, or None if it is refused: it changes a clue, or writes the same number again."""
    row, column, number = map(int, move.split())
    if not (0 < row <= state.side and 0 < column <= state.side and 0 < number <= state.side):
        return None
    place = (row - 1) * state.side + column - 1
    before = state.grid[place]
    if before == number or (before and place not in state.own):
        return None
    grid = (*state.grid[:place], number, *state.grid[place + 1 :])
    return state._replace(grid=grid, own=state.own | {place})


def solved(state: SudokuState) -> bool:
    """Tell whether the goal is reached."""
    return 0 not in state.grid and not clashing(state)


def left(state: SudokuState) -> float:
    """Return the number of empty cells and of cells in conflict."""
    return state.grid.count(0) + len(clashing(state))


def solve(state: SudokuState) -> Solution | None:
    """Return one move for each cell that is not right, or None if the clues have no single solution."""
    right = answer(state.side, state.clues())
    if right is None:
        return None
    wrong = [p for p, (n, r) in enumerate(zip(state.grid, right, strict=True)) if n != r]
    return tuple(f"{p // state.side + 1} {p % state.side + 1} {right[p]}" for p in wrong)


def limit(state: SudokuState) -> int:
    """Return the steps that an episode from this start may take."""
    return 2 * state.clues().count(0)


def picture(state: SudokuState) -> Picture:
    """Paint the board."""
    bad = set(clashing(state))
    high, wide = BOXES[state.side]
    cells = {divmod(place, state.side): place for place in range(state.side**2)}
    shade = {(r, c): "shade" for r, c in cells if (r // high + c // wide) % 2}
    marks = {
        cell: (str(state.grid[place]), "bad" if place in bad else "player" if place in state.own else "ink")
        for cell, place in cells.items()
        if state.grid[place]
    }
    return paint(state.side, state.side, shade, marks)


GAME = Game(
    name="sudoku",
    rules=(
        "Fill the grid so that no number stands twice in a row, a column or a box. A box has 2 rows and 2 columns in a "
        "grid of side 4, 2 and 3 in 6, 2 and 4 in 8, 3 and 3 in 9. . is an empty cell. "
        "A move is row column number, such as 1 2 3; rows are counted from the top, columns from the left. "
        "Clues cannot be changed; your own numbers can be written over."
    ),
    move=r"\d \d \d",
    levels={
        "easy": {"side": 4, "empty": 4},
        "normal": {"side": 4, "empty": 8},
        "hard": {"side": 9, "empty": 40},
    },
    draw=draw, parse=parse, text=text, facts=facts, moves=moves, play=play, solved=solved, left=left,
    solve=solve, samples=("1 2 3", "2 4 1"), limit=limit, picture=picture,
)  # fmt: skip
