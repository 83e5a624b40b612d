"""The ledger books by round: who answers first, who drives, and how the arms of an `ep.all` stand change nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unitymas
from unitymas import Credit, Outcome, Role, Workflow
from unitymas.agents.team import Team
from unitymas.envs.core.arena import Arena
from unitymas.envs.core.drivers import aplay, run_sync
from unitymas.envs.core.ledger import RewardError
from unitymas.envs.core.tasks import DataSet
from unitymas.envs.faces.aec import WorkflowEnv
from unitymas.rewards.rules import TurnReward
from unitymas.rewards.shaping import Propagated, TurnDelta

AGENTS = ("c_1", "c_2", "c_3")
ROWS = [{"id": "t", "question": "why?", "answers": ["x"]}]


class Arms(Workflow):
    """Three agents side by side, each as often as it is told; some use a tool first. Then one closes."""

    roles = (Role("c", instances=3), Role("last"))
    tools = ("look",)

    def __init__(self, order, depth, looks):
        self.order, self.depth, self.looks = order, depth, looks

    async def run(self, ep):
        async def arm(agent):
            for i in range(self.depth[agent]):
                if agent in self.looks:
                    await ep.use("look", who=agent)
                await ep.act(agent, f"{agent} {i}")

        await ep.all(*map(arm, self.order))
        return Outcome(answer=(await ep.act("last", "close")).text)


class Nosy:
    """Pays everybody of the round, by all that can be seen when it is asked."""

    name = "nosy"

    def on_node(self, trace, node, task):
        seen = len(trace.nodes) + 0.5 * len(trace.credits) + 0.25 * (trace.ended != "no")
        seen += 100 * (trace.outcome is not None)
        for other in trace.acts():
            if other.round == node.round:
                yield Credit(other.id, "nosy", seen)

    def on_end(self, trace, task):
        return [Credit(n.id, "end", float(len(trace.credits))) for n in trace.acts("last")]


def measured(trace, node, task):
    return float(len(trace.acts("c"))) + int(node.agent[-1])


def arena_of(order, depth, looks=()):
    rules = [
        Nosy(),
        TurnDelta(measured, "c", ("c", "last")),
        Propagated(TurnReward(measured, roles=("c",)), 0.5),
    ]
    data = DataSet("own", "own", ROWS, "f")
    return Arena(Arms(order, depth, looks), data, tools={"look": lambda who: who}, rules=rules)


def say(agent, messages):
    return f"{agent} says {len(messages)}"


def shuffled(arena, rng, seed):
    team = Team.of(say).bind(arena.roles)
    play = arena.start(arena.task("t"), seed)
    return run_sync(aplay(play, team, arena, order=lambda nodes: rng.sample(nodes, len(nodes))))


def stepped(env):
    paid = {}
    for agent in env.agent_iter():
        observation, reward, over, *_ = env.last()
        paid[agent] = paid.get(agent, 0.0) + reward
        env.step(None if over else say(agent, observation["messages"]))
    return env.trace, paid


def by_turn(trace):
    return {(n.agent, n.turn): trace.rewards(n.id) for n in trace.acts()}


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(AGENTS),
    st.fixed_dictionaries({agent: st.integers(0, 3) for agent in AGENTS}),
    st.sets(st.sampled_from(AGENTS)),
    st.randoms(use_true_random=False),
)
def test_credits_are_the_same_whoever_drives_and_however_the_arms_stand(order, depth, looks, rng):
    arena = arena_of(tuple(order), depth, frozenset(looks))
    env = WorkflowEnv(arena)
    env.reset(seed=5)
    trace, paid = stepped(env)
    first = shuffled(arena, rng, trace.seed)
    assert first.ended == "terminal" and first.credits
    plain = first.to_dict(volatile=False)
    assert trace.to_dict(volatile=False) == plain
    assert by_turn(first) == by_turn(shuffled(arena_of(AGENTS, depth, frozenset(looks)), rng, 5))
    for agent, amount in paid.items():
        assert amount == pytest.approx(
            sum(sum(trace.rewards(n.id).values()) for n in trace.acts() if n.agent == agent)
        )

    at = rng.choice(trace.acts()).id
    assert stepped(env.fork(at=at))[0].to_dict(volatile=False) == plain
    assert arena.rescore(first).to_dict(volatile=False) == plain


@pytest.mark.parametrize("order", [("c_1", "c_2"), ("c_2", "c_1")])
def test_a_turn_reward_may_pay_the_other_arm_of_its_round(order):
    """On the old ledger this raised in one order of the arms, and paid in the other."""

    def agree(trace, node, task):
        return [Credit(n.id, "pair", 1.0) for n in trace.acts("c") if n.round == node.round and n is not node]

    class Pair:
        name = "pair"

        def on_node(self, trace, node, task):
            return agree(trace, node, task) if node.role == "c" else ()

        def on_end(self, trace, task):
            return ()

    arena = arena_of(order, dict.fromkeys(order, 1))
    arena.rules = [Pair()]
    env = WorkflowEnv(arena)
    env.reset(seed=0)
    for trace in (unitymas.rollout(arena, say)[0], stepped(env)[0]):
        assert {n.agent: trace.rewards(n.id) for n in trace.acts("c")} == {a: {"pair": 1.0} for a in order}


def test_at_the_end_a_rule_sees_what_every_round_has_earned():
    class Counted:
        name = "counted"

        def on_end(self, trace, task):
            return [Credit(n.id, "counted", float(len(trace.credits))) for n in trace.acts("last")]

        def metrics(self, trace, task):
            return {"credits": float(len(trace.credits))}

    arena = arena_of(AGENTS, dict.fromkeys(AGENTS, 1))
    arena.rules = [TurnReward(lambda trace, node, task: 0.5), Counted()]
    trace = unitymas.rollout(arena, say)[0]
    assert trace.rewards("1")["counted"] == 4.0 and trace.metrics["credits"] == 4.0  # the last round's, too


def test_nobody_is_paid_in_the_middle_of_a_round():
    env = WorkflowEnv(arena_of(AGENTS, dict.fromkeys(AGENTS, 1)))
    env.reset(seed=0)
    for _ in AGENTS[:-1]:
        env.step("x")
        assert env.trace.credits == [] and not any(env.rewards.values())
    env.step("x")
    assert {env.trace.node(c.node).agent for c in env.trace.credits} == set(AGENTS)


def test_a_node_that_nobody_has_answered_yet_cannot_be_paid():
    class Seer:
        name = "seer"

        def on_node(self, trace, node, task):
            return [Credit("1", "seer", 1.0)]

        def on_end(self, trace, task):
            return ()

    arena = arena_of(AGENTS, dict.fromkeys(AGENTS, 1))
    whole = unitymas.rollout(arena, say)[0]
    arena.rules = [Seer()]
    with pytest.raises(RewardError, match="no answered act"):
        unitymas.rollout(arena, say)
    with pytest.raises(RewardError, match="no answered act"):  # the whole trace is there, and it was not then
        arena.rescore(whole)


@pytest.mark.parametrize(
    ("reward", "metric"),
    [
        (lambda trace, task: 0.25, 0.25),
        (lambda trace, task: True, 1.0),
        (lambda trace, task: {"c": 1.0, "last": 0.0}, 0.75),  # three agents of `c`, and one
        (lambda trace, task: {"c_1": 0.5}, 0.5),
        (lambda trace, task: [Credit(n.id, "mine", 2.0) for n in trace.acts("last")], 2.0),
        (lambda trace, task: [], 0.0),
    ],
)
def test_a_plain_function_gives_a_metric_of_its_own_name_and_the_score(reward, metric):
    reward.__name__ = "mine"
    arena = arena_of(AGENTS, {"c_1": 3, "c_2": 1, "c_3": 1})  # who speaks more does not count more
    arena.rules = []
    arena.add_rule(reward)
    env = WorkflowEnv(arena)
    env.reset(seed=0)
    for trace in (unitymas.rollout(arena, say)[0], stepped(env)[0]):
        assert trace.metrics == {"mine": metric, "score": metric}


def test_score_is_the_headline_where_a_rule_computes_it_and_the_first_metric_else():
    how = {"data": "mini", "tasks": 1}
    mask = unitymas.rollout("mask-hotpotqa", "scripted", **how)[0].metrics
    assert mask["score"] == mask["f1"] == 1.0
    own = unitymas.rollout("mask-hotpotqa", "scripted", reward=lambda trace, task: 0.5, **how)[0].metrics
    assert own == {"lambda": 0.5, "score": 0.5}
    both = unitymas.rollout(
        "mask-hotpotqa",
        "scripted",
        reward=[lambda trace, task: 0.5, "unitymas.rewards.outcome:AnswerF1"],
        **how,
    )[0].metrics
    assert both["score"] == both["f1"] == 1.0 and both["lambda"] == 0.5
    assert unitymas.rollout("mask-hotpotqa", "scripted", reward=None, **how)[0].metrics == {"score": 0.0}
