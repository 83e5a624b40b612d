"""Groups of decisions whose scores are compared, and the comparison.

A group is a set of decisions that agree in explicit ids; never a reshape, never "the next n rows". The *samples* of a
group are compared. A trajectory counts once, however many acts it has, unless the group fixes the very state (same
prompt, same turn, siblings of a tree). There every call is a sample of its own.

A group of one sample has nothing to compare: its advantage is 0, and it is counted. So is a group without variance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ....agents.basics.hints import nearest
from ....agents.basics.renamed import renamed
from .table import Bools, Floats, Ints, Signal, Table, total

Each = Literal["trajectory", "call"]
ScoreKind = Literal["act", "return", "chain", "mean", "agent", "episode"]
__getattr__ = renamed(__name__, {"Score": "ScoreKind"})

SAME = 1e-9
"""Largest difference of scores that count as equal (relative to their size, if above 1): sums of credits
round differently.
"""

GROUPS: dict[str, tuple[tuple[str, ...], Each]] = {
    "agent": (("task", "agent"), "trajectory"),
    "role": (("task", "role"), "trajectory"),
    "task": (("task",), "trajectory"),
    "prompt": (("task", "agent", "prompt_hash"), "call"),
    "agent-turn": (("task", "agent", "turn"), "call"),
    "siblings": (("task", "agent", "sibling_set"), "call"),
    "anchor": (("task", "agent", "anchor"), "call"),
    "step": (("task", "turn"), "call"),
    "trajectory": (("task", "episode"), "call"),
    "global": ((), "call"),
}
"""Map from the name of a group to the columns that must agree, and to what counts once in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A partition of a table's rows. All arrays but `samples` have one entry per row."""

    code: Ints
    """Group of the row."""
    sample: Ints
    """Sample of the row: a trajectory's calls in the group, or the single call."""
    share: Floats
    """Share 1 / (rows of the sample): the rows of a sample weigh 1 together."""
    samples: Floats
    """Number of samples in each group: (G,)."""

    def mean(self, x: Floats) -> Floats:
        """Mean over a group's samples: (G,)."""
        return np.bincount(self.code, self.share * x, len(self.samples)) / self.samples

    def std(self, x: Floats, ddof: int = 1) -> Floats:
        """Standard deviation over a group's samples: (G,). 0 for singletons."""
        centred = x - self.mean(x)[self.code]
        squares = np.bincount(self.code, self.share * centred**2, len(self.samples))
        root: Floats = np.sqrt(squares / np.maximum(self.samples - ddof, 1.0))
        return root

    def others(self, x: Floats) -> Floats:
        """Mean over the *other* samples of the row's group, per row; undefined (0) for singletons."""
        own = total(self.sample, self.share * x)
        rest = (self.mean(x) * self.samples)[self.code] - own
        means: Floats = rest / np.maximum(self.samples[self.code] - 1.0, 1.0)
        return means

    def still(self, x: Floats) -> Bools:
        """Mark rows whose group cannot tell them apart: singletons, and groups where every x is the same."""
        lowest = np.full(len(self.samples), np.inf)
        highest = np.full(len(self.samples), -np.inf)
        np.minimum.at(lowest, self.code, x)
        np.maximum.at(highest, self.code, x)
        size = np.maximum(np.maximum(np.abs(highest), np.abs(lowest)), 1.0)
        flat: Bools = (highest - lowest <= SAME * size) | (self.samples < 2)
        return flat[self.code]

    def relative(self, x: Floats, *, std: bool = True, eps: float = 1e-6, ddof: int = 1) -> Floats:
        """Compute (x - mean) / (std + eps) in the group, or only x - mean. 0 where nothing can be compared."""
        advantage = x - self.mean(x)[self.code]
        if std:
            advantage = advantage / (self.std(x, ddof) + eps)[self.code]
        return np.where(self.still(x), 0.0, advantage)

    def leave_one_out(self, x: Floats) -> Floats:
        """Compute x minus the mean of the other samples."""
        return np.where(self.still(x), 0.0, x - self.others(x))


def partition(table: Table, by: str = "agent", each: str = "") -> Groups:
    """Partition `table` by a name of GROUPS. `each` overrides what counts once: "trajectory" or "call"."""
    if by not in GROUPS:
        raise ValueError(f"unknown group {by!r}: {nearest(by, GROUPS)}")
    if each not in ("", "trajectory", "call"):
        raise ValueError(f"unknown each={each!r}: choose 'trajectory' or 'call' (or '' for the group's own)")
    columns, own = GROUPS[by]
    code = table.codes(*columns)
    once = (each or own) == "trajectory"
    sample = table.codes(*columns, "episode") if once else np.arange(len(table))
    rows_of_sample = np.bincount(sample)
    share = 1.0 / rows_of_sample[sample]
    # a sample lies in one group, so the first row of each sample stands for it
    first = np.unique(sample, return_index=True)[1]
    samples = np.bincount(code[first]).astype(np.float64) if len(code) else np.zeros(0)
    return Groups(code, sample, share, samples)


