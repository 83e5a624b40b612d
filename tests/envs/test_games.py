"""The games' rules, generators and solvers, against references written anew here."""

import itertools
import random
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.envs.core.tasks import TaskError
from unitymas.envs.workflows.games import GAMES, sudoku
from unitymas.envs.workflows.games.game import data_set, tasks

LEVELS = [(name, level) for name, game in GAMES.items() for level in game.levels]
SMALL = {
    "planpath": {"side": 4, "walls": 0.25},
    "sokoban": {"side": 5, "boxes": 1, "carve": 20},
    "sudoku": {"side": 4, "empty": 4},
    "blocksworld": {"blocks": 4},
    "eight-queens": {"side": 5, "fixed": 2},
}


def load(name, split="train", size=None, difficulty="normal", seed=0):
    game = GAMES[name]
    return data_set(game, split, size, game.level(difficulty), seed).rows


def some(name, count, seed=1):
    """Small starts, whether of this split or that."""
    rows = itertools.islice(tasks(GAMES[name], "train", GAMES[name].level(SMALL[name]), seed), count)
    return [GAMES[name].parse(row["start"]) for row in rows]


def wander(game, state, rng, steps):
    """Where random moves lead; refused ones lead nowhere."""
    for _ in range(steps):
        state = game.play(state, rng.choice(game.moves(state))) or state
    return state


def nearest(game, state):
    """The length of a shortest solution by breadth-first search over `play` alone; None where there is none."""
    far, queue = {state: 0}, deque([state])
    while queue:
        now = queue.popleft()
        if game.solved(now):
            return far[now]
        for move in game.moves(now):
            after = game.play(now, move)
            if after is not None and after not in far:
                far[after] = far[now] + 1
                queue.append(after)
    return None


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_every_task_is_solved_by_its_solution_within_half_its_limit(name, level):
    game = GAMES[name]
    for row in load(name, size=8, difficulty=level):
        state = game.parse(row["start"])
        assert not game.solved(state) and 2 * len(row["solution"]) <= game.limit(state)
        for move in row["solution"]:
            assert not game.solved(state) and move in game.moves(state)
            state = game.play(state, move)
        assert game.solved(state) and game.left(state) == 0


@pytest.mark.parametrize("name", GAMES)
def test_solutions_are_shortest_from_anywhere(name):
    game, rng = GAMES[name], random.Random(7)
    for start in some(name, 6):
        for state in (start, wander(game, start, rng, 3)):
            found, shortest = game.solve(state), nearest(game, state)
            assert (None if found is None else len(found)) == shortest


@pytest.mark.parametrize("name", GAMES)
def test_text_tells_the_whole_state(name):
    game, rng = GAMES[name], random.Random(3)
    for start in some(name, 10):
        for steps in (0, 1, 5, 20):
            state = wander(game, start, rng, steps)
            assert game.parse(game.text(state)) == state
            assert game.solved(state) == (game.left(state) == 0)
            assert "\n\n" not in game.text(state) and game.facts(state)


@pytest.mark.parametrize("name", GAMES)
def test_splits_share_nothing_and_sets_grow_at_the_end(name):
    owner = {}
    for split, seed in itertools.product(("train", "validation", "test"), (0, 1)):
        rows = load(name, split, 60, seed=seed)
        assert len({row["id"] for row in rows}) == len({row["start"] for row in rows}) == 60
        assert load(name, split, 20, seed=seed) == rows[:20]
        for row in rows:
            assert owner.setdefault(row["start"], split) == split
    assert load(name, seed=0)[:5] != load(name, seed=1)[:5]


def test_sudoku_splits_share_no_solved_grid():
    owner = {}
    for split in ("train", "validation", "test"):
        for row in load("sudoku", split, 100):
            state = sudoku.parse(row["start"])
            assert owner.setdefault(sudoku.answer(state.side, state.clues()), split) == split


@pytest.mark.parametrize("name", GAMES)
def test_the_default_data_set_takes_less_than_a_second(name):
    began = time.process_time()
    assert len(load(name, seed=99)) == 512
    assert time.process_time() - began < 1.0


def valid(grid, side, high, wide):
    units = [[(r, c) for c in range(side)] for r in range(side)]
    units += [[(r, c) for r in range(side)] for c in range(side)]
    units += [
        [(r + i, c + j) for i in range(high) for j in range(wide)]
        for r in range(0, side, high)
        for c in range(0, side, wide)
    ]
    return all(sorted(grid[r * side + c] for r, c in unit) == list(range(1, side + 1)) for unit in units)


def test_sudokus_have_one_solution_by_trying_everything():
    pairs = itertools.product(itertools.permutations(range(1, 5)), repeat=2)
    halves = [a + b for a, b in pairs if {*a[:2], *b[:2]} == {*a[2:], *b[2:]} == {1, 2, 3, 4}]
    whole = [a + b for a in halves for b in halves if valid(a + b, 4, 2, 2)]
    assert len(whole) == 288
    for row in load("sudoku", size=60):
        clues = sudoku.parse(row["start"]).grid
        fits = [g for g in whole if all(c in (0, n) for c, n in zip(clues, g, strict=True))]
        assert fits == [sudoku.answer(4, clues)]


