"""Planning games: one file of pure rules for each, and teams that play all of them."""

from __future__ import annotations

from . import blocksworld, planpath, queens, sokoban, sudoku
from .game import AnyGame

GAMES: dict[str, AnyGame] = {
    module.GAME.name: module.GAME for module in (planpath, sokoban, sudoku, blocksworld, queens)
}
