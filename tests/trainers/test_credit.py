"""Credit transforms against plain loops, and the proof that shaping pays for no cycle."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas import Outcome, Role, Workflow, rollout
from unitymas.envs.core.arena import Arena
from unitymas.envs.core.tasks import DataSet
from unitymas.trainers.controller.statistics.credit import (
    InfluenceCredit,
    Mix,
    Shaping,
    Spread,
    TreeCredit,
    apply_credit,
    counterfactual,
    credit_from_config,
    shaping,
)
from unitymas.trainers.controller.statistics.decisions import credits_by_node, shuffled_credits
from unitymas.trainers.controller.statistics.table import Decision, Table

UNHURRIED = settings(deadline=None, max_examples=25)
SEEDS = st.integers(0, 2**20)


def earned(row: Decision) -> float:
    return sum(row.credit.values())


@UNHURRIED
@given(seed=SEEDS, alpha=st.sampled_from([0.0, 0.7, 1.0]), beta=st.sampled_from([0.0, 1.0]))
def test_mix_and_spread(ragged: Callable[..., Any], seed: int, alpha: float, beta: float) -> None:
    table = Table(ragged(seed).rows)
    mixed = Mix(team=("outcome",), alpha=alpha, beta=beta)(table, table.reward)
    full = Spread(component="outcome")(table, table.reward)
    split = Spread(component="outcome", share="split")(table, table.reward)
    for i, row in enumerate(table.rows):
        assert mixed[i] == pytest.approx(alpha * row.credit["outcome"] + beta * row.credit["format"])
        team = [r.credit["outcome"] for r in table.rows if r.episode == row.episode]
        assert full[i] == pytest.approx(row.credit["format"] + sum(team))
        assert split[i] == pytest.approx(row.credit["format"] + sum(team) / len(team))


@UNHURRIED
@given(seed=SEEDS, lam=st.sampled_from([0.0, 0.3, 1.0]))
def test_tree_credit_reads_parents_and_siblings(ragged: Callable[..., Any], seed: int, lam: float) -> None:
    table = Table(ragged(seed).rows)
    found = TreeCredit(scale=0.5, lam=lam)(table, table.reward)
    for i, row in enumerate(table.rows):
        parents = [earned(r) for r in table.rows if r.episode == row.episode and r.node in row.parents]
        siblings = [
            earned(r)
            for r in table.rows
            if row.sibling_set and r.sibling_set == row.sibling_set and r.id != row.id
        ]
        baseline = None
        if parents and siblings:
            baseline = (1 - lam) * sum(parents) / len(parents) + lam * sum(siblings) / len(siblings)
        elif parents or siblings:
            both = parents + siblings
            baseline = sum(both) / len(both)
        expected = earned(row) + (0.5 * (earned(row) - baseline) if baseline is not None else 0.0)
        assert found[i] == pytest.approx(expected, abs=1e-6)


@UNHURRIED
@given(seed=SEEDS, kind=st.sampled_from(["quality", "margin"]))
def test_influence(ragged: Callable[..., Any], seed: int, kind: Any) -> None:
    table = Table(ragged(seed).rows)
    found = InfluenceCredit(component="outcome", kind=kind, alpha=0.5, outcome=0.25)(table, table.reward)
    for i, row in enumerate(table.rows):
        rows = [r for r in table.rows if r.episode == row.episode]
        earlier = [r.credit["outcome"] for r in rows if r.turn < row.turn]
        correct, delta = row.credit["outcome"], 0.0
        if earlier:
            q = sum(earlier) / len(earlier)
            delta = correct - q if kind == "margin" else q * correct - (1 - q) * (1 - correct)
        last = [r.credit["outcome"] for r in rows if r.turn == max(r.turn for r in rows)]
        assert found[i] == pytest.approx(earned(row) + 0.5 * delta + 0.25 * sum(last) / len(last), abs=1e-6)


# -- shaping ------------------------------------------------------------------------------------------------------


def path(potentials: tuple[float, ...]) -> Table:
    """One chain that visits states of these potentials."""
    return Table(
        Decision(
            id=f"e/{i}", task="t", episode="e", node=str(i), role="r", agent="r", chain="c", policy="p", n_tokens=1,
            order=i, credit={"potential": v}, ended="terminal" if i == len(potentials) - 1 else "no",
        )
        for i, v in enumerate(potentials)
    )  # fmt: skip


@pytest.mark.parametrize("gamma", [0.5, 0.99, 1.0])
def test_no_cycle_pays(gamma: float) -> None:
    """Every cycle of up to five steps through four states, as an agent that then stops would walk it: the shaping
    that was collected when a state is met again, discounted or not, is never positive.
    """
    for length in range(1, 6):
        for cycle in itertools.product([0.0, 0.5, 1.0, 3.0], repeat=length):
            potential = np.array([*cycle, cycle[0]])
            paid = shaping(path((*cycle, cycle[0])), potential, gamma)[:length]
            assert paid.sum() <= 1e-12
            assert (paid * gamma ** np.arange(length)).sum() <= 1e-12


def test_shaping_telescopes_to_the_start() -> None:
    """So that which policy is best does not change: the whole chain collects minus its first potential."""
    table = path((2.0, 0.5, 3.0))
    found = Shaping(gamma=0.9, scale=0.5)(table, table.reward)
    assert (found * 0.9 ** np.arange(3)).sum() == pytest.approx(-0.5 * 2.0)


def test_a_negative_potential_would_pay_for_standing_still() -> None:
    with pytest.raises(ValueError, match="Add 18 to all potentials, or set gamma=1"):
        shaping(path((-18.0, 0.0)), np.array([-18.0, 0.0]), 0.99)
    assert shaping(path((-18.0, -18.0)), np.array([-18.0, -18.0]), 1.0).tolist() == [0.0, 18.0]


# -- counterfactuals and config -----------------------------------------------------------------------------------


def test_counterfactual() -> None:
    table = path((1.0, 2.0, 3.0))
    found = counterfactual(table, {"e/1": 1.0}, {"e/1": 0.25}, scale=2.0)
    assert found.tolist() == [1.0, 1.5, 3.0]
    with pytest.raises(ValueError, match="'e/9', which is not in the table"):
        counterfactual(table, {"e/9": 1.0}, {"e/9": 0.0})
    with pytest.raises(ValueError, match="'e/1' has a counterfactual score but no score as played"):
        counterfactual(table, {}, {"e/1": 0.0})


@UNHURRIED
@given(seed=SEEDS)
def test_each_role_has_its_own_list(ragged: Callable[..., Any], seed: int) -> None:
    table = Table(ragged(seed).rows)
    credit = credit_from_config(
        {"planner": [{"name": "mix", "team": ["outcome"], "alpha": 0.5, "beta": 0.0}], "*": []}
    )
    found = apply_credit(table, credit)
    for row, reward in zip(found.rows, found.reward, strict=True):
        expected = 0.5 * row.credit["outcome"] if row.role == "planner" else earned(row)
        assert reward == pytest.approx(expected)


def test_config_mistakes_are_answered(ragged: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"credit.planner: unknown transform 'mixx': did you mean 'mix'\?"):
        credit_from_config({"planner": [{"name": "mixx"}]})
    with pytest.raises(ValueError, match=r"'mix' has no key 'alfa': did you mean 'alpha'\?"):
        credit_from_config({"planner": [{"name": "mix", "alfa": 1.0}]})
    with pytest.raises(ValueError, match=r"credit.planner: 'mix' needs 'team'"):
        credit_from_config({"planner": [{"name": "mix"}]})
    table = Table(ragged(1).rows)
    with pytest.raises(ValueError, match=r"credit is set for role 'plannr': did you mean 'planner'\?"):
        apply_credit(table, credit_from_config({"plannr": []}), roles=["planner", "worker"])


class Rally(Workflow):
    """One agent, asked one to four times; an episode's length is its task's number."""

    roles = (Role("player"),)

    async def run(self, ep: Any) -> Outcome:
        for _ in range(int(ep.task.question)):
            await ep.act("player", "go on?")
        return Outcome(answer="", moves=ep.task.question)


class EachActPays:
    """Every act earns something, so longer episodes earn more."""

    name = "pay"

    def on_node(self, trace: Any, node: Any, task: Any) -> Any:
        yield node.id, "pay", 1.0 + 0.1 * len(trace.acts())
        if node.turn == 0:
            yield node.id, "bonus", float(task.id)


def test_a_control_rewards_no_length() -> None:
    """After the exchange nothing is to be had by one more turn: an agent's credits at each turn add up to nothing."""
    rows = [{"id": str(i), "question": str(1 + i % 4), "answers": [""]} for i in range(24)]
    arena = Arena(Rally(), DataSet("d", "train", rows, "f"), rules=[EachActPays()])
    played = rollout(arena, {"*": lambda agent, messages: "on"}, tasks=24)
    before = [credits_by_node(trace) for trace in played]
    assert sorted(map(len, before)) == [1 + i // 6 for i in range(24)]
    shuffled_credits(played, seed=3)
    at: dict[tuple[int, str], list[float]] = {}
    for trace, old in zip(played, before, strict=True):
        now = credits_by_node(trace)
        assert set(now) == set(old)
        for turn, node in enumerate(trace.acts()):
            for component, amount in now[node.id].items():
                at.setdefault((turn, component), []).append(amount)
    assert set(at) == {(0, "bonus"), *((turn, "pay") for turn in range(4))}
    assert all(sum(amounts) == pytest.approx(0.0, abs=1e-9) for amounts in at.values())
    assert sorted(at[0, "bonus"]) == pytest.approx([i - 11.5 for i in range(24)])  # exchanged, none lost
    assert at[0, "bonus"] != [float(trace.task_id) - 11.5 for trace in played]
