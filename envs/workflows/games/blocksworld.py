"""Blocksworld: bring stacks of blocks into the wanted stacks, one free block at a time."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import NamedTuple

from ...core.records import Picture
from .game import Game, Solution, search
from .pictures import paint

Stacks = frozenset[tuple[str, ...]]  # each from bottom to top


class BlocksState(NamedTuple):
    """Current stacks, and the stacks of the goal."""

    now: Stacks
    goal: Stacks


def draw(rng: random.Random, mine: Callable[[str], bool], blocks: int) -> BlocksState | None:
    """Draw two random arrangements. Each can be reached from any other, with all blocks on the table in between."""
    names = string.ascii_lowercase[:blocks]
    state = BlocksState(_arranged(rng, names), _arranged(rng, names))
    return state if mine(text(state)) else None


def _arranged(rng: random.Random, names: str) -> Stacks:
    stacks: list[list[str]] = []
    for name in rng.sample(names, len(names)):
        place = rng.randrange(len(stacks) + 1)
        if place == len(stacks):
            stacks.append([name])
        else:
            stacks[place].append(name)
    return frozenset(map(tuple, stacks))


def parse(text: str) -> BlocksState:
    """Read a board from two lines, `Stacks:` and `Goal:`. Stacks are separated by |, and written from bottom to top."""
    parts = (line.partition(":") for line in text.strip().splitlines())
    lines = {name: rest for name, _, rest in parts}
    if set(lines) != {"Stacks", "Goal"}:
        raise ValueError(f"blocksworld needs the lines 'Stacks: …' and 'Goal: …': {text!r:.120}")
    now, goal = (frozenset(tuple(s.split()) for s in lines[k].split("|")) for k in ("Stacks", "Goal"))
    names, wanted = (sorted(name for stack in stacks for name in stack) for stacks in (now, goal))
    if (
        names != wanted
        or len(set(names)) < len(names)
        or not all(len(n) == 1 and n in string.ascii_lowercase for n in names)
    ):
        raise ValueError(f"stacks and goal must hold the same blocks, each a letter and once: {text!r:.120}")
    return BlocksState(now, goal)


def text(state: BlocksState) -> str:
    """Write the board as text."""
    return f"Stacks: {_told(state.now)}\nGoal: {_told(state.goal)}"


def _told(stacks: Stacks) -> str:
    return " | ".join(" ".join(stack) for stack in sorted(stacks))


def facts(state: BlocksState) -> str:
    """Tell what a reader of the board would work out first."""
    return f"Free blocks: {', '.join(sorted(stack[-1] for stack in state.now))}. Not yet in place: {left(state)}."


def moves(state: BlocksState) -> tuple[str, ...]:
    """List every move of this board."""
    names = sorted(name for stack in state.now for name in stack)
    return tuple(f"{a} on {b}" for a in names for b in (*names, "table") if a != b)


def play(state: BlocksState, move: str) -> BlocksState | None:
    """Return the board after a move, or None if it is refused.

    Only a free block can be moved, to another free block or to the table, and not to its own place.
    """
    block, to = move.split(" on ")
    source = next((stack for stack in state.now if stack[-1] == block), None)
    target = next((stack for stack in state.now if stack[-1] == to), ())
    if source is None or block == to or (not target and (to != "table" or len(source) == 1)):
        return None
    rest = state.now - {source, target}
    shorter = {source[:-1]} if len(source) > 1 else set()
    return state._replace(now=rest | shorter | {(*target, block)})


def solved(state: BlocksState) -> bool:
    """Tell whether the goal is reached."""
    return state.now == state.goal


def left(state: BlocksState) -> int:
    """Return the number of blocks that stand on a wrong block, or on such a block. Each must move at least once."""
    wrong = 0
    for stack in state.now:
        wanted = next((goal for goal in state.goal if goal[0] == stack[0]), ())
        same = 0
        while same < min(len(stack), len(wanted)) and stack[same] == wanted[same]:
            same += 1
        wrong += len(stack) - same
    return wrong


def solve(state: BlocksState) -> Solution | None:
    """Return a shortest solution, or None."""
    return search(state, _steps, solved, left)


def _steps(state: BlocksState) -> list[tuple[str, BlocksState]]:
    """Return every legal move with the board after it, as `play` gives it."""
    steps = []
    for source in sorted(state.now):
        block, rest = source[-1], state.now - {source} | ({source[:-1]} if len(source) > 1 else set())
        for target in sorted(state.now - {source}):
            steps.append(
                (f"{block} on {target[-1]}", state._replace(now=rest - {target} | {(*target, block)}))
            )
        if len(source) > 1:
            steps.append((f"{block} on table", state._replace(now=rest | {(block,)})))
    return steps


def limit(state: BlocksState) -> int:
    """Return the steps that an episode may take: twice the number that is always enough (all to the table, then all up)."""
    return 4 * sum(map(len, state.now))


def picture(state: BlocksState) -> Picture:
    """Paint the current stacks on the left, and those of the goal on the right."""
    size = sum(map(len, state.now))
    marks, colours = {}, {}
    for offset, stacks in ((0, state.now), (size + 1, state.goal)):
        for column, stack in enumerate(sorted(stacks)):
            for level, name in enumerate(stack):
                cell = (size - 1 - level, offset + column)
                marks[cell] = (name, "ink")
                colours[cell] = "block" if not offset else "goal"
    colours |= {(row, size): "wall" for row in range(size)}
    return paint(size, 2 * size + 1, colours, marks)


GAME = Game(
    name="blocksworld",
    rules=(
        "Bring the stacks of blocks into those of the goal. Each stack is told from bottom to top; | stands between two. "
        "A move is a block on a block, such as a on b, or on the table, such as a on table. "
        "Only a block with nothing on it can be moved or built on. Take as few moves as possible."
    ),
    move=r"[a-z] on (?:table|[a-z])",
    levels={"easy": {"blocks": 4}, "normal": {"blocks": 5}, "hard": {"blocks": 8}},
    draw=draw, parse=parse, text=text, facts=facts, moves=moves, play=play, solved=solved, left=left,
    solve=solve, samples=("a on b", "c on table"), limit=limit, picture=picture,
)  # fmt: skip
