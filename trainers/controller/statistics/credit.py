"""Credit transforms: rules that turn the credits of the ledger into the reward of each decision.

A transform is a small rule `(table, reward) -> reward` over whole columns. A role has a list of them, applied in order.
They change only the rows of that role:

    credit = credit_from_config({"planner": [{"name": "mix", "team": ["outcome"], "alpha": 0.7}], "*": []})
    table = apply_credit(table, credit)              # before any algorithm sees it

`counterfactual` and the potentials need numbers from outside of the table (forks, the environment). They come as
plain mappings from decision id to number, so no transform generates or replays anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np

from ....agents.answers import DecisionId
from ....agents.basics.hints import nearest
from ....agents.basics.json_types import JsonObject, JsonView
from ....agents.roles import entry_of
from ....rewards.shaping import INFLUENCE_ALPHA, INFLUENCE_KIND, InfluenceKind, influence
from ...config.choices import Amount, Settings, Share
from ...config.reader import build
from .table import Floats, Table, total

if TYPE_CHECKING:
    from ....envs.core.trace import Trace

Transform = Callable[[Table, Floats], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(Settings):
    """Sum alpha * team + beta * local. `team` names the components of the team's reward; all others are
    local.
    """

    team: tuple[str, ...]
    alpha: Amount = 1.0
    """Weight of the team's reward. Usual 0.5–1 (AT-GRPO: 1)."""
    beta: Amount = 1.0
    """Weight of the act's own reward."""

    def __call__(self, table: Table, reward: Floats) -> Floats:
        team = sum((table.component(name) for name in self.team), np.zeros(len(table)))
        return self.alpha * team + self.beta * (reward - team)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Settings):
    """Give every act the episode's total of one component, wherever in the episode it was booked."""

    component: str
    share: Literal["full", "split"] = "full"
    """Share of each act. "full": each act gets all of it. "split": it is divided among the acts of the
    episode.
    """

    def __call__(self, table: Table, reward: Floats) -> Floats:
        own = table.component(self.component)
        episode = table.codes("task", "episode")
        everything = total(episode, own)
        if self.share == "split":
            everything = everything / np.bincount(episode)[episode]
        spread: Floats = reward - own + everything
        return spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping(Settings):
    """Potential-based shaping along a chain: + scale * (gamma * potential after - potential before).

    The potential of the state before an act is read from a component of the ledger, which then no longer counts as
    reward. The potential after a chain's last act is 0, so the best policy stays the best (Ng, Harada, Russell 1999).
    Where gamma < 1, potentials must not be negative: going round in circles at a negative potential would pay
    (gamma - 1) * potential > 0 for every step.
    """

    component: str = "potential"
    gamma: Share = 1.0
    """Discount per act, as in the algorithm."""
    scale: Amount = 1.0
    """Factor on the shaping. Usual 0.1–1."""

    def __call__(self, table: Table, reward: Floats) -> Floats:
        potential = table.component(self.component)
        return reward - potential + self.scale * shaping(table, potential, self.gamma)


