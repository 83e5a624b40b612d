"""The thin table: one row per decision, and the columns that statistics are made of.

A *decision* is one act that was sampled: a role spoke once. The controller keeps only this thin row of it. Its
tokens, log-probs and per-token values stay in the model group that sampled them. The table holds the rows of *all*
policies, so statistics that span roles, groups and frozen policies are exact.

    table = Table(decisions)                          # sorted by id: arrival order can not matter
    table.reward                                      # float64, one number per row: the sum of its credits
    table.codes("task", "agent")                      # which (task, agent) a row belongs to, as 0 … G-1
    signals = algorithm.advantages(table, table.mine("planner-policy"), state)

Columns are numpy arrays, made when first asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ....agents.answers import DecisionId

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """Summary of one decision of n tokens: what token-level GAE of the rest of its chain needs of it.

    With values V_1 … V_n before its tokens and the reward only at its end, token i's advantage is
    `local_i + decay^(n-i) * tail`. Here decay = gamma * lam; local_i is the GAE of token i as if everything after
    the decision were worth 0 (per-token KL reward included); `tail` is one number per decision (see gae.py).
    """

    first: float
    """V_1: the critic's value before the decision's first token."""
    local_first: float
    """local_1: the local advantage of the first token."""
    n: int
    """Number of tokens."""
    sum_local: float
    """Sum of local_i over the tokens."""
    sum_local2: float
    """Sum of local_i squared."""
    sum_local_decay: float
    """Sum of local_i * decay^(n-i)."""
    after: float = 0.0
    """Value after the last token. It has a meaning only for critics that get a target there (`Signal.after`);
    no chain continues from it.
    """


@dataclass(slots=True, kw_only=True)
class Decision:
    """One act that was sampled. It is filled in two steps, so it is not frozen: credit at sealing, `value` by
    the critic.
    """

    id: DecisionId
    """Id of the decision, `episode/node`: unique in a table."""
    task: str
    episode: str
    """Name of the trajectory: one played episode, or one root-to-leaf branch of a tree of them."""
    node: str
    role: str
    agent: str
    """Instance of the role, such as `evidence_2`."""
    chain: str
    """Name of the chain: one agent in one invocation on one root-to-leaf path. GAE and memory run along
    chains.
    """
    policy: str
    n_tokens: int
    """Number of trained tokens."""
    parents: tuple[str, ...] = ()
    """Ids of nodes in the same episode whose words this act was shown."""
    sibling_set: str = ""
    """Name of the set of candidates drawn from one state (tree sampling). Empty: the act had no siblings."""
    turn: int = 0
    """Number of earlier acts of this agent in the episode."""
    order: int = 0
    """Position in the chain."""
    prompt_hash: str = ""
    anchor: str | None = None
    """Hash of the environment's state, where the environment names one (GiGPO)."""
    version: int = 0
    trainable: bool = True
    credit: Mapping[str, float] = field(default_factory=dict)
    """Amount of each reward component."""
    ended: Literal["no", "terminal", "truncated"] = "no"
    """Ending of the *chain* with this decision; "no" on all but its last one."""
    worth: float | None = None
    """Reward in a tree that has already compared the act with its siblings: credit transforms applied to what
    was known then, plus what the critic expected after it. None: the reward is the sum of `credit`.
    """
    later: float | None = None
    """Earnings of its chain after a tree had scored it. None: unknown, because the candidate was not
    continued.
    """
    value: ValueSummary | None = None
    env_id: str = ""