def scores(table: Table, kind: ScoreKind = "return", gamma: float = 1.0) -> Floats:
    """Compute what is compared: one number per decision.

    act      what this act earned
    return   that and what its chain earns later, discounted by `gamma` per act
    chain    all that its chain earned (a sub-agent's invocation)
    mean     what the agent's acts earned on average in the trajectory
    agent    all that the agent earned in the trajectory
    episode  all that all agents earned in the trajectory
    """
    reward = table.reward
    if kind == "act":
        return reward
    if kind == "return":
        return returns(table, gamma)
    if kind == "chain":
        return total(table.codes("chain"), reward)
    if kind == "episode":
        return total(table.codes("task", "episode"), reward)
    own = table.codes("task", "episode", "agent")
    if kind == "agent":
        return total(own, reward)
    if kind == "mean":
        return total(own, reward) / np.bincount(own)[own]
    raise ValueError(f"unknown score {kind!r}: choose act, return, chain, mean, agent or episode")


def returns(table: Table, gamma: float = 1.0) -> Floats:
    """Discounted reward-to-go along each chain, `gamma` per act."""
    if not (table.following >= 0).any():
        return table.reward
    following, sums = table.following.tolist(), table.reward.tolist()
    for row in table.backwards:
        if following[row] >= 0:
            sums[row] += gamma * sums[following[row]]
    return np.array(sums, np.float64)


def report(table: Table, mine: Ints, groups: Groups, x: Floats) -> dict[str, float]:
    """Return what to log of a grouping, over the groups that hold any row of `mine`.

    Shares are of groups. `groups/size/2-3` is the share of groups with two or three samples, and so on by powers
    of two. `groups/span_tasks` must be 0, unless global statistics are wanted.
    """
    held = np.unique(groups.code[mine])
    if not len(held):
        return {"groups/count": 0.0}
    task = table.codes("task")
    lowest = np.full(len(groups.samples), np.iinfo(np.int64).max)
    highest = np.full(len(groups.samples), -1)
    np.minimum.at(lowest, groups.code, task)
    np.maximum.at(highest, groups.code, task)
    still = np.zeros(len(groups.samples), np.bool_)
    still[groups.code] = groups.still(x)
    sizes = groups.samples[held]
    metrics = {
        "groups/count": float(len(held)),
        "groups/singletons": float(np.mean(sizes < 2)),
        "groups/zero_variance": float(np.mean(still[held] & (sizes >= 2))),
        "groups/span_tasks": float(np.sum(lowest[held] != highest[held])),
        "groups/size_mean": float(sizes.mean()),
    }
    for power, count in sorted(Counter(np.log2(sizes).astype(int).tolist()).items()):
        low, high = 2**power, 2 ** (power + 1) - 1
        metrics[f"groups/size/{low}" if low == high else f"groups/size/{low}-{high}"] = count / len(held)
    return metrics


def zero_shares(table: Table, signals: Sequence[Signal]) -> dict[str, float]:
    """Share of each role's trained decisions whose every token has advantage 0."""
    calls: Counter[str] = Counter()
    zero: Counter[str] = Counter()
    for signal in signals:
        role = table.rows[table.index[signal.id]].role
        calls[role] += 1
        plain = signal.advantage is not None and signal.advantage == signal.shift
        zero[role] += plain or signal.weight == 0.0 or signal.scale == 0.0
    return {role: zero[role] / calls[role] for role in sorted(calls)}


def starved(table: Table, signals: Sequence[Signal], limit: float = 0.9, at_least: int = 8) -> str | None:
    """Return a sentence if a trained role learns nothing: more than `limit` of its advantages are zero. Else None.

    Fewer than `at_least` decisions are too few to judge a role by.
    """
    shares = zero_shares(table, signals)
    calls = Counter(table.rows[table.index[signal.id]].role for signal in signals)
    for role, share in shares.items():
        if share > limit and calls[role] >= at_least:
            return (
                f"role {role!r} learns nothing: {share:.0%} of its {calls[role]} advantages are zero. Either its "
                f"groups hold one sample (draw more per task, sample a tree, or compare more widely: group=agent), "
                f"or all samples of a group score the same (easier or harder tasks, a finer reward, a hotter sampling)"
            )
    return None
