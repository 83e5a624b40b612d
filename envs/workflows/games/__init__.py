"""Planning games: each a file of pure rules; `teams` plays them all."""

from __future__ import annotations

from . import blocksworld, planpath, queens, sokoban, sudoku
from .game import Game

GAMES: dict[str, Game] = {
    module.GAME.name: module.GAME for module in (planpath, sokoban, sudoku, blocksworld, queens)
}