class Signal(NamedTuple):
    """Message to the group about one trained decision. (A named tuple: 100,000 are made in one step.)

    The advantage of token i is `(a_i - shift) * scale`. Here a_i is `advantage`, the same for every token, or,
    if `tail` is given instead, `local_i + decay^(n-i) * tail`.
    """

    id: DecisionId
    advantage: float | None
    tail: float | None = None
    shift: float = 0.0
    scale: float = 1.0
    weight: float = 1.0
    """Weight of this decision in the loss."""
    unit: str = ""
    """Name of the decision's unit, which is never split over mini-batches. Empty: the decision alone."""
    target: float | None = None
    """Target of the critic at the decision's tokens, with `advantage`. With `tail` the targets are a_i + V_i.
    """
    after: float | None = None
    """Target of the critic after the decision. None: it is not trained there."""

    @property
    def still(self) -> bool:
        """Tell whether the advantage of every token is 0."""
        return self.advantage == 0 and self.shift == 0


class Table:
    """Decisions as columns. Rows are sorted by id, so no result depends on the order of arrival."""

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self.rows: tuple[Decision, ...] = tuple(sorted(decisions, key=attrgetter("id")))
        self.ids: list[DecisionId] = [row.id for row in self.rows]
        self._reward: Floats | None = None
        self._cache: dict[object, Any] = {}
        if len(set(self.ids)) < len(self.rows):
            twice = next(a for a, b in zip(self.ids, self.ids[1:], strict=False) if a == b)
            raise ValueError(f"decision {twice!r} occurs twice in the table: an episode was sealed twice")

    def __len__(self) -> int:
        return len(self.rows)

    def with_reward(self, reward: Floats) -> Table:
        """Return the same rows with other rewards (see credit.py). Cached columns are shared."""
        if reward.shape != (len(self),):
            raise ValueError(f"{len(self)} decisions need {len(self)} rewards, got shape {reward.shape}")
        if not np.isfinite(reward).all():
            bad = self.ids[int(np.flatnonzero(~np.isfinite(reward))[0])]
            raise ValueError(f"the reward of decision {bad!r} is not a finite number")
        other = copy(self)
        other._reward = reward
        return other

    @property
    def reward(self) -> Floats:
        """Reward of each decision: the sum of its credits, or its worth in a tree, or what `with_reward` set."""
        if self._reward is None:
            totals = (sum(row.credit.values()) if row.worth is None else row.worth for row in self.rows)
            self._reward = np.fromiter(totals, np.float64, len(self))
        return self._reward

    def component(self, name: str) -> Floats:
        """Credit of one component per decision; 0 where a decision has none."""
        amounts = (row.credit.get(name, 0.0) for row in self.rows)
        return np.fromiter(amounts, np.float64, len(self))

    @property
    def components(self) -> list[str]:
        """Names of all reward components that a decision has."""
        return sorted({name for row in self.rows for name in row.credit})

    def numbers(self, column: str) -> Floats:
        """Numeric column (`n_tokens`, `turn`, `version` …)."""
        if ("numbers", column) not in self._cache:
            cells = map(attrgetter(column), self.rows)
            self._cache["numbers", column] = np.fromiter(cells, np.float64, len(self))
        values: Floats = self._cache["numbers", column]
        return values

    def codes(self, *columns: str) -> Ints:
        """Number the groups of rows that agree in all of `columns`: each row's group, as 0 … G-1.

        `task` means (environment, task): two environments may both have a task "1". A row without an anchor, a
        prompt hash or a sibling set stands alone under that column, because nothing says that it equals another.
        """
        if columns not in self._cache:
            code = np.zeros(len(self), np.int64)
            for column in columns:
                code = _merged(code, self._column_codes(column))
            self._cache[columns] = code
        numbered: Ints = self._cache[columns]
        return numbered

    def _column_codes(self, column: str) -> Ints:
        if ("codes", column) not in self._cache:
            seen: dict[object, int] = {}
            cells = (seen.setdefault(cell, len(seen)) for cell in self._cells(column))
            self._cache["codes", column] = np.fromiter(cells, np.int64, len(self))
        codes: Ints = self._cache["codes", column]
        return codes

    def _cells(self, column: str) -> Iterable[object]:
        if column == "task":
            return map(attrgetter("env_id", "task"), self.rows)
        cells = map(attrgetter(column), self.rows)
        if column in ("anchor", "prompt_hash", "sibling_set"):
            return (name or ("alone", i) for i, name in enumerate(cells))
        return cells

    def mine(self, policy: str) -> Ints:
        """Return the rows that this policy sampled and may train on."""
        return np.array([i for i, r in enumerate(self.rows) if r.trainable and r.policy == policy], np.int64)

    @property
    def index(self) -> dict[DecisionId, int]:
        """Map from decision id to row."""
        if "index" not in self._cache:
            self._cache["index"] = {name: i for i, name in enumerate(self.ids)}
        rows: dict[DecisionId, int] = self._cache["index"]
        return rows

    @property
    def following(self) -> Ints:
        """Row of the next decision in the chain, or -1 on its last decision. Broken chains are refused here."""
        if "following" not in self._cache:
            self._cache["following"] = self._follow()
        rows: Ints = self._cache["following"]
        return rows

    def _follow(self) -> Ints:
        chain, order = self.codes("chain"), self.numbers("order")
        by_chain = np.lexsort((order, chain))
        first, second = by_chain[:-1], by_chain[1:]
        together = chain[first] == chain[second]
        twice = together & (order[first] == order[second])
        if twice.any():
            row = self.rows[int(first[int(np.flatnonzero(twice)[0])])]
            raise ValueError(
                f"chain {row.chain!r} has two decisions at position {row.order}: give branches their own"
            )
        following = np.full(len(self), -1, np.int64)
        following[first[together]] = second[together]
        open_end = np.fromiter((row.ended == "no" for row in self.rows), np.bool_, len(self))
        wrong = np.flatnonzero(open_end != (following >= 0))
        if len(wrong):
            row = self.rows[int(wrong[0])]
            raise ValueError(
                f"decision {row.id!r} says ended={row.ended!r}, but it is {'not ' if row.ended != 'no' else ''}"
                f'the last of chain {row.chain!r}: "terminal" or "truncated" belongs on the last, and only there'
            )
        return following

    @property
    def backwards(self) -> list[int]:
        """All rows, each after the next one of its chain: the order in which returns accumulate."""
        if "backwards" not in self._cache:
            self._cache["backwards"] = np.argsort(-self.numbers("order"), kind="stable").tolist()
        rows: list[int] = self._cache["backwards"]
        return rows