def shaping(table: Table, potential: Floats, gamma: float) -> Floats:
    """Compute gamma * potential of the next act's state - potential of this one's; 0 after the last act."""
    lowest = float(potential.min(initial=0.0))
    if gamma < 1.0 and lowest < 0.0:
        raise ValueError(
            f"potential {lowest:g} with gamma={gamma:g}: a negative potential pays for going round in circles. "
            f"Add {-lowest:g} to all potentials, or set gamma=1"
        )
    after = np.where(table.following >= 0, potential[table.following], 0.0)
    change: Floats = gamma * after - potential
    return change


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceCredit(Settings):
    """Reward for making the team better than it was (MARTI, after MAPoRL): + alpha * delta.

    Delta is the `influence` of rewards/shaping.py. Q is the mean correctness of all acts of the episode's earlier turns (any
    agent's), R this act's. Nothing is added in the first turn.
    """

    component: str
    """Name of the component that holds the correctness of an act, in 0 … 1."""
    kind: InfluenceKind = INFLUENCE_KIND
    alpha: Amount = INFLUENCE_ALPHA
    """Factor on delta. Usual 0.5."""
    outcome: Amount = 0.0
    """Factor (beta) on the episode's mean correctness in its last turn, which is also added. Usual 0 or 0.5."""

    def __call__(self, table: Table, reward: Floats) -> Floats:
        correct, turn = table.component(self.component), table.numbers("turn")
        episode = table.codes("task", "episode")
        before, final = np.full(len(table), np.nan), np.zeros(len(table))
        by_turn = np.lexsort((turn, episode))
        for rows in np.split(by_turn, np.flatnonzero(np.diff(episode[by_turn])) + 1) if len(table) else []:
            starts = np.searchsorted(turn[rows], turn[rows], "left")  # acts in earlier turns
            sums = np.append(0.0, np.cumsum(correct[rows]))[starts]
            before[rows] = np.divide(sums, starts, out=np.full(len(rows), np.nan), where=starts > 0)
            final[rows] = correct[rows[turn[rows] == turn[rows[-1]]]].mean()
        delta = influence(correct, before, self.kind)
        shaped: Floats = reward + self.alpha * np.nan_to_num(delta, nan=0.0) + self.outcome * final
        return shaped


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCredit(Settings):
    """Comparison of an act with its parents and its siblings: + scale * (r - [(1 - lam) * parents + lam * siblings]).

    `parents` is the mean reward of the decisions whose words the act was shown. `siblings` is the mean of the *other*
    candidates from its state. (MARTI intends this shaping, but never writes the index of parents.) Where an act has only
    one of the two, that one is the whole baseline; with neither nothing is added.
    """

    scale: Amount = 1.0
    lam: Share = 0.5
    """Weight of the siblings. 0: the act should improve on its parents; 1: it should be better than its
    siblings.
    """

    def __call__(self, table: Table, reward: Floats) -> Floats:
        parents, siblings = parent_mean(table, reward), sibling_mean(table, reward)
        both = (1.0 - self.lam) * parents + self.lam * siblings
        baseline = np.where(np.isnan(parents), siblings, np.where(np.isnan(siblings), parents, both))
        shaped: Floats = reward + self.scale * np.nan_to_num(reward - baseline, nan=0.0)
        return shaped


def parent_mean(table: Table, reward: Floats) -> Floats:
    """Mean reward of the decisions among an act's parents; NaN without any (a parent may be a tool's node)."""
    where = {(row.env_id, row.episode, row.node): i for i, row in enumerate(table.rows)}
    means = np.full(len(table), np.nan)
    for i, row in enumerate(table.rows):
        rows = [where[key] for p in row.parents if (key := (row.env_id, row.episode, p)) in where]
        if rows:
            means[i] = reward[rows].mean()
    return means


def sibling_mean(table: Table, reward: Floats) -> Floats:
    """Mean reward of the other decisions of the sibling set; NaN without any."""
    code = table.codes("task", "agent", "sibling_set")
    size = np.bincount(code)[code]
    rest = total(code, reward) - reward
    means = np.full(len(table), np.nan)
    np.divide(rest, size - 1, out=means, where=size > 1)
    return means


def counterfactual(
    table: Table, score: Mapping[DecisionId, float], without: Mapping[DecisionId, float], scale: float = 1.0
) -> Floats:
    """Replace the reward of each act by scale * (score as played - score without the act).

    `score` and `without` map decision ids to numbers: the score of the episode as played, and the mean score of
    forks in which this act was drawn anew (`fork(at=node)`) or replaced by a default (`replay(substitute=…)`).
    Decisions that were not forked keep their reward.
    """
    missing = sorted(set(without) - set(score))
    if missing:
        raise ValueError(f"decision {missing[0]!r} has a counterfactual score but no score as played")
    rewards = table.reward.copy()
    for name, otherwise in without.items():
        if name not in table.index:
            raise ValueError(
                f"counterfactual for {name!r}, which is not in the table: was its episode sealed?"
            )
        rewards[table.index[name]] = scale * (score[name] - otherwise)
    return rewards


