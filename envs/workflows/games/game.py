"""Interface of a game: rules as pure functions of a state, a generator, an optimal solver, words and a picture.

A state is a hashable tuple, which `text` writes and `parse` reads. So prompts, traces and rules use the same state. A move is
a few words: `up`, `2 3 4`, `a on b`.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

from ....agents.basics.hints import nearest
from ...core.records import Picture
from ...core.tasks import DataSet, Schema, TaskError, fingerprint

S = TypeVar("S", bound=Hashable)
"""State of a game."""
Solution = tuple[str, ...]
Level = Mapping[str, float]
"""Settings of a difficulty, by name."""
GAME_TASK = Schema("game", ("id", "game", "start"), ("solution",))
SIZES = {"train": 512, "validation": 128, "test": 128}
PATIENCE = 4000  # draws without a new start, after which a level counts as exhausted


@dataclass(frozen=True)
class Game(Generic[S]):
    """Game, made from the functions of its module."""

    name: str
    rules: str
    """Text for a role about board, moves and goal."""
    move: str
    """Regular expression of one move."""
    levels: Mapping[str, Level]
    """Settings of `draw`, by difficulty; `normal` is the default."""
    draw: Callable[..., S | None]
    """Function of `(rng, mine, **level)` that returns a start, solvable or not, or None after a failed attempt.
    `mine(content)` tells whether a content belongs to the split; call it before any costly step."""
    parse: Callable[[str], S]
    text: Callable[[S], str]
    facts: Callable[[S], str]
    """Function that describes, in a line, the first facts that a reader of the board would work out."""
    moves: Callable[[S], tuple[str, ...]]
    """Function that returns every move of this board, legal now or not."""
    play: Callable[[S, str], S | None]
    """Function that returns the next state, or None if the move is refused."""
    solved: Callable[[S], bool]
    left: Callable[[S], float]
    """Function that estimates the work left, 0 for a solved board. Its negative is the potential of reward shaping."""
    solve: Callable[[S], Solution | None]
    """Function that returns a shortest solution, or None if there is none."""
    samples: tuple[str, str]
    """Two moves as examples, for the format that a role is shown."""
    limit: Callable[[S], int]
    """Function that returns the steps that an episode from this start may take."""
    picture: Callable[[S], Picture]

    def read_plan(self, text: str) -> Solution | None:
        """Return the moves in a text, separated by commas, lines or spaces; None if the text holds anything else."""
        if len(text) > 4_000:
            return None
        words = " ".join(re.sub(r"[\[\]'\"]", " ", text.casefold()).replace(",", " ").split())
        if not re.fullmatch(rf"(?:{self.move})(?: (?:{self.move}))*", words):
            return None
        return tuple(re.findall(rf"(?:{self.move})(?= |$)", words))

    def state(self, text: str) -> S:
        """Return the result of `parse`, from a cache."""
        state: S = _state(self, text)
        return state

    def best(self, state: S) -> Solution | None:
        """Return the result of `solve`, from a cache."""
        return _best(self, state)

    def __hash__(self) -> int:
        return hash(self.name)

    def level(self, difficulty: str | Level) -> dict[str, float]:
        """Return the settings of a difficulty: the name of a level, or settings that replace those of `normal`."""
        if isinstance(difficulty, str):
            if difficulty not in self.levels:
                raise ValueError(
                    f"{self.name} has no difficulty {difficulty!r}; it has {', '.join(self.levels)}"
                )
            return dict(self.levels[difficulty])
        usual = self.levels["normal"]
        for name in difficulty:
            if name not in usual:
                hint = nearest(name, usual, "there are")
                raise ValueError(f"{self.name}: unknown difficulty setting {name!r}; {hint}")
        return {**usual, **difficulty}


AnyGame: TypeAlias = "Game[Any]"


class GameRow(TypedDict):
    """Task: a start, and a shortest solution for it."""

    id: str
    game: str
    start: str
    solution: list[str]


@lru_cache(maxsize=1 << 14)
def _state(game: AnyGame, text: str) -> Any:
    return game.parse(text)


@lru_cache(maxsize=1 << 16)
def _best(game: AnyGame, state: Hashable) -> Solution | None:
    return game.solve(state)


# tasks -------------------------------------------------------------------------------------------------


def data_set(game: AnyGame, split: str, size: int | None, level: Level, seed: int) -> DataSet:
    """Return `size` different tasks of a split. The default is the usual number, or all that the level has."""
    if split not in SIZES:
        raise TaskError(f"{game.name} has no split {split!r}; its splits are {', '.join(SIZES)}")
    if size is not None and size < 1:
        raise TaskError(f"a data set needs at least one task, not size={size}")
    return _data_set(game, split, size, tuple(sorted(level.items())), seed)


@lru_cache(maxsize=32)
def _data_set(
    game: AnyGame, split: str, size: int | None, level: tuple[tuple[str, float], ...], seed: int
) -> DataSet:
    wanted = SIZES[split] if size is None else size
    stream = tasks(game, split, dict(level), seed)
    rows = [row for row, _ in zip(stream, range(wanted), strict=False)]
    if len(rows) < wanted and (size is not None or not rows):
        settings = ", ".join(f"{name}={value}" for name, value in level)
        raise TaskError(
            f"{game.name} ({settings}) has only {len(rows)} {split} tasks, not {wanted}; take a smaller size or "
            f"another difficulty ({', '.join(game.levels)}, or settings of your own)"
        )
    return DataSet(game.name, split, rows, fingerprint(rows))


def tasks(game: AnyGame, split: str, level: Level, seed: int = 0) -> Iterator[GameRow]:
    """Yield different solvable starts of a split, each with a shortest solution, until there are no new ones.

    The hash of a start's content decides its split, for every seed and size.
    """
    rng = random.Random(f"{game.name}/{split}/{seed}")
    seen: set[Hashable] = set()
    idle = 0

    def mine(content: str) -> bool:
        return split_of(content) == split

    while idle < PATIENCE:
        idle += 1
        start = game.draw(rng, mine, **level)
        if start is None or start in seen:
            continue
        seen.add(start)
        solution = game.solve(start)
        if not solution or 2 * len(solution) > game.limit(start):
            continue
        idle = 0
        digest = hashlib.sha256(game.text(start).encode()).hexdigest()[:10]
        yield {
            "id": f"{game.name}-{digest}",
            "game": game.name,
            "start": game.text(start),
            "solution": list(solution),
        }


def split_of(key: str) -> str:
    """Return the split of a start. One start in eight belongs to validation, one to test."""
    return {0: "validation", 1: "test"}.get(hashlib.sha256(key.encode()).digest()[0] % 8, "train")


# searching ---------------------------------------------------------------------------------------------


def search(
    start: S,
    steps: Callable[[S], list[tuple[str, S]]],
    solved: Callable[[S], bool],
    left: Callable[[S], float],
) -> Solution | None:
    """Search with A*. `left` never overestimates, so the first solution is a shortest one."""
    ticket = count()
    heap = [(left(start), next(ticket), 0, start)]
    came: dict[S, tuple[S, str]] = {}
    cost = {start: 0}
    while heap:
        _, _, paid, state = heapq.heappop(heap)
        if paid > cost[state]:
            continue
        if solved(state):
            plan: list[str] = []
            while state != start:
                state, move = came[state]
                plan.append(move)
            return tuple(reversed(plan))
        for move, after in steps(state):
            if paid + 1 < cost.get(after, 1 << 30):
                cost[after] = paid + 1
                came[after] = (state, move)
                heapq.heappush(heap, (paid + 1 + left(after), next(ticket), paid + 1, after))
    return None