def _merged(left: Ints, right: Ints) -> Ints:
    """Number each pair of codes that occurs, from 0."""
    if not len(left):
        return left
    pair = left * (int(right.max()) + 1) + right
    merged: Ints = np.unique(pair, return_inverse=True)[1].reshape(-1)
    return merged


def total(code: Ints, x: Floats) -> Floats:
    """Sum x over all rows of the same code, for each row."""
    sums: Floats = np.bincount(code, x).astype(np.float64)
    totals: Floats = sums[code]
    return totals


def make_signals(
    table: Table,
    mine: Ints,
    *,
    advantage: Floats | None = None,
    tail: Floats | None = None,
    shift: Floats | None = None,
    scale: Floats | None = None,
    weight: Floats | None = None,
    target: Floats | None = None,
    unit: Sequence[str] | None = None,
) -> list[Signal]:
    """Make signals of the rows `mine`, from columns over the whole table."""

    def column(values: Floats | None, otherwise: float | None) -> Iterable[float | None]:
        return repeat(otherwise) if values is None else values[mine].tolist()

    rows = mine.tolist()
    columns = (
        [table.ids[i] for i in rows],
        column(advantage, None),
        column(tail, None),
        column(shift, 0.0),
        column(scale, 1.0),
        column(weight, 1.0),
        repeat("") if unit is None else [unit[i] for i in rows],
        column(target, None),
    )
    with _no_collection():
        return list(map(Signal, *columns))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: 100,000 new objects trigger collections of the whole heap, which take longer
    than making them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
