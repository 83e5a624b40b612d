"""Generalised advantage estimation along chains of decisions, and whitening per role.

The tokens of a chain lie in several decisions, perhaps in several model groups. Token-level GAE does not need them in
one place. Write V_1 … V_n for a decision's values, r for its reward (on its last token), a prime for the next
decision in the chain, and decay = gamma * lam. Then, exactly,

    A_i  = local_i + decay^(n-i) * tail
    tail = r + gamma * V'_1 + decay * A'_1            at the chain's end: r

A chain ends where its episode ends, and all its rewards are booked by then. This is so for a workflow that came to its
end and for a budget that ran out. Nothing is left to expect, so no critic is asked there: an episode that was cut off
is worth what the ledger says, as any other failure is. An act that no critic judged (of a frozen player, or a forced
reply) is no step of its own: its reward counts for the act before it, and what follows it follows that act.

`local_i` is computed where the values are (`local_advantages`). A `ValueSummary` of it crosses to the controller,
which computes the tails (`tails`). One tail per decision goes back (`token_advantages`). Means and variances over all
tokens of a role are exact from the same few numbers (`moments`).

Shapes: `T` tokens of all decisions, flat; `S` decisions. Columns of the table have one entry per row.

Generalised advantage estimation: Schulman et al., 1506.02438.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .table import Floats, Ints, Table, ValueSummary

Horizon = Literal["chain", "act"]


# -- in the controller: from summaries to one number per decision -------------------------------------------------


def check_values(table: Table, mine: Ints) -> None:
    """Check that every row of `mine` has a value summary. The error names the first row that has none."""
    for i in mine.tolist():
        row = table.rows[i]
        if row.value is None:
            raise ValueError(
                f"decision {row.id!r} (role {row.role!r}, policy {row.policy!r}) has no values: "
                f"its policy needs a critic, and the critic must have seen it before advantages are computed"
            )


def summaries(table: Table, mine: Ints) -> list[ValueSummary]:
    """Return every row's value summary; zeros for rows that no critic judged. None of those may be in `mine`."""
    check_values(table, mine)
    return [row.value or ValueSummary(0.0, 0.0, row.n_tokens, 0.0, 0.0, 0.0) for row in table.rows]


def tails(
    table: Table, mine: Ints, gamma: float = 1.0, lam: float = 1.0, horizon: Horizon = "chain"
) -> Floats:
    """Compute each decision's tail: what its tokens get from its reward and from the rest of its chain.

    `horizon="act"` ends every act as if it were the last: rewards then never flow back to earlier acts.
    """
    if horizon == "act":
        return table.reward.copy()
    check_values(table, mine)
    return _composed(table, gamma, lam, lambda value: (value.n, value.local_first))


def turn_level(
    table: Table, mine: Ints, gamma: float = 1.0, lam: float = 1.0, horizon: Horizon = "chain"
) -> tuple[Floats, Floats]:
    """GAE whose steps are acts. V is the value before an act's first token. Return advantages and critic
    targets.
    """
    first = np.array([value.first for value in summaries(table, mine)], np.float64)
    target = table.reward.copy()
    if horizon == "chain":
        target = _composed(table, gamma, lam, lambda value: (1, -value.first))
    return target - first, target


def _composed(
    table: Table, gamma: float, lam: float, step: Callable[[ValueSummary], tuple[int, float]]
) -> Floats:
    """Compute tails along the chains. `step` gives the number of a judged decision's tokens that count, and
    `local_1`.
    """
    # lists, because one row at a time is faster to read from a list than from an array
    tail, following, decay = table.reward.tolist(), table.following.tolist(), gamma * lam
    passed = [0.0] * len(tail)  # what each act passes to the act before it
    for row in table.backwards:
        if following[row] >= 0:
            tail[row] += passed[following[row]]
        value = table.rows[row].value
        if value is None:
            passed[row] = tail[row]
        else:
            n, local = step(value)
            # gamma * V_1 + decay * A_1, where A_1 = local_1 + decay^(n-1) * tail
            passed[row] = gamma * value.first + decay * (local + decay ** (n - 1) * tail[row])
    return np.array(tail, np.float64)


class Moments(NamedTuple):
    """Count, sum and sum of squares of a decision's token advantages, one entry per row of the table."""

    n: Floats
    total: Floats
    squares: Floats


def moments(table: Table, mine: Ints, tail: Floats, decay: float) -> Moments:
    """Moments of A_i = local_i + decay^(n-i) * tail, from the summaries alone."""
    values = summaries(table, mine)
    n, local, local2, cross = (
        np.fromiter(map(attrgetter(name), values), np.float64, len(values))
        for name in ("n", "sum_local", "sum_local2", "sum_local_decay")
    )
    # sums over i of decay^(n-i) and of its square; the square of A_i expands into three such sums
    powers, powers2 = _geometric(decay, n), _geometric(decay**2, n)
    return Moments(n, local + tail * powers, local2 + 2.0 * tail * cross + tail**2 * powers2)


def flat_moments(table: Table, advantage: Floats) -> Moments:
    """Moments of an advantage that is the same for all tokens of a decision."""
    n = table.numbers("n_tokens")
    return Moments(n, n * advantage, n * advantage**2)


def _geometric(ratio: float, n: Floats) -> Floats:
    """Sum 1 + ratio + … + ratio^(n-1)."""
    if abs(1.0 - ratio) < 1e-12:
        return n
    # expm1 keeps its digits where ratio is near 1; at ratio 0 only the last term (1) is left
    sums: Floats = -np.expm1(n * np.log(ratio)) / (1.0 - ratio) if ratio > 0 else np.minimum(n, 1.0)
    return sums


def whiten(
    table: Table, rows: Ints, of: Moments, per: str = "role", floor: float = 0.1
) -> tuple[Floats, Floats]:
    """Compute the shift and scale that give the tokens of `rows` mean 0 and deviation 1, within each `per` (a column).

    Statistics are per role by default, so a role with large rewards does not hide one with small ones. `floor` is the
    smallest deviation to divide by. Without it, a role that has nothing left to learn gets amplified noise. Rows outside
    of `rows` keep shift 0 and scale 1.
    """
    shift, scale = np.zeros(len(table)), np.ones(len(table))
    if not len(rows):
        return shift, scale
    code = np.unique(table.codes(per)[rows], return_inverse=True)[1].reshape(-1)  # 0 … groups-1
    n, total = of.n[rows], of.total[rows]
    count = np.maximum(np.bincount(code, n), 1.0)
    mean = np.bincount(code, total) / count
    # variance = within decisions + between them: no difference of two large sums over the whole role
    own = total / np.maximum(n, 1.0)
    within = np.maximum(of.squares[rows] - n * own**2, 0.0)
    variance = np.bincount(code, within + n * (own - mean[code]) ** 2) / count
    shift[rows] = mean[code]
    scale[rows] = (1.0 / np.maximum(np.sqrt(variance), floor))[code]
    return shift, scale


# -- in the group: from values to summaries, from tails to advantages ---------------------------------------------


def local_advantages(
    values: npt.ArrayLike,
    lengths: npt.ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    rewards: npt.ArrayLike | None = None,
) -> Floats:
    """Compute `local_i` of every token of many decisions, flat: GAE as if all after a decision were worth 0.

    `values` (T,) in order of decisions, `lengths` (S,), `rewards` (T,) per token (the KL penalty) or None.
    """
    v, n = np.asarray(values, np.float64), np.asarray(lengths, np.int64)
    ends = np.cumsum(n)  # (S,): index after each decision's last token
    following = np.append(v[1:], 0.0)  # (T,): the value after each token …
    following[ends - 1] = 0.0  # … and 0 after a decision's last one
    advantages: Floats = gamma * following - v
    if rewards is not None:
        advantages = advantages + np.asarray(rewards, np.float64)
    for back in range(1, int(n.max(initial=0))):  # one vector operation for each distance from the end
        token = ends[n > back] - 1 - back
        advantages[token] += gamma * lam * advantages[token + 1]
    return advantages


def _decays(lengths: Ints, decay: float) -> Floats:
    """Power decay^(n-i) for every token: (T,)."""
    to_end = np.repeat(np.cumsum(lengths), lengths) - 1 - np.arange(int(lengths.sum()))
    decays: Floats = decay ** to_end.astype(np.float64)
    return decays


def summarise(
    values: npt.ArrayLike,
    lengths: npt.ArrayLike,
    after: npt.ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    rewards: npt.ArrayLike | None = None,
) -> list[ValueSummary]:
    """Make one summary per decision. `after` (S,) is the value after the last token. Every decision has a
    token.
    """
    n = np.asarray(lengths, np.int64)
    if (n < 1).any():
        raise ValueError(f"decision number {int(np.argmin(n))} has no tokens, so it has no value summary")
    local = local_advantages(values, n, gamma, lam, rewards)
    starts = np.cumsum(n) - n  # (S,): index of each decision's first token
    sums = [
        np.add.reduceat(x, starts).tolist() if len(n) else []
        for x in (local, local**2, local * _decays(n, gamma * lam))
    ]
    first = np.asarray(values, np.float64)[starts].tolist()
    last = np.asarray(after, np.float64).tolist()
    return list(map(ValueSummary, first, local[starts].tolist(), n.tolist(), *sums, last))


def token_advantages(
    local: Floats, lengths: npt.ArrayLike, tail: npt.ArrayLike, gamma: float = 1.0, lam: float = 1.0
) -> Floats:
    """Compute A_i of every token (T,), before shift and scale. A_i + V_i is the target of the critic."""
    n = np.asarray(lengths, np.int64)
    advantages: Floats = local + _decays(n, gamma * lam) * np.repeat(np.asarray(tail, np.float64), n)
    return advantages
