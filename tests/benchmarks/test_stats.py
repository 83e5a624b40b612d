"""The estimators against exact enumeration, scipy where it is there, and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.benchmarks.evaluation import stats

rows = st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=6), min_size=1, max_size=6)


@given(rows, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_pass_at_k_and_pass_hat_k_equal_enumeration(successes: list[list[int]], k: int) -> None:
    at, hat = [], []
    for row in successes:
        draws = list(itertools.combinations(row, k))
        at.append(np.mean([any(draw) for draw in draws]))
        hat.append(np.mean([all(draw) for draw in draws]))
    assert stats.pass_at(successes, k, resamples=50).value == pytest.approx(np.mean(at), abs=1e-12)
    assert stats.pass_hat(successes, k, resamples=50).value == pytest.approx(np.mean(hat), abs=1e-12)


def test_tasks_weigh_the_same_whatever_their_number_of_samples() -> None:
    assert stats.average([[1.0], [0.0, 0.0, 0.0]]).value == 0.5


@pytest.mark.parametrize("n_tasks", [15, 60, 200])
@pytest.mark.parametrize("kind", ["pass", "f1"])
def test_the_interval_covers_the_truth_95_times_in_100(n_tasks: int, kind: str) -> None:
    """1,000 simulated evaluations, k=4: task difficulty varies, samples are drawn within the task."""
    rng = np.random.default_rng(7)
    truth, hits = 0.5, 0
    for repetition in range(1000):
        difficulty = rng.beta(1.5, 1.5, size=n_tasks)
        if kind == "pass":
            scores = rng.random((n_tasks, 4)) < difficulty[:, None]
        else:
            noise = rng.normal(0, 0.1, (n_tasks, 4)) * (difficulty * (1 - difficulty))[:, None]
            scores = np.clip(difficulty[:, None] + noise, 0, 1)
        estimate = stats.average(scores.astype(float), seed=repetition, resamples=1000)
        assert estimate.low is not None and estimate.high is not None
        hits += estimate.low <= truth <= estimate.high
    assert 930 <= hits <= 970


def test_resampling_distinct_values_is_the_same_distribution_as_resampling_cells() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 3, 200) / 2
    fast = stats._resampled_means(values, 20_000, np.random.default_rng(1))
    plain = values[np.random.default_rng(2).integers(0, 200, (20_000, 200))].mean(axis=1)
    assert np.quantile(fast, [0.025, 0.5, 0.975]) == pytest.approx(
        np.quantile(plain, [0.025, 0.5, 0.975]), abs=0.006
    )


def test_sign_flip_is_exact_on_few_tasks_and_close_to_it_on_more() -> None:
    gaps = np.array([0.5, 0.25, 0.0, 1.0, -0.25, 0.5])
    moved = gaps[gaps != 0]
    means = [abs(np.dot(signs, np.abs(moved))) for signs in itertools.product((-1, 1), repeat=len(moved))]
    assert stats.sign_flip_p(gaps) == pytest.approx(np.mean([m >= abs(moved.sum()) - 1e-9 for m in means]))
    many = np.random.default_rng(3).normal(0.1, 1, 16)
    exact = np.mean(
        [abs(np.dot(s, many)) >= abs(many.sum()) - 1e-9 for s in itertools.product((-1, 1), repeat=16)]
    )
    assert stats.sign_flip_p(many) == pytest.approx(exact, abs=0.015)


def test_the_p_value_of_no_difference_is_uniform_enough() -> None:
    rng = np.random.default_rng(11)
    small = sum(stats.sign_flip_p(rng.normal(0, 1, 30), seed=i, flips=500) < 0.05 for i in range(1000))
    assert 30 <= small <= 70


def test_paired_difference_uses_shared_tasks_only() -> None:
    gap = stats.paired_difference(
        {"a": [1.0, 1.0], "b": [0.0], "x": [1.0]}, {"a": [0.0], "b": [0.0], "y": [1.0]}
    )
    assert gap.tasks == 2 and gap.value == 0.5
    with pytest.raises(ValueError, match="no task in common"):
        stats.paired_difference({"a": [1.0]}, {"b": [1.0]})


@pytest.mark.parametrize("df", [1, 2, 3, 5, 10, 100])
def test_student_quantile_against_scipy(df: int) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    assert stats.student_quantile(0.025, df) == pytest.approx(scipy_stats.t.ppf(0.025, df), rel=0.01)


def test_tasks_that_all_score_alike_are_not_certainty() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    none = stats.average([[0.0]] * 50)
    exact = scipy_stats.binomtest(0, 50).proportion_ci(0.95, "exact")
    assert (none.low, none.high) == pytest.approx((exact.low, exact.high)) and "Clopper" in none.interval
    assert stats.pass_at([[1, 1]] * 50, 2).low == pytest.approx(1 - exact.high)
    assert stats.average([[0.0]] * 50, share=False).high == 0.0


def test_success_is_spelled_out() -> None:
    assert stats.Success()(sum([0.1] * 10)) and not stats.Success()(0.99)
    assert stats.Success(">", 0.0)(0.01) and not stats.Success(">", 0.0)(0.0)
    assert str(stats.Success(">", 0.0)) == "score > 0"
    with pytest.raises(ValueError, match="relation"):
        stats.Success("<", 1.0)


def test_too_few_samples_are_refused_and_one_task_has_no_interval() -> None:
    with pytest.raises(ValueError, match="needs 4 samples"):
        stats.pass_at([[1, 0, 1, 1], [1]], 4)
    assert stats.average([[0.5]]).low is None
    assert math.isclose(stats.average([[0.0], [1.0]]).value, 0.5)
    with pytest.raises(ValueError, match="no task"):
        stats.average([])
