"""Ideas that have one home: a base for rules, the influence of an act, sums of credits, weights by role."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unitymas
from unitymas.envs.core.ledger import Credit, RewardError, Rule, as_rule
from unitymas.envs.core.records import rewards_by_node, totals_by_node
from unitymas.rewards import rules, shaping
from unitymas.trainers.controller.statistics.credit import InfluenceCredit

share = st.floats(0, 1)


@given(share, share, st.sampled_from(["margin", "quality"]))
def test_influence_is_one_function_for_acts_and_for_columns(own, earlier, kind):
    alone = shaping.influence(own, earlier, kind)
    assert shaping.influence(np.array([own]), np.array([earlier]), kind)[0] == alone
    expected = own - earlier if kind == "margin" else earlier * own - (1 - earlier) * (1 - own)
    assert alone == pytest.approx(expected)


def test_rule_and_transform_have_the_same_defaults():
    rule = shaping.Influence(lambda trace, node, task: 1.0)
    transform = InfluenceCredit(component="right")
    assert (rule.kind, rule.alpha) == (transform.kind, transform.alpha)
    assert inspect.signature(shaping.influence).parameters["kind"].default == rule.kind


credits = st.lists(
    st.builds(Credit, st.sampled_from("012"), st.sampled_from("ab"), st.floats(-9, 9)), max_size=12
)


@given(credits)
def test_sums_of_credits_agree(booked):
    trace = unitymas.Trace(credits=booked)
    table, totals = rewards_by_node(booked), totals_by_node(booked)
    assert set(table) == set(totals) == {credit.node for credit in booked}
    for node, row in table.items():
        assert trace.rewards(node) == row
        assert sum(row.values()) == pytest.approx(totals[node], abs=1e-9)
    assert trace.rewards("3") == {}


class Half(Rule):
    name = "half"

    def on_end(self, trace, task):
        return [Credit(act.id, self.name, 0.5) for act in trace.acts()]


class Wrong(Half):
    name = "wrong"

    def on_end(self, trace, task):
        return [Credit("nowhere", self.name, 0.5)]


class Early(Rule):
    name = "early"

    def on_node(self, trace, node, task):
        yield Credit(node.id, self.name, float("nan"))


def test_a_rule_writes_the_half_that_it_needs():
    team = {"*": lambda agent, messages: "x"}
    (trace,) = unitymas.rollout("rag-nq", team, data="mini", tasks=1, reward=[Half()])
    assert {sum(trace.rewards(act.id).values()) for act in trace.acts()} == {0.5}
    assert trace.metrics["half"] == 0.5 and as_rule(Half()).on_node(trace, trace.nodes[0], None) == ()


@pytest.mark.parametrize("rule", [Wrong(), Early()])
def test_the_error_of_a_rule_names_the_file_of_its_own_half(rule):
    env = unitymas.make("rag-nq", data="mini", reward=[rule])
    with pytest.raises(RewardError, match=r"test_one_home\.py"):
        unitymas.rollout(env, {"*": lambda agent, messages: "x"}, tasks=1)


@pytest.mark.parametrize(
    ("weight", "role", "amount"),
    [(2.0, "planner", 2.0), ({"planner": 3.0}, "planner", 3.0), ({"planner": 3.0}, "coder", 0.25),
     ({"planner": 3.0, "*": 5.0}, "coder", 5.0), ({"*": 0.0}, None, 0.0)],
)  # fmt: skip
def test_a_weight_goes_by_role(weight, role, amount):
    assert rules.weight_of(weight, role, 0.25) == amount
