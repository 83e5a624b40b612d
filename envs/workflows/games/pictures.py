"""Boards as pictures: coloured cells with a disc, a box or a sign in them, painted with numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...core.records import Picture

if TYPE_CHECKING:
    import numpy.typing as npt

CELL = 24
COLOURS = {
    "paper": (246, 244, 238), "shade": (226, 222, 210), "wall": (70, 74, 84), "goal": (168, 214, 160),
    "block": (214, 170, 110), "done": (96, 168, 96), "player": (44, 98, 184), "bad": (200, 52, 48),
    "ink": (30, 32, 38), "line": (206, 202, 192),
}  # fmt: skip
GLYPHS = {  # 3 wide, 5 high; each digit holds the pixels of one row
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757",
    "7": "71222", "8": "75757", "9": "75717", "a": "07357", "b": "44757", "c": "07447", "d": "11757",
    "e": "07547", "f": "34644", "g": "75717", "h": "44755", "i": "20222", "j": "10117", "k": "45655",
    "l": "62227", "m": "05755", "n": "06555", "o": "07557", "p": "07574", "q": "07571", "r": "07444",
    "s": "07627", "t": "27223", "u": "05557", "v": "05552", "w": "05575", "x": "05255", "y": "55717",
    "z": "07247",
}  # fmt: skip


def paint(
    height: int,
    width: int,
    colours: Mapping[tuple[int, int], str],
    marks: Mapping[tuple[int, int], tuple[str, str]],
) -> Picture:
    """Paint cells in their colours, and marks on them: ("disc" | "box" | a digit or letter, colour)."""
    board = np.empty((height * CELL, width * CELL, 3), np.uint8)
    board[:] = COLOURS["paper"]
    for (row, column), colour in colours.items():
        _cell(board, row, column)[:] = COLOURS[colour]
    board[::CELL] = COLOURS["line"]
    board[:, ::CELL] = COLOURS["line"]
    for (row, column), (sign, colour) in marks.items():
        _cell(board, row, column)[_mask(sign)] = COLOURS[colour]
    return board


def _cell(board: Picture, row: int, column: int) -> Picture:
    return board[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]


def _mask(sign: str) -> npt.NDArray[np.bool_]:
    """Return the pixels of a cell that a sign covers."""
    across, down = np.meshgrid(np.arange(CELL) - CELL / 2 + 0.5, np.arange(CELL) - CELL / 2 + 0.5)
    if sign == "disc":
        disc: npt.NDArray[np.bool_] = across**2 + down**2 < (0.36 * CELL) ** 2
        return disc
    if sign == "box":
        box: npt.NDArray[np.bool_] = np.maximum(abs(across), abs(down)) < 0.34 * CELL
        return box
    bits = np.array([[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in GLYPHS[sign]], bool)
    large = np.kron(bits, np.ones((3, 3), bool))
    mask = np.zeros((CELL, CELL), bool)
    top, start = (CELL - large.shape[0]) // 2, (CELL - large.shape[1]) // 2
    mask[top : top + large.shape[0], start : start + large.shape[1]] = large
    return mask
