"""Every estimator against its paper's formula in plain loops, on random ragged play with trees.

`by_hand` is the independent reference: dictionaries and sums, nothing of the package but the row's fields.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.controller.statistics.comparison import partition
from unitymas.trainers.controller.statistics.gae import summarise, token_advantages
from unitymas.trainers.controller.statistics.table import Decision, Table

UNHURRIED = settings(deadline=None, max_examples=25)
SEEDS = st.integers(0, 2**20)
Key = Callable[[Decision], Hashable]


def earned(row: Decision) -> float:
    return sum(row.credit.values())


def task(row: Decision) -> tuple[str, str]:
    return row.env_id, row.task


def task_agent(row: Decision) -> tuple[str, str, str]:
    return row.env_id, row.task, row.agent


def later(rows: list[Decision], gamma: float) -> dict[str, float]:
    """Discounted reward-to-go along chains."""
    return {
        a.id: sum(
            gamma ** (b.order - a.order) * earned(b)
            for b in rows
            if b.chain == a.chain and b.order >= a.order
        )
        for a in rows
    }


def by_hand(
    rows: list[Decision],
    x: dict[str, float],
    group: Key,
    sample: Key,
    std: bool = True,
    leave_one_out: bool = False,
    within: Callable[[list[Decision]], float] | None = None,
) -> dict[str, float]:
    """(x - mean) / std over the samples of a group; rows of a sample share its single vote."""
    found = {}
    for row in rows:
        samples: dict[Hashable, list[Decision]] = defaultdict(list)
        for other in rows:
            if group(other) == group(row):
                samples[sample(other)].append(other)
        means = {
            name: math.fsum(x[r.id] for r in members) / len(members) for name, members in samples.items()
        }
        scores = [x[r.id] for members in samples.values() for r in members]
        if len(samples) < 2 or max(scores) - min(scores) < 1e-9:
            found[row.id] = 0.0
            continue
        mean = math.fsum(means.values()) / len(means)
        if leave_one_out:
            rest = [m for name, m in means.items() if name != sample(row)]
            found[row.id] = x[row.id] - math.fsum(rest) / len(rest)
            continue
        squares = math.fsum(
            math.fsum((x[r.id] - mean) ** 2 for r in members) / len(members) for members in samples.values()
        )
        found[row.id] = x[row.id] - mean
        if std:
            found[row.id] /= math.sqrt(squares / (len(samples) - 1)) + 1e-6
    return found


def episode(row: Decision) -> Hashable:
    return row.episode


def call(row: Decision) -> Hashable:
    return row.id


def agree(rows: list[Decision], name: str, expected: dict[str, float], **config: Any) -> None:
    table = Table(rows)
    mine = table.mine("mine")
    signals = make_algorithm(name, **config).advantages(table, mine, {})
    assert [s.id for s in signals] == [r.id for r in table.rows if r.policy == "mine" and r.trainable]
    for signal in signals:
        assert signal.advantage is not None and signal.tail is None
        assert (signal.advantage - signal.shift) * signal.scale == pytest.approx(
            expected[signal.id], abs=1e-6
        )


@UNHURRIED
@given(seed=SEEDS, gamma=st.sampled_from([0.9, 1.0]))
def test_grpo_and_its_kin(ragged: Callable[..., Any], seed: int, gamma: float) -> None:
    rows = ragged(seed).rows
    x = later(rows, gamma)
    standard = by_hand(rows, x, task_agent, episode)
    for name in ("grpo", "dapo", "gspo"):
        agree(rows, name, standard, gamma=gamma)
    agree(rows, "dr_grpo", by_hand(rows, x, task_agent, episode, std=False), gamma=gamma)
    agree(rows, "rloo", by_hand(rows, x, task_agent, episode, leave_one_out=True), gamma=gamma)


@UNHURRIED
@given(seed=SEEDS, each=st.sampled_from(["call", "trajectory"]), std=st.booleans())
@pytest.mark.parametrize("statistics", ["agent", "task", "step"])
def test_dr_mas(statistics: str, ragged: Callable[..., Any], seed: int, each: str, std: bool) -> None:
    rows = ragged(seed).rows
    x = {
        row.id: earned(row) for row in rows
    }  # every call's own reward: the team's, less its own format penalty
    keys: dict[str, Key] = {"agent": task_agent, "task": task, "step": lambda r: (*task(r), r.turn)}
    expected = by_hand(rows, x, keys[statistics], call if each == "call" else episode, std)
    agree(rows, "dr_mas", expected, statistics=statistics, each=each, std=std)


def test_dr_mas_worked_example() -> None:
    """One success in one call, one failure in three: the numbers that the authors' code gives."""
    rows = [
        Decision(
            id=f"{e}/{i}", task="t", episode=e, node=str(i), role="r", agent="r", chain=f"{e}{i}", policy="mine",
            n_tokens=1, ended="terminal", credit={"outcome": 1.0 if e == "won" else 0.0},
        )
        for e, calls in (("won", 1), ("lost", 3))
        for i in range(calls)
    ]  # fmt: skip
    table = Table(rows)
    by_call = [s.advantage for s in make_algorithm("dr_mas").advantages(table, table.mine("mine"), {})]
    assert by_call == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)
    grouped = make_algorithm("dr_mas", each="trajectory").advantages(table, table.mine("mine"), {})
    assert [s.advantage for s in grouped] == pytest.approx([-0.707, -0.707, -0.707, 0.707], abs=1e-3)


