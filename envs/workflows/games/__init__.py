"""Planning games: each a file of pure rules; `teams` plays them all."""

from __future__ import annotations

from . import blocksworld, planpath, queens, sokoban, sudoku
from .game import AnyGame

GAMES: dict[str, AnyGame] = {
    module.GAME.name: module.GAME for module in (planpath, sokoban, sudoku, blocksworld, queens)
}