@pytest.mark.parametrize("side", sudoku.BOXES)
def test_sudokus_of_every_side(side):
    for row in load("sudoku", size=2, difficulty={"side": side, "empty": side * 2}):
        state = sudoku.parse(row["start"])
        assert state.grid.count(0) == side * 2
        assert valid(sudoku.answer(side, state.clues()), side, *sudoku.BOXES[side])


def test_a_valid_grid_that_ignores_the_clues_cannot_be_reached():
    state = sudoku.parse("1 2 3 4\n3 4 1 2\n2 . 4 3\n4 3 2 1")
    assert sudoku.play(state, "1 1 2") is None and sudoku.play(state, "3 2 5") is None
    wrong = sudoku.play(state, "3 2 2")
    assert not sudoku.solved(wrong) and sudoku.left(wrong) == 3 and sudoku.play(wrong, "3 2 2") is None
    assert sudoku.text(wrong).endswith("Own: 3 2") and sudoku.solved(sudoku.play(wrong, "3 2 1"))


def test_queens_by_trying_everything():
    from unitymas.envs.workflows.games import queens

    assert [len(queens.solutions(n)) for n in (4, 5, 6, 8)] == [2, 10, 4, 92]


def test_a_box_in_a_corner_is_lost():
    game = GAMES["sokoban"]
    state = game.parse("# # # # #\n# $ _ . #\n# _ _ @ #\n# # # # #")
    assert game.solve(state) is None and nearest(game, state) is None


@pytest.mark.parametrize("name", GAMES)
@given(st.text(alphabet="updownleftright 0123456789abon,[]table\n.", max_size=40))
@settings(max_examples=150, deadline=None)
def test_whatever_is_read_as_a_plan_consists_of_moves(name, said):
    game = GAMES[name]
    plan = game.read_plan(said)
    if plan is not None:
        words = said.casefold().replace(",", " ").replace("[", " ").replace("]", " ").split()
        assert " ".join(plan).split() == words
        state = some(name, 1)[0]
        for move in plan:  # legal or refused, never an error
            state = game.play(state, move) or state


@pytest.mark.parametrize(
    ("name", "said", "plan"),
    [
        ("planpath", "Up, LEFT\nleft", ("up", "left", "left")),
        ("planpath", "['up', 'down']", ("up", "down")),
        ("planpath", "upleft", None),
        ("planpath", "go up", None),
        ("planpath", "", None),
        ("sudoku", "1 2 3, 4 4 1", ("1 2 3", "4 4 1")),
        ("sudoku", "1 2", None),
        ("blocksworld", "a on b, b on table", ("a on b", "b on table")),
        ("blocksworld", "a on bed", None),
        ("eight-queens", "1 10", ("1 10",)),
    ],
)
def test_plans(name, said, plan):
    assert GAMES[name].read_plan(said) == plan


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: GAMES["planpath"].parse("P .\n."), "equally long rows"),
        (lambda: GAMES["planpath"].parse("P . ?"), "sign '\\?'"),
        (lambda: GAMES["planpath"].parse("P . ."), "exactly one goal"),
        (lambda: GAMES["sokoban"].parse("@ $ _"), "1 boxes and 0 goals"),
        (lambda: GAMES["sudoku"].parse("1 2\n2 1"), "sides are 4, 6, 8, 9"),
        (lambda: GAMES["sudoku"].parse("1 2\n7 1"), "no square"),
        (lambda: GAMES["blocksworld"].parse("Stacks: a b\nGoal: a"), "same blocks"),
        (lambda: GAMES["blocksworld"].parse("a b"), "needs the lines"),
        (lambda: GAMES["eight-queens"].parse("Queens: 1 . . .\nFixed: 2 . . ."), "alike in both"),
        (lambda: GAMES["planpath"].level("esy"), "easy, normal, hard"),
        (lambda: GAMES["planpath"].level({"sides": 3}), "did you mean 'side'"),
        (lambda: load("planpath", "tset"), "no split 'tset'"),
        (lambda: load("planpath", size=0), "at least one"),
        (lambda: load("blocksworld", "test", 999, {"blocks": 3}), "only .* test tasks, not 999"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, says):
    with pytest.raises((ValueError, TaskError), match=says):
        call()


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_pictures_show_the_state(name, level):
    game = GAMES[name]
    row = load(name, size=1, difficulty=level)[0]
    state = game.parse(row["start"])
    before, after = game.picture(state), game.picture(game.play(state, row["solution"][0]))
    assert before.dtype == np.uint8 and before.ndim == 3 and before.shape[2] == 3
    assert before.shape == after.shape and (before != after).any()