def test_a_singleton_is_zero_and_not_its_raw_score() -> None:
    row = Decision(id="e/1", task="t", episode="e", node="1", role="planner", agent="planner", chain="c", policy="mine",
                   n_tokens=3, ended="terminal", credit={"outcome": 1.0}, anchor="s", sibling_set="x")  # fmt: skip
    table = Table([row])
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "gigpo", "at_grpo", "dr_mas", "m_grpo", "matpo"):
        (signal,) = make_algorithm(name).advantages(table, table.mine("mine"), {})
        assert signal.advantage == signal.shift == 0.0


@UNHURRIED
@given(seed=SEEDS)
def test_at_grpo(ragged: Callable[..., Any], seed: int) -> None:
    rows = ragged(seed).rows
    x = {row.id: earned(row) for row in rows}
    siblings = by_hand(rows, x, lambda r: (*task_agent(r), r.sibling_set or r.id), call)
    agree(rows, "at_grpo", siblings, tree=4)
    agree(rows, "at_grpo", by_hand(rows, x, lambda r: (*task_agent(r), r.turn), call), tree=0)


@UNHURRIED
@given(seed=SEEDS, weight=st.sampled_from([0.0, 0.5, 1.0]), std=st.booleans())
def test_gigpo(ragged: Callable[..., Any], seed: int, weight: float, std: bool) -> None:
    rows = ragged(seed).rows
    totals: dict[Hashable, float] = defaultdict(float)
    for row in rows:
        totals[row.episode, row.agent] += earned(row)
    outer = by_hand(rows, {r.id: totals[r.episode, r.agent] for r in rows}, task_agent, episode, std)
    inner = by_hand(rows, later(rows, 0.95), lambda r: (*task_agent(r), r.anchor or r.id), call, std)
    agree(rows, "gigpo", {k: outer[k] + weight * inner[k] for k in outer}, step_weight=weight, std=std)


@UNHURRIED
@given(seed=SEEDS)
def test_matpo(ragged: Callable[..., Any], seed: int) -> None:
    rows = ragged(seed).rows
    if not any(row.role == "planner" for row in rows):
        return
    totals: dict[Hashable, float] = defaultdict(float)
    for row in rows:
        totals[row.episode] += earned(row) * (row.role == "planner")
    agree(rows, "matpo", by_hand(rows, {r.id: totals[r.episode] for r in rows}, task, episode))


def test_matpo_names_the_roles_when_the_main_one_is_missing(ragged: Callable[..., Any]) -> None:
    table = Table(ragged(1).rows)
    with pytest.raises(ValueError, match=r"main role 'boss'; the roles are \['planner', 'worker'\]"):
        make_algorithm("matpo", main="boss").advantages(table, table.mine("mine"), {})


