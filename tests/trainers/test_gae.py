"""Composed GAE against a flat one: plain loops in float64 over whole chains of tokens, as if nothing were split."""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.controller.statistics import gae
from unitymas.trainers.controller.statistics.table import Decision, Table

UNHURRIED = settings(deadline=None, max_examples=25)
RATES = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


def flat(
    play: Any, gamma: float, lam: float, horizon: str = "chain", unseen: Any = ()
) -> dict[str, list[float]]:
    """GAE over each chain's tokens in one go. What no critic saw (`unseen`) takes no step: its reward is laid on the
    last token that one saw. A chain ends with its episode, whatever ended it.
    """
    chains = defaultdict(list)
    for row in play.rows:
        chains[row.id if horizon == "act" else row.chain].append(row)
    found: dict[str, list[float]] = {}
    for rows in chains.values():
        values, rewards, where = [], [], []
        for row in sorted(rows, key=lambda row: row.order):
            if row.id not in unseen:
                values += play.values[row.id]
                rewards += play.kl[row.id]
                where += [(row.id, i) for i in range(row.n_tokens)]
                found[row.id] = [0.0] * row.n_tokens
            if rewards:
                rewards[-1] += math.fsum(row.credit.values())
        later = next_value = 0.0
        for value, reward, (name, i) in reversed(list(zip(values, rewards, where, strict=True))):
            later = reward + gamma * next_value - value + gamma * lam * later
            found[name][i] = later
            next_value = value
    return found


def everything(table: Table) -> np.ndarray:
    return np.arange(len(table))


def summarised(play: Any, gamma: float, lam: float) -> tuple[Table, dict[str, np.ndarray]]:
    """The table as the controller gets it, and the local advantages that stay behind."""
    rows = play.rows
    lengths = [row.n_tokens for row in rows]
    values = [v for row in rows for v in play.values[row.id]]
    kl = [k for row in rows for k in play.kl[row.id]]
    after = [play.after[row.id] for row in rows]
    for row, summary in zip(rows, gae.summarise(values, lengths, after, gamma, lam, kl), strict=True):
        row.value = summary
    local = gae.local_advantages(values, lengths, gamma, lam, kl)
    parts = np.split(local, np.cumsum(lengths)[:-1]) if rows else []
    return Table(rows), {row.id: part for row, part in zip(rows, parts, strict=True)}


@UNHURRIED
@given(seed=st.integers(0, 2**20), gamma=RATES, lam=RATES, horizon=st.sampled_from(["chain", "act"]))
def test_composed_equals_flat(
    ragged: Callable[..., Any], seed: int, gamma: float, lam: float, horizon: gae.Horizon
) -> None:
    """… with frozen players' and forced acts in between, for every discount."""
    play = ragged(seed)
    table, local = summarised(play, gamma, lam)
    chance = random.Random(seed)
    unseen = {name for name in table.ids if chance.random() < 0.3}
    for row in table.rows:
        row.value = None if row.id in unseen else row.value
    seen = np.array([i for i, name in enumerate(table.ids) if name not in unseen], np.int64)
    expected = flat(play, gamma, lam, horizon, unseen)
    tails = gae.tails(table, seen, gamma, lam, horizon)
    for name, tail in zip(table.ids, tails, strict=True):
        if name in unseen:
            continue
        found = gae.token_advantages(local[name], [len(local[name])], [tail], gamma, lam)
        assert found == pytest.approx(expected[name], abs=1e-6)
    of = gae.moments(table, seen, tails, gamma * lam)
    for row, name in zip(seen.tolist(), (table.ids[row] for row in seen), strict=True):
        assert of.n[row] == len(expected[name])
        assert of.total[row] == pytest.approx(sum(expected[name]), abs=1e-6)
        assert of.squares[row] == pytest.approx(sum(a * a for a in expected[name]), abs=1e-6)


@UNHURRIED
@given(seed=st.integers(0, 2**20), whiten=st.sampled_from(["role", "agent", "policy", "none"]))
def test_ppo_signals_are_whitened_flat_gae(ragged: Callable[..., Any], seed: int, whiten: str) -> None:
    """What the group makes of a signal equals mean 0, deviation 1 over all of a role's tokens, in float64."""
    play, gamma, lam, floor = ragged(seed), 0.99, 0.9, 0.1
    table, local = summarised(play, gamma, lam)
    ppo = make_algorithm("ppo", gamma=gamma, lam=lam, whiten=whiten, whiten_floor=floor)
    mine = table.mine("mine")
    signals = ppo.advantages(table, mine, {})
    expected = flat(play, gamma, lam)
    assert [signal.id for signal in signals] == [table.ids[row] for row in mine]
    pools: dict[Any, list[float]] = defaultdict(list)
    for row in mine:
        pools[getattr(table.rows[row], whiten, "")].extend(expected[table.ids[row]])
    for signal in signals:
        row = table.rows[table.index[signal.id]]
        pool = pools[getattr(row, whiten, "")]
        mean = math.fsum(pool) / len(pool)
        deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in pool) / len(pool))
        if whiten == "none":
            mean, deviation = 0.0, 1.0
        tokens = gae.token_advantages(local[row.id], [row.n_tokens], [signal.tail], gamma, lam)
        want = [(a - mean) / max(deviation, floor) for a in expected[row.id]]
        assert (tokens - signal.shift) * signal.scale == pytest.approx(want, abs=1e-6)


