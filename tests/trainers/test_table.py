"""The thin table and its groups: explicit ids, nothing depends on order, and what is compared with nothing is 0."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.controller.statistics.comparison import (
    GROUPS,
    partition,
    report,
    returns,
    scores,
    starved,
    zero_shares,
)
from unitymas.trainers.controller.statistics.decisions import prompt_hash
from unitymas.trainers.controller.statistics.table import Decision, Signal, Table

UNHURRIED = settings(deadline=None, max_examples=20)
SEEDS = st.integers(0, 2**20)


def row(name: str, **fields: Any) -> Decision:
    episode, _, node = name.partition("/")
    base: dict[str, Any] = {
        "task": "t", "episode": episode, "node": node, "role": "solver", "agent": "solver", "chain": name,
        "policy": "p", "n_tokens": 2, "ended": "terminal",
    }  # fmt: skip
    return Decision(id=name, **{**base, **fields})


# -- the table ----------------------------------------------------------------------------------------------------


def test_rows_are_sorted_and_unique() -> None:
    table = Table([row("b/1"), row("a/1", credit={"f1": 1.0, "format": -0.25})])
    assert table.ids == ["a/1", "b/1"]
    assert table.reward.tolist() == [0.75, 0.0]
    assert table.component("f1").tolist() == [1.0, 0.0]
    assert table.components == ["f1", "format"]
    with pytest.raises(ValueError, match="'a/1' occurs twice"):
        Table([row("a/1"), row("a/1")])


def test_two_environments_may_both_have_a_task_1() -> None:
    table = Table([row("a/1", env_id="math"), row("b/1", env_id="code")])
    assert len(set(table.codes("task").tolist())) == 2


def test_without_an_anchor_nothing_says_that_two_states_are_equal() -> None:
    table = Table([row("a/1"), row("b/1"), row("c/1", anchor="s"), row("d/1", anchor="s")])
    assert partition(table, "anchor").samples.tolist() == [1.0, 1.0, 2.0]
    assert partition(table, "prompt").samples.tolist() == [1.0] * 4
    assert partition(table, "siblings").samples.tolist() == [1.0] * 4


def test_mine_is_what_the_policy_sampled_and_may_train() -> None:
    table = Table([row("a/1"), row("a/2", policy="q"), row("a/3", trainable=False)])
    assert table.mine("p").tolist() == [0]


def test_rewards_that_are_no_numbers_are_refused() -> None:
    table = Table([row("a/1"), row("a/2")])
    with pytest.raises(ValueError, match="'a/2' is not a finite number"):
        table.with_reward(np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="2 decisions need 2 rewards"):
        table.with_reward(np.zeros(3))
    assert table.with_reward(np.array([1.0, 2.0])).reward.tolist() == [1.0, 2.0]
    assert table.reward.tolist() == [0.0, 0.0]


# -- groups -------------------------------------------------------------------------------------------------------


def key(name: str, r: Decision) -> tuple[Any, ...]:
    """The group of a row, said in plain words."""
    task = (r.env_id, r.task)
    return {
        "agent": (*task, r.agent),
        "role": (*task, r.role),
        "task": task,
        "prompt": (*task, r.agent, r.prompt_hash or r.id),
        "agent-turn": (*task, r.agent, r.turn),
        "siblings": (*task, r.agent, r.sibling_set or r.id),
        "anchor": (*task, r.agent, r.anchor or r.id),
        "step": (*task, r.turn),
        "trajectory": (*task, r.episode),
        "global": (),
    }[name]


@settings(deadline=None, max_examples=12)
@given(seed=SEEDS, each=st.sampled_from(["", "trajectory", "call"]))
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_group_statistics(name: str, ragged: Callable[..., Any], seed: int, each: str) -> None:
    """Means, deviations, the others' mean and sample counts, each against a plain loop."""
    table = Table(ragged(seed).rows)
    x = np.random.default_rng(seed).normal(size=len(table))
    groups = partition(table, name, each)
    mean, deviation, others = groups.mean(x), groups.std(x), groups.others(x)
    by_call = (each or GROUPS[name][1]) == "call"
    for i, mine in enumerate(table.rows):
        samples: dict[str, list[float]] = {}
        for j, other in enumerate(table.rows):
            if key(name, other) == key(name, mine):
                samples.setdefault(other.id if by_call else other.episode, []).append(float(x[j]))
        averages = [sum(s) / len(s) for s in samples.values()]
        expected = sum(averages) / len(averages)
        squares = sum(sum((v - expected) ** 2 for v in s) / len(s) for s in samples.values())
        g = groups.code[i]
        assert groups.samples[g] == len(samples)
        assert mean[g] == pytest.approx(expected, abs=1e-6)
        assert deviation[g] == pytest.approx((squares / max(len(samples) - 1, 1)) ** 0.5, abs=1e-6)
        rest = [sum(s) / len(s) for n, s in samples.items() if n != (mine.id if by_call else mine.episode)]
        if rest:
            assert others[i] == pytest.approx(sum(rest) / len(rest), abs=1e-6)


