"""Third-party AEC environments as workflows, graphs with routers, and one role as a Gymnasium environment."""

import functools
import importlib
import warnings

import pytest

import unitymas
from unitymas import AECWorkflow, GraphWorkflow, Tags
from unitymas.envs.faces.bridges import AECRewards
from unitymas.envs.graph import END, START, GraphError
from unitymas.envs.registry import unregister

GAMES = ("tictactoe_v3", "connect_four_v3", "leduc_holdem_v4")


def classic(name):
    return importlib.import_module(f"pettingzoo.classic.{name}").env()


def ours():
    return unitymas.make("chain-deepscaler", data="mini", size=4)


def workflow_of(factory):
    return AECWorkflow(factory)


@pytest.fixture
def adapted():
    made = []

    def make(name, factory):
        unitymas.register(
            name, workflow=functools.partial(AECWorkflow, factory), reward=AECRewards(),
            tools={"game": AECWorkflow(factory).tool()}, tasks=[{"id": str(i)} for i in range(3)],
        )  # fmt: skip
        made.append(name)
        return name

    yield make
    for name in made:
        unregister(name)


@pytest.mark.parametrize("game", GAMES)
def test_pettingzoos_own_games_conform(game, adapted):
    pytest.importorskip("pygame", reason="pip install 'unitymas[games]'")
    pytest.importorskip("rlcard", reason="pip install 'unitymas[games]'")
    id = adapted(f"aec-{game.split('_')[0]}", functools.partial(classic, game))
    unitymas.check_env(id)
    for trace in unitymas.rollout(id, "random", k=2):
        assert trace.ended == "terminal" and not trace.error
        acted = {
            n.agent for n in trace.acts()
        }  # who never acted has no act to be paid for (a fold before its turn)
        paid = {a: sum(sum(trace.rewards(n.id).values()) for n in trace.acts(a)) for a in acted}
        assert paid == {a: pytest.approx(trace.outcome.get(a, 0.0)) for a in acted}


def test_one_of_ours_makes_the_round_trip(adapted):
    id = adapted("aec-round-trip", ours)
    unitymas.check_env(id)
    trace = unitymas.rollout(id, lambda agent, messages: "\\boxed{9}", tasks=1)[0]
    assert [n.agent for n in trace.acts()] == ["generator", "verifier", "refiner"]
    assert "Problem:" in trace.acts()[0].messages[-1]["content"]


def graph():
    return (
        GraphWorkflow()
        .add_agent("planner", "Plan for: {question}", reply=Tags("plan"))
        .add_tool("retrieve", query="{planner}", k=3)
        .add_agent("answerer", "Question: {question}\n{retrieve}", reply=Tags("answer"))
        .add_edge(START, "planner")
        .add_edge("planner", "retrieve")
        .add_edge("retrieve", "answerer")
        .add_edge("answerer", "planner")
        .add_edge("answerer", END)
    )


def test_a_router_learns_where_to_go_because_it_is_asked():
    built = graph().add_router("answerer", "boss", "Enough? {answerer}").build(output="answerer")
    turns = iter(["planner", "END"])
    team = {
        "planner": lambda a, m: "<plan>river</plan>",
        "answerer": lambda a, m: "<answer>x</answer>",
        "boss": lambda a, m: next(turns),
    }
    unitymas.register(
        "graph-test", workflow=lambda: built, kind="qa", tools={"retrieve": lambda query, k: []}
    )
    try:
        trace = unitymas.rollout("graph-test", team, tasks=1, data="mini")[0]
    finally:
        unregister("graph-test")
    assert [n.role for n in trace.acts()] == ["planner", "answerer", "boss"] * 2
    assert trace.outcome == {"answer": "x", "steps": 6}
    assert trace.acts("boss")[0].format.choices == ("planner", "END")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: GraphWorkflow().add_agent("a", "{nobody}").add_edge(START, "a").build("a"), "uses {nobody}"),
        (lambda: GraphWorkflow().add_agent("a", "x").build("a"), "no edge leaves START"),
        (lambda: GraphWorkflow().add_agent("a", "x").add_agent("b", "x").add_edge(START, "a").build("a"), "'b' cannot be reached"),
        (lambda: graph().add_edge("answerer", "planer").build("answerer"), "did you mean 'planner'"),
        (lambda: graph().build("answer"), "did you mean 'answerer'"),
        (lambda: graph().add_router("planner", "boss", "x").build("answerer"), "nothing to choose"),
        (lambda: graph().add_agent("planner", "x"), "there is a node 'planner' already"),
    ],
)  # fmt: skip
def test_graph_mistakes_are_found_at_build(build, says):
    with pytest.raises(GraphError, match=says):
        build()


def test_one_role_as_a_gymnasium_environment():
    from gymnasium.utils.env_checker import check_env

    env = unitymas.single_role(unitymas.make("mask-hotpotqa", data="mini"), "searcher", "scripted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env, skip_render_check=True)
    env.reset(seed=3)
    earned, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step("<end>")
        earned, over = earned + reward, terminated or truncated
    assert earned == 0.0 and env.env.trace.outcome["ended_by_searcher"]


class Dice:
    """A game whose start is chance: a number is thrown, two players guess it."""

    def __new__(cls):
        import random

        from gymnasium.spaces import Discrete
        from pettingzoo import AECEnv

        class Thrown(AECEnv):
            metadata = {"name": "dice_v0"}
            possible_agents = ["one", "two"]

            def action_space(self, agent):
                return Discrete(6)

            def observation_space(self, agent):
                return Discrete(1_000_000)

            def reset(self, seed=None, options=None):
                self.thrown = random.Random(seed).randrange(1_000_000)
                self.agents, self.agent_selection = list(self.possible_agents), "one"
                self.rewards = dict.fromkeys(self.agents, 0.0)
                self._cumulative_rewards = dict(self.rewards)
                self.terminations = dict.fromkeys(self.agents, False)
                self.truncations, self.infos = dict(self.terminations), {a: {} for a in self.agents}

            def observe(self, agent):
                return self.thrown

            def step(self, action):
                agent = self.agent_selection
                if self.terminations[agent]:
                    self.agents.remove(agent)
                elif agent == "two":
                    self.terminations = dict.fromkeys(self.agents, True)
                self.agent_selection = "two" if agent == "one" else "one"

        return Thrown()


def test_the_samples_of_a_task_begin_with_the_same_game(adapted):
    id = adapted("aec-dice", Dice)
    starts = {}
    for seed in (0, 1):
        for trace in unitymas.rollout(id, "random", k=4, seed=seed):
            starts.setdefault(trace.task_id, set()).add(trace.acts()[0].messages[-1]["content"])
    assert [len(games) for games in starts.values()] == [1, 1, 1]  # on the old code 8 each
    assert len(set().union(*starts.values())) == 3  # and another task is another game
    pinned = unitymas.rollout(id, "random", tasks=[{"id": "a", "seed": 7}, {"id": "b", "seed": 7}])
    assert len({t.acts()[0].messages[-1]["content"] for t in pinned}) == 1
