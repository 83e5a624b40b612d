"""Estimators of all figures, each with an exact name.

Scores come as one row per task, one number per sample: ``[[1.0, 0.0, 1.0, 1.0], …]``. Rows may differ in
length (an interrupted run), but each task has the same weight. Tasks are the independent observations, so every interval
resamples *tasks* and never single rollouts: four samples of one task are not independent.

    average(scores)                 avg@k: mean over tasks of the mean over samples
    pass_at(successes, k)           unbiased pass@k: 1 - C(n-c, k) / C(n, k)     (at least one of k succeeds)
    pass_hat(successes, k)          unbiased pass^k: C(c, k) / C(n, k)           (all of k succeed)
    paired_difference(ours, base)   mean over shared tasks of the difference, with interval and p-value

A :class:`Success` rule tells whether a score counts as a success. It is printed beside the result, because for an F1 "above
zero" and "exactly one" are different benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .result_types import EstimateDict

TaskScores = Sequence[Sequence[float]]

RESAMPLES = 10_000
LEVEL = 0.95
EXACT_FLIPS = 12  # up to 2**12 sign patterns are enumerated; above, they are sampled
_CHUNK = 4_000_000  # resampled cells held in memory at once
_INTERVAL = "expanded percentile bootstrap over tasks"
_ALIKE = "exact (every task alike): Clopper-Pearson"


@dataclass(frozen=True, slots=True)
class Success:
    """Rule for when a score is a success: ``Success()`` is ``score >= 1``, ``Success(">", 0)`` is "better than
    nothing".
    """

    relation: str = ">="
    threshold: float = 1.0

    def __post_init__(self) -> None:
        if self.relation not in (">=", ">"):
            raise ValueError(f"success relation must be '>=' or '>', got {self.relation!r}")

    def __call__(self, score: float) -> bool:
        # A score that sums to one in floating point (0.1 * 10) is a success.
        return score >= self.threshold - 1e-9 if self.relation == ">=" else score > self.threshold + 1e-9

    def __str__(self) -> str:
        return f"score {self.relation} {self.threshold:g}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Figure with its interval and the name of its estimator. With fewer than two tasks, the interval is None."""

    value: float
    low: float | None
    high: float | None
    tasks: int
    estimator: str
    interval: str = _INTERVAL
    level: float = LEVEL

    def plain(self) -> EstimateDict:
        """Return the figure as plain JSON."""
        return cast(EstimateDict, asdict(self))

    @property
    def half_width(self) -> float | None:
        """Half of the width of the interval, or None without one."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference, ours minus theirs, over the tasks that both have."""

    value: float
    low: float | None
    high: float | None
    p: float
    tasks: int
    estimator: str = "mean over shared tasks of the difference of per-task means"
    test: str = "two-sided paired sign-flip permutation test over tasks"


@dataclass(frozen=True, slots=True)
class RoleEffect:
    """Effect on the score, on the same tasks, when another team plays one role."""

    role: str
    score: Estimate
    difference: Difference


def average(
    scores: TaskScores, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL, share: bool = True
) -> Estimate:
    """Return avg@k: the mean over tasks of each task's mean over its samples. ``share``: scores lie between 0 and 1."""
    means = np.array([np.mean(row) for row in scores if len(row)], dtype=np.float64)
    k = max((len(row) for row in scores), default=0)
    return _estimate(means, f"avg@{k}", seed, resamples, level, share)