@UNHURRIED
@given(seed=SEEDS, gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_scores(ragged: Callable[..., Any], seed: int, gamma: float) -> None:
    table = Table(ragged(seed).rows)
    found = {k: scores(table, k, gamma) for k in ("act", "return", "chain", "mean", "agent", "episode")}  # type: ignore[arg-type]
    for i, mine in enumerate(table.rows):
        rewards = {r.id: sum(r.credit.values()) for r in table.rows if r.episode == mine.episode}
        rows = [r for r in table.rows if r.episode == mine.episode]
        own = [rewards[r.id] for r in rows if r.agent == mine.agent]
        chain = [r for r in rows if r.chain == mine.chain]
        later = sum(gamma ** (r.order - mine.order) * rewards[r.id] for r in chain if r.order >= mine.order)
        assert found["act"][i] == pytest.approx(rewards[mine.id], abs=1e-6)
        assert found["return"][i] == pytest.approx(later, abs=1e-6)
        assert found["chain"][i] == pytest.approx(sum(rewards[r.id] for r in chain), abs=1e-6)
        assert found["mean"][i] == pytest.approx(sum(own) / len(own), abs=1e-6)
        assert found["agent"][i] == pytest.approx(sum(own), abs=1e-6)
        assert found["episode"][i] == pytest.approx(sum(rewards.values()), abs=1e-6)
    assert returns(table, gamma) == pytest.approx(found["return"])


def test_groups_never_span_tasks_and_are_counted() -> None:
    rows = [row(f"e{i}/1", task=f"t{i // 4}", credit={"r": float(i)}) for i in range(9)]
    rows += [row(f"f{i}/1", task="flat", credit={"r": 1.0}) for i in range(2)]
    table = Table(rows)
    found = report(table, table.mine("p"), partition(table), table.reward)
    assert found["groups/count"] == 4
    assert found["groups/singletons"] == 0.25
    assert found["groups/zero_variance"] == 0.25
    assert found["groups/span_tasks"] == 0
    assert found["groups/size/4-7"] == 0.5
    assert found["groups/size/2-3"] == 0.25
    assert found["groups/size/1"] == 0.25
    everything = report(table, table.mine("p"), partition(table, "global"), table.reward)
    assert everything["groups/span_tasks"] == 1


def test_scores_that_differ_by_rounding_are_equal() -> None:
    table = Table([row("a/1", credit={"x": 0.1, "y": 0.2}), row("b/1", credit={"x": 0.3})])
    assert table.reward[0] != table.reward[1]
    assert partition(table).relative(table.reward).tolist() == [0.0, 0.0]


def test_an_unknown_group_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'agent-turn'"):
        partition(Table([]), "agent_turn")


# -- starvation ---------------------------------------------------------------------------------------------------


def test_a_starved_role_is_named_with_a_way_out() -> None:
    rows = [row(f"e{i}/1", task=f"t{i}", credit={"r": float(i % 2)}) for i in range(20)]
    table = Table(rows)
    signals = make_algorithm("grpo").advantages(table, table.mine("p"), {})
    sentence = starved(table, signals)
    assert sentence is not None
    assert sentence.startswith("role 'solver' learns nothing: 100% of its 20 advantages are zero")
    assert starved(table, signals[:5]) is None  # too few to judge
    fed = make_algorithm("grpo", group="global").advantages(table, table.mine("p"), {})
    assert starved(table, fed) is None
    assert zero_shares(table, fed) == {"solver": 0.0}


def test_a_tail_is_not_a_zero_but_a_weight_of_zero_is() -> None:
    table = Table([row("a/1")])
    assert zero_shares(table, [Signal("a/1", None, 0.0)]) == {"solver": 0.0}
    assert zero_shares(table, [Signal("a/1", 1.0, weight=0.0)]) == {"solver": 1.0}
    assert zero_shares(table, [Signal("a/1", 0.5, shift=0.5)]) == {"solver": 1.0}


# -- invariances --------------------------------------------------------------------------------------------------


@UNHURRIED
@given(seed=SEEDS)
@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "dr_mas", "m_grpo", "gigpo", "at_grpo", "matpo", "reinforce_pp"]
)
def test_arrival_order_changes_nothing_at_all(name: str, ragged: Callable[..., Any], seed: int) -> None:
    """Bit for bit."""
    rows = ragged(seed).rows
    algorithm = make_algorithm(name)
    if not any(r.role == "planner" for r in rows):
        return
    first, shuffled = Table(rows), list(rows)
    random.Random(seed).shuffle(shuffled)
    second = Table(shuffled)
    assert algorithm.advantages(first, first.mine("mine"), {}) == algorithm.advantages(
        second, second.mine("mine"), {}
    )