CREDIT: dict[str, type] = {
    "mix": Mix,
    "spread": Spread,
    "shaping": Shaping,
    "influence": InfluenceCredit,
    "tree": TreeCredit,
}


def credit_from_config(config: Mapping[str, Sequence[JsonView]]) -> dict[str, tuple[Transform, ...]]:
    """Read the transforms of each role (or "*") from plain config: a list of {name: …, and the fields of that
    transform}.
    """
    transforms: dict[str, tuple[Transform, ...]] = {}
    for role, entries in config.items():
        if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ValueError(
                f"credit.{role}: got {entries!r:.60}; give a list of transforms, such as [{{name: mix, team: [outcome], alpha: 0.5}}]"
            )
        transforms[role] = tuple(_transform(role, dict(entry)) for entry in entries)
    return transforms


def _transform(role: str, entry: JsonObject) -> Transform:
    name = entry.pop("name", None)
    if name not in CREDIT:
        raise ValueError(f"credit.{role}: unknown transform {name!r}: {nearest(str(name), CREDIT)}")
    cls = CREDIT[name]
    names = [field.name for field in fields(cls)]
    for key in entry:
        if key not in names:
            raise ValueError(f"credit.{role}: {name!r} has no key {key!r}: {nearest(key, names)}")
    for field in fields(cls):
        if field.default is MISSING and field.name not in entry:
            raise ValueError(f"credit.{role}: {name!r} needs {field.name!r}")
    made: Transform = build(cls, entry, f"credit.{role}")
    return made


def unearned(table: Table, credit: Mapping[str, Sequence[Transform]]) -> str | None:
    """A sentence if a transform names a component that no decision of the table has earned. Else None."""
    earned = sorted({component for row in table.rows for component in row.credit})
    for role, transforms in credit.items():
        for transform in transforms:
            for name in getattr(transform, "team", None) or [getattr(transform, "component", "")]:
                if name and name not in earned:
                    kind = next(kind for kind, cls in CREDIT.items() if isinstance(transform, cls))
                    return (
                        f"{role}.{kind} names {name!r}, which no decision has earned; {nearest(name, earned)}"
                    )
    return None


def late_rewards(table: Table, traces: Iterable[Trace]) -> dict[str, list[str]]:
    """Return, by role, the components that a tree's candidates never had when they were compared, though episodes paid them."""
    at_once: dict[str, set[str]] = {}
    for row in table.rows:
        if row.sibling_set and row.trainable:
            at_once.setdefault(row.role, set()).update(name for name, amount in row.credit.items() if amount)
    paid: dict[str, set[str]] = {role: set() for role in at_once}
    for trace in traces:
        roles = {node.id: node.role for node in trace.acts()}
        for credit in trace.credits:
            if credit.amount and (role := roles.get(credit.node)) in paid:
                paid[role].add(credit.component)
    return {role: sorted(paid[role] - known) for role, known in at_once.items() if paid[role] - known}


def apply_credit(table: Table, credit: Mapping[str, Sequence[Transform]], roles: Sequence[str] = ()) -> Table:
    """Return the table with each role's rewards transformed by its own list, or by that of "*".

    `roles` are all roles that may stand in `credit`. Given, a misspelt role is an error. The table alone cannot tell,
    because a role may act in no decision of a step.
    """
    for role in credit:
        if roles and role not in ("*", *roles):
            raise ValueError(f"credit is set for role {role!r}: {nearest(role, roles)}")
    acted = np.array([row.role for row in table.rows])
    changed = table.reward.copy()
    for role in sorted(set(acted.tolist())):
        reward = table.reward
        for transform in entry_of(credit, role) or ():
            reward = transform(table, reward)
        changed[acted == role] = reward[acted == role]
    for i, row in enumerate(table.rows):
        if row.worth is not None:  # already transformed when its tree compared it
            changed[i] = row.worth
    return table.with_reward(changed)