@UNHURRIED
@given(seed=st.integers(0, 2**20), gamma=RATES, lam=RATES)
def test_turn_level(ragged: Callable[..., Any], seed: int, gamma: float, lam: float) -> None:
    """Acts as steps: the flat estimator on chains whose every judged decision is one step with one value."""
    play = ragged(seed)
    summarised(play, 1.0, 1.0)
    chance = random.Random(seed)
    unseen = {row.id for row in play.rows if chance.random() < 0.3}
    for row in play.rows:
        row.value = None if row.id in unseen else row.value
        row.n_tokens, play.values[row.id], play.kl[row.id] = 1, play.values[row.id][:1], [0.0]
    table = Table(play.rows)
    seen = np.array([i for i, name in enumerate(table.ids) if name not in unseen], np.int64)
    advantage, target = gae.turn_level(table, seen, gamma, lam)
    for name, (expected,) in flat(play, gamma, lam, unseen=unseen).items():
        row = table.index[name]
        assert advantage[row] == pytest.approx(expected, abs=1e-6)
        assert target[row] == pytest.approx(expected + play.values[name][0], abs=1e-6)


def one(name: str, order: int, ended: str, reward: float = 1.0) -> Decision:
    return Decision(
        id=name, task="t", episode="e", node=name, role="r", agent="r", chain="c", policy="p", n_tokens=1,
        order=order, ended=ended, credit={"r": reward},  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_quiet_role_is_not_fed_amplified_noise() -> None:
    table = Table([one("a", 0, "no", 0.001), one("b", 1, "terminal", -0.001)])
    rows = np.arange(2)
    of = gae.flat_moments(table, table.reward)
    shift, scale = gae.whiten(table, rows, of, floor=0.1)
    assert scale.tolist() == [10.0, 10.0]
    assert shift.tolist() == [0.0, 0.0]


def test_missing_values_are_named() -> None:
    with pytest.raises(ValueError, match="decision 'a' .* has no values"):
        gae.tails(Table([one("a", 0, "terminal")]), np.arange(1))


def test_a_row_that_no_critic_saw_passes_rewards_through() -> None:
    """A frozen player's act between two of mine: no step at all, whatever the discount."""
    rows = [one("a", 0, "no", 1.0), one("b", 1, "no", 0.0), one("c", 2, "terminal", 4.0)]
    for row, value in zip(
        (rows[0], rows[2]), gae.summarise([0.5, 3.0], [1, 1], [0.0, 0.0], 1.0, 1.0), strict=True
    ):
        row.value = value
    mine = np.array([0, 2])
    assert gae.tails(Table(rows), mine).tolist() == [5.0, 4.0, 4.0]
    assert gae.tails(Table(rows), mine, 0.5, 0.2).tolist() == pytest.approx(
        [1 + 0.5 * 3 + 0.1 * (4 - 3), 1.6, 4]
    )


def test_broken_chains_are_named() -> None:
    with pytest.raises(ValueError, match="two decisions at position 0"):
        _ = Table([one("a", 0, "no"), one("b", 0, "terminal")]).following
    with pytest.raises(ValueError, match="'b' says ended='no'"):
        _ = Table([one("a", 0, "no"), one("b", 1, "no")]).following
    with pytest.raises(ValueError, match="'a' says ended='terminal', but it is not the last"):
        _ = Table([one("a", 0, "terminal"), one("b", 1, "terminal")]).following


def test_a_decision_without_tokens_has_no_summary() -> None:
    with pytest.raises(ValueError, match="number 1 has no tokens"):
        gae.summarise([0.1, 0.2], [2, 0], [0.0, 0.0])


def test_nothing_is_fine() -> None:
    assert gae.summarise([], [], []) == []
    assert gae.tails(Table([]), np.zeros(0, np.int64)).shape == (0,)
    assert make_algorithm("ppo").advantages(Table([]), np.zeros(0, np.int64), {}) == []