@UNHURRIED
@given(seed=SEEDS)
def test_m_grpo(ragged: Callable[..., Any], seed: int) -> None:
    """Against the paper's alignment done exactly: every rollout repeated until all have equally many invocations."""
    rows = ragged(seed).rows
    chains: dict[str, list[Decision]] = defaultdict(list)
    for row in rows:
        chains[row.chain].append(row)
    score = {name: sum(map(earned, members)) for name, members in chains.items()}
    expected, weights = {}, {}
    for row in rows:
        rollouts: dict[str, list[str]] = defaultdict(list)
        for name, members in chains.items():
            if task_agent(members[0]) == task_agent(row):
                rollouts[members[0].episode].append(name)
        aligned = math.lcm(*(len(names) for names in rollouts.values()))
        drawn = {e: names * (aligned // len(names)) for e, names in rollouts.items()}
        everything = [score[name] for names in drawn.values() for name in names]
        mean = math.fsum(everything) / len(everything)
        calls = len(rollouts[row.episode])
        weights[row.id] = sum(map(len, rollouts.values())) / len(rollouts) / calls
        if len(rollouts) < 2 or max(everything) - min(everything) < 1e-9:
            expected[row.id] = 0.0
            continue
        # a rollout is one sample: its drawn invocations have one vote together
        squares = math.fsum((s - mean) ** 2 for s in everything) / aligned
        expected[row.id] = (score[row.chain] - mean) / (math.sqrt(squares / (len(rollouts) - 1)) + 1e-6)
    agree(rows, "m_grpo", expected)
    table = Table(rows)
    for signal in make_algorithm("m_grpo").advantages(table, table.mine("mine"), {}):
        assert signal.weight == pytest.approx(weights[signal.id], abs=1e-6)
        assert signal.unit.endswith(table.rows[table.index[signal.id]].chain)


@UNHURRIED
@given(seed=SEEDS)
def test_m_grpo_by_act(ragged: Callable[..., Any], seed: int) -> None:
    """Where every act is an invocation of its own: as if each were a chain."""
    rows = ragged(seed).rows
    apart = [replace(row, chain=f"{row.chain}:{row.id}", order=0, ended="terminal") for row in rows]
    by_act, by_chain = (
        {s.id: s for s in make_algorithm(**how).advantages(table, table.mine("mine"), {})}
        for how, table in (
            ({"name": "m_grpo", "unit": "decision", "score": "act"}, Table(rows)),
            ({"name": "m_grpo"}, Table(apart)),
        )
    )
    assert by_act.keys() == by_chain.keys()
    for id, signal in by_act.items():
        assert signal.advantage == pytest.approx(by_chain[id].advantage, abs=1e-6)
        assert signal.weight == pytest.approx(by_chain[id].weight, abs=1e-6)


def whitened(pool: dict[str, list[float]], floor: float) -> Callable[[str, float], float]:
    """Mean 0 and deviation 1 over the tokens of a pool."""
    stats = {}
    for name, values in pool.items():
        mean = math.fsum(values) / len(values)
        stats[name] = mean, max(math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)), floor)
    return lambda name, value: (value - stats[name][0]) / stats[name][1]


@UNHURRIED
@given(seed=SEEDS, baseline=st.booleans(), per=st.sampled_from(["policy", "role"]))
def test_reinforce_pp(ragged: Callable[..., Any], seed: int, baseline: bool, per: str) -> None:
    rows = ragged(seed).rows
    x = later(rows, 1.0)
    groups = by_hand(rows, x, task_agent, episode, std=False)
    table = Table(rows)
    still = partition(table).still(np.array([x[name] for name in table.ids]))
    dead = {name for name, s in zip(table.ids, still, strict=True) if s and baseline}
    scores = groups if baseline else x
    pool: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.policy == "mine" and row.trainable and row.id not in dead:
            pool[getattr(row, per)] += [scores[row.id]] * row.n_tokens
    white = whitened(pool, 1e-6)
    mine = [row for row in rows if row.policy == "mine" and row.trainable]
    expected = {r.id: 0.0 if r.id in dead else white(getattr(r, per), scores[r.id]) for r in mine}
    agree(rows, "reinforce_pp", expected, baseline=baseline, whiten=per)


@UNHURRIED
@given(seed=SEEDS)
def test_reinforce_pp_with_a_penalty_on_every_token(ragged: Callable[..., Any], seed: int) -> None:
    """A_i = score + sum of the penalties from token i on, whitened over all tokens."""
    play = ragged(seed)
    rows = play.rows
    lengths = [row.n_tokens for row in rows]
    kl = [k for row in rows for k in play.kl[row.id]]
    for row, summary in zip(
        rows, summarise([0.0] * len(kl), lengths, [0.0] * len(rows), rewards=kl), strict=True
    ):
        row.value = summary
    x = later(rows, 1.0)
    tokens = {r.id: [x[r.id] + math.fsum(play.kl[r.id][i:]) for i in range(r.n_tokens)] for r in rows}
    table = Table(rows)
    mine = table.mine("mine")
    pool = {"mine": [a for row in mine for a in tokens[table.ids[row]]]}
    signals = make_algorithm("reinforce_pp", kl_reward=0.1).advantages(table, mine, {})
    for signal in signals:
        local = np.array([math.fsum(play.kl[signal.id][i:]) for i in range(len(play.kl[signal.id]))])
        assert signal.tail is not None
        found = (token_advantages(local, [len(local)], [signal.tail]) - signal.shift) * signal.scale
        assert found == pytest.approx([whitened(pool, 1e-6)("mine", a) for a in tokens[signal.id]], abs=1e-6)


# -- options that all group-relative algorithms have --------------------------------------------------------------


@UNHURRIED
@given(seed=SEEDS)
def test_task_wise_normalisation(ragged: Callable[..., Any], seed: int) -> None:
    """AgentRL: each environment's tokens get mean 0 and deviation 1; rows that compare with nothing stay at 0."""
    rows = ragged(seed).rows
    plain = by_hand(rows, later(rows, 1.0), task_agent, episode)
    table = Table(rows)
    x = later(rows, 1.0)
    still = partition(table).still(np.array([x[name] for name in table.ids]))
    dead = {name for name, s in zip(table.ids, still, strict=True) if s}
    pool: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.policy == "mine" and row.trainable and row.id not in dead:
            pool[row.env_id] += [plain[row.id]] * row.n_tokens
    white = whitened(pool, 1e-6)
    mine = [row for row in rows if row.policy == "mine" and row.trainable]
    expected = {r.id: 0.0 if r.id in dead else white(r.env_id, plain[r.id]) for r in mine}
    agree(rows, "grpo", expected, task_wise=True)


@UNHURRIED
@given(seed=SEEDS)
def test_errors_that_were_recovered_from_are_masked(ragged: Callable[..., Any], seed: int) -> None:
    table = Table(ragged(seed).rows)
    signals = make_algorithm("grpo", mask_errors="format", role_weights={"worker": 0.5}).advantages(
        table, table.mine("mine"), {}
    )
    for signal in signals:
        row = table.rows[table.index[signal.id]]
        after = [r for r in table.rows if r.chain == row.chain and r.order > row.order]
        masked = row.credit["format"] < 0 and any(r.credit["format"] >= 0 for r in after)
        assert signal.weight == (0.0 if masked else 0.5 if row.role == "worker" else 1.0)


@UNHURRIED
@given(seed=SEEDS)
def test_dapo_shapes_overlong_replies_and_draws_flat_tasks_anew(
    ragged: Callable[..., Any], seed: int
) -> None:
    rows = ragged(seed).rows
    dapo = make_algorithm("dapo", max_tokens=5, overlong_buffer=2, overlong_penalty=0.5)
    x = later(rows, 1.0)
    for row in rows:
        x[row.id] -= 0.5 * min(max((row.n_tokens - 3) / 2, 0.0), 1.0)
    expected = by_hand(rows, x, task_agent, episode)
    agree(rows, "dapo", expected, max_tokens=5, overlong_buffer=2, overlong_penalty=0.5)
    table = Table(rows)
    useful = {task(r) for r in rows if r.policy == "mine" and r.trainable and expected[r.id] != 0.0}
    # a row on its group's mean has advantage 0 although its group has variance
    assert useful <= dapo.useful(table, table.mine("mine")) <= {task(r) for r in rows}
    flat = {t for t in map(task, rows) if all(expected[r.id] == 0.0 for r in rows if task(r) == t)}
    assert not flat & dapo.useful(table, table.mine("mine"))


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "gigpo", "at_grpo", "dr_mas", "m_grpo", "matpo", "reinforce_pp"]
)
def test_an_empty_step_is_fine(name: str) -> None:
    table, nothing = Table([]), np.zeros(0, np.int64)
    algorithm = make_algorithm(name)
    assert algorithm.advantages(table, nothing, {}) == []
    assert algorithm.metrics(table, nothing, [])["groups/count"] == 0