@UNHURRIED
@given(seed=SEEDS)
@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "dr_mas", "m_grpo", "gigpo", "at_grpo", "matpo"])
def test_adding_a_task_changes_nothing(name: str, ragged: Callable[..., Any], seed: int) -> None:
    rows = ragged(seed).rows
    added = [row(f"zz{i}/1", task="another", agent=a, role=a, policy="mine", credit={"r": 9.0 * i})
             for i, a in enumerate(["planner", "planner", "worker_1", "worker_2"])]  # fmt: skip
    algorithm = make_algorithm(name)
    if not any(r.role == "planner" for r in rows):
        return
    alone, together = Table(rows), Table(rows + added)
    before = algorithm.advantages(alone, alone.mine("mine"), {})
    after = {signal.id: signal for signal in algorithm.advantages(together, together.mine("mine"), {})}
    for signal in before:
        assert after[signal.id].advantage == pytest.approx(signal.advantage, abs=1e-9)
        assert after[signal.id].weight == pytest.approx(signal.weight, abs=1e-9)


def test_prompts_are_told_apart_by_their_hash() -> None:
    """Parts cannot move from one message to the next, and other fields of a message count too."""

    def asked(*messages: dict[str, Any], agent: str = "a") -> str:
        return prompt_hash(SimpleNamespace(agent=agent, messages=messages))  # type: ignore[arg-type]

    def user(content: Any, **more: Any) -> dict[str, Any]:
        return {"role": "user", "content": content, **more}

    prompts = [
        (user("ab"), user("c")), (user("a"), user("bc")), (user("abuserc"),), (user("ab"),), (user("ab", name="x"),),
        (user(None),), (user(""),), ({"role": "system", "content": "ab"},), (user("\udcff"),), (user(""), user("")), (),
    ]  # fmt: skip
    assert len({asked(*prompt) for prompt in prompts} | {asked(user("ab"), agent="b")}) == len(prompts) + 1
    assert asked(*prompts[0]) == asked(*map(dict, prompts[0])) and len(asked()) == 16