def pass_at(
    successes: TaskScores, k: int, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> Estimate:
    """Return the unbiased pass@k: the probability that at least one of k samples, drawn without replacement, succeeds."""
    values = np.array([1.0 - _all_drawn(n - c, n, k) for c, n in _counts(successes, k)], dtype=np.float64)
    return _estimate(values, f"unbiased pass@{k}", seed, resamples, level)


def pass_hat(
    successes: TaskScores, k: int, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> Estimate:
    """Return the unbiased pass^k: the probability that all of k samples, drawn without replacement, succeed."""
    values = np.array([_all_drawn(c, n, k) for c, n in _counts(successes, k)], dtype=np.float64)
    return _estimate(values, f"unbiased pass^{k}", seed, resamples, level)


def paired_difference(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Difference:
    """Return the mean difference on the tasks that both sides have. Scores are given by task id."""
    shared = sorted(task for task in ours if len(ours[task]) and len(theirs.get(task, ())))
    if not shared:
        raise ValueError("no task in common: a paired difference needs both sides to answer the same tasks")
    gaps = np.array([np.mean(ours[task]) - np.mean(theirs[task]) for task in shared], dtype=np.float64)
    low, high = bootstrap_interval(gaps, seed=seed, resamples=resamples, level=level)
    return Difference(float(gaps.mean()), low, high, sign_flip_p(gaps, seed=seed), len(shared))


def bootstrap_interval(
    values: NDArray[np.float64], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float | None, float | None]:
    """Return an interval for the mean of ``values``, one for each task.

    The plain percentile interval is too narrow, by a factor of about sqrt((n-1)/n) and because of the normal distribution's
    thin tails. The expanded interval (Hesterberg 2015, section 5.3) reads the bootstrap distribution at wider quantiles, which
    corrects both. Like the percentile interval, it follows skew and stays within the range of the scores.
    """
    n = len(values)
    if n < 2:
        return None, None
    alpha = (1 - level) / 2
    tail = NormalDist().cdf(math.sqrt(n / (n - 1)) * student_quantile(alpha, n - 1))
    means = _resampled_means(values, resamples, np.random.default_rng(seed))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def sign_flip_p(gaps: NDArray[np.float64], *, seed: int = 0, flips: int = 20_000) -> float:
    """Return the two-sided p-value of a mean difference: how often random signs give a mean as far from zero."""
    moved = np.abs(gaps[gaps != 0.0])
    n = len(moved)
    if n == 0:
        return 1.0
    observed = abs(float(gaps.sum())) - 1e-12
    if n <= EXACT_FLIPS:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ moved) >= observed))
    rng = np.random.default_rng(seed)
    extreme, left = 0, flips
    while left:
        take = min(left, max(1, _CHUNK // n))
        signs = rng.integers(0, 2, size=(take, n), dtype=np.int8) * 2 - 1
        extreme += int(np.sum(np.abs(signs @ moved) >= observed))
        left -= take
    return (extreme + 1) / (flips + 1)  # the observed pattern is one of the patterns: p is never 0


def _estimate(
    values: NDArray[np.float64], estimator: str, seed: int, resamples: int, level: float, share: bool = True
) -> Estimate:
    n = len(values)
    if not n:
        raise ValueError(f"{estimator}: no task has a sample")
    value = float(values.mean())
    if share and n > 1 and value in (0.0, 1.0):
        # All scores are equal, and a bootstrap would claim certainty. The share of tasks with another score is at most this, and
        # so is the distance of the mean.
        reach = 1 - ((1 - level) / 2) ** (1 / n)
        low, high = (0.0, reach) if value == 0.0 else (1 - reach, 1.0)
        return Estimate(value, low, high, n, estimator, _ALIKE, level)
    bounds = bootstrap_interval(values, seed=seed, resamples=resamples, level=level)
    return Estimate(value, *bounds, n, estimator, level=level)


def _counts(successes: TaskScores, k: int) -> list[tuple[int, int]]:
    """Return (successes, samples) of each task. Every task needs k samples, otherwise the estimator does not exist."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    counts = [(sum(map(bool, row)), len(row)) for row in successes]
    fewest = min((n for _, n in counts), default=0)
    if fewest < k:
        raise ValueError(f"k={k} needs {k} samples of every task, but one has {fewest}")
    return counts


def _all_drawn(marked: int, n: int, k: int) -> float:
    """Return the probability that k draws without replacement from n are all among the ``marked`` ones."""
    return math.comb(marked, k) / math.comb(n, k)


def _resampled_means(
    values: NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return the means of ``resamples`` draws of n tasks with replacement.

    With few distinct values (0/1 scores, or F1 over k samples), a draw is a multinomial over these values. The distribution is
    the same, without n numbers for each resample.
    """
    distinct, counts = np.unique(values, return_counts=True)
    n = len(values)
    if len(distinct) <= min(64, n // 4 + 2):
        return np.asarray(rng.multinomial(n, counts / n, size=resamples) @ distinct / n, dtype=np.float64)
    step = max(1, _CHUNK // n)
    parts = [
        values[rng.integers(0, n, size=(min(step, resamples - start), n))].mean(axis=1)
        for start in range(0, resamples, step)
    ]
    return np.concatenate(parts)


def student_quantile(tail: float, df: int) -> float:
    """Return the (negative) quantile of Student's t: exact for df 1 and 2, else Cornish-Fisher with an error below 1%."""
    if df == 1:
        return -1 / math.tan(math.pi * tail)
    if df == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z = NormalDist().inv_cdf(tail)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )
