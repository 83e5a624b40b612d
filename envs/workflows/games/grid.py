"""Parts of the two games on a map: four directions, cells as (row, column), and rows of signs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Cell = tuple[int, int]
DIRECTIONS: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOVE = "up|down|left|right"


def beside(cell: Cell, direction: str) -> Cell:
    """Return the next cell in a direction."""
    row, column = DIRECTIONS[direction]
    return cell[0] + row, cell[1] + column


def distance(a: Cell, b: Cell) -> int:
    """Return the number of steps between two cells of an empty map."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def told(cell: Cell) -> str:
    """Return a cell as text, with row and column counted from 1."""
    return f"row {cell[0] + 1} column {cell[1] + 1}"


def drawn(height: int, width: int, sign: Callable[[Cell], str]) -> str:
    """Return a map as text, with one sign for each cell, separated by blanks."""
    return "\n".join(" ".join(sign((r, c)) for c in range(width)) for r in range(height))


def signs(text: str, known: str) -> dict[Cell, str]:
    """Read a map that `drawn` wrote. It must be a rectangle of known signs."""
    rows = [line.split() for line in text.strip().splitlines()]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"this is no map of equally long rows: {text!r:.120}")
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    odd = sorted({sign for sign in cells.values() if sign not in known or len(sign) != 1})
    if odd:
        raise ValueError(f"the map has the sign {odd[0]!r}; known signs are {' '.join(known)}")
    return cells


def only(cells: Iterable[Cell], what: str) -> Cell:
    """Return the only cell of a kind. None or several are an error."""
    places = list(cells)
    if len(places) != 1:
        raise ValueError(f"the map needs exactly one {what}; it has {len(places)}")
    return places[0]
