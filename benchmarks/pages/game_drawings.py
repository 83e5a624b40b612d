"""Boards of the games as small SVG drawings, before the first move and after the last."""

from __future__ import annotations

from collections.abc import Callable

from .html import escape

CELL = 16


def boards(game: str, before: str, after: str, top: int) -> tuple[str, int]:
    """Draw two boards with an arrow between them. Return the drawing and its height."""
    draw = DRAWN.get(game, grid)
    left, width, height = draw(before)
    right, second, _ = draw(after)
    middle = top + height / 2
    arrow = f'<path class="arrow" d="M{24 + width} {middle:g}h26m-6 -5l6 5l-6 5"/>'
    svg = f'<g transform="translate(14 {top})">{left}</g>{arrow}<g transform="translate({width + 60} {top})">{right}</g>'
    return svg, height


def grid(text: str) -> tuple[str, int, int]:
    """Draw rows of cells: walls are filled, other signs are written."""
    rows = [line.split() for line in text.splitlines() if line.strip() and ":" not in line]
    cells = [
        cell(x, y, word, "wall" if word == "#" else "")
        for y, row in enumerate(rows)
        for x, word in enumerate(row)
    ]
    return "".join(cells), CELL * max(map(len, rows)), CELL * len(rows)


def queens(text: str) -> tuple[str, int, int]:
    """Draw a chess board with queens. Fixed queens are marked."""
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    rows, fixed = lines["Queens"].split(), lines["Fixed"].split()
    size, cells = len(rows), []
    for y in range(size):
        for x in range(size):
            here = rows[x] == str(size - y)
            kind = "dark" if (x + y) % 2 else ""
            cells.append(
                cell(x, y, "♛" if here else ".", f"{kind} {'given' if here and fixed[x] != '.' else ''}")
            )
    return "".join(cells), CELL * size, CELL * size


def stacks(text: str) -> tuple[str, int, int]:
    """Draw blocks on a table, from stacks written from bottom to top."""
    line = text.splitlines()[0].removeprefix("Stacks: ")
    piles = [pile.split() for pile in line.split("|")]
    blocks = sum(map(len, piles))
    cells = [
        cell(x, blocks - 1 - y, name, "block") for x, pile in enumerate(piles) for y, name in enumerate(pile)
    ]
    table = f'<path class="arrow" d="M0 {CELL * blocks + 1}h{CELL * blocks}"/>'
    return "".join(cells) + table, CELL * blocks, CELL * blocks + 2


def cell(x: int, y: int, word: str, kind: str = "") -> str:
    """Draw a cell with its sign: walls are filled, and dots and underscores are empty cells."""
    square = (
        f'<rect class="cell {kind.strip()}" x="{x * CELL}" y="{y * CELL}" width="{CELL}" height="{CELL}"/>'
    )
    if word in (".", "_", "#"):
        return square
    return square + f'<text class="in" x="{x * CELL + CELL / 2:g}" y="{y * CELL + 12}">{escape(word)}</text>'


DRAWN: dict[str, Callable[[str], tuple[str, int, int]]] = {"eight-queens": queens, "blocksworld": stacks}
"""Functions that draw the games whose text is no grid of cells."""
