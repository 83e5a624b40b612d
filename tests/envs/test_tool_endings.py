"""A tool that a role used wrongly ends the episode as an outcome; what the tool or its server did wrong does not."""

import asyncio
import pickle

import pytest

import unitymas
from unitymas import Infrastructure, Outcome, Role, Tool, ToolError, Workflow
from unitymas.agents.basics.failures import Boundary, Ended, ToolFault
from unitymas.envs.registry import unregister

ROWS = [{"id": "1", "question": "six times seven?", "answers": ["42"]}]


class Reckoner(Workflow):
    """A role writes a sum, and a tool computes it; nobody catches what it says of a wrong one."""

    roles = (Role("writer"),)
    tools = ("compute",)

    async def run(self, ep):
        text = await ep.act("writer", ep.task.question)
        return Outcome(answer=await ep.use("compute", text=text.text))


class Side(Reckoner):
    """The same in one arm of two."""

    roles = (Role("writer"), Role("reader"))

    async def run(self, ep):
        async def one():
            text = await ep.act("writer", ep.task.question)
            return await ep.use("compute", text=text.text)

        first, _ = await ep.all(one(), ep.act("reader", "x"))
        return Outcome(answer=first)


def compute(text):
    if text == "slow":
        raise TimeoutError
    if text == "late":
        raise ToolFault("the server gave no answer within 4 s")
    if text == "down":
        raise Infrastructure("ToolError: six is no sum")  # the text claims the opposite, and changes nothing
    if text == "broken":
        return [][0]
    if not text.isdigit():
        raise ToolError(f"{text} is no sum; the server timed out, 503")
    return text


def pay(trace, task):
    return 1.0 if (trace.outcome or {}).get("answer") == "42" else -0.5


@pytest.fixture(params=[Reckoner, Side])
def env(request):
    unitymas.register("reckoner-test", workflow=request.param, reward=pay, tasks=ROWS)
    yield lambda: unitymas.make("reckoner-test", tools={"compute": Tool(compute, name="compute")})
    unregister("reckoner-test")


def played(env, text):
    (trace,) = unitymas.rollout(env(), {"*": lambda agent, messages: text})
    return trace


@pytest.mark.parametrize(
    ("text", "ended", "reason", "paid"),
    [
        ("42", Ended.TERMINAL, "", 1.0),
        ("six", Ended.TERMINAL, Boundary.TOOL, -0.5),
        ("broken", Ended.ERROR, Boundary.TOOL, 0),
        ("slow", Ended.ERROR, Boundary.TOOL, 0),
        ("late", Ended.ERROR, Boundary.TOOL, 0),
        ("down", Ended.ERROR, Boundary.TOOL, 0),
    ],
)
def test_the_type_decides_and_not_the_text(env, text, ended, reason, paid):
    trace = played(env, text)
    assert (trace.ended, trace.reason) == (ended, reason)
    assert {sum(trace.rewards(act.id).values()) for act in trace.acts()} == {paid}
    assert (trace.error is None) == (text == "42")
    again = unitymas.Trace.from_dict(trace.to_dict())
    assert again.to_dict() == trace.to_dict()


def test_replays_and_restored_episodes_end_alike(env):
    arena = env().arena
    for text, ended in (("six", Ended.TERMINAL), ("broken", Ended.ERROR)):
        play = arena.start(arena.task("1"), 0)
        while play.pending:
            for node in play.pending:
                if node.kind == "act":
                    play.answer(node, text)
                else:
                    arena.toolbox.call(play, node)
        twins = [play, play.fork(), pickle.loads(pickle.dumps(play)), play.replay({})]
        assert [twin.ended for twin in twins] == [ended] * 4
        assert len({twin.trace.error for twin in twins}) == 1


def test_the_one_at_a_time_face_ends_the_episode_and_pays(env):
    game = env()
    game.reset(seed=0)
    for _ in game.agent_iter():
        _, _, termination, truncation, _ = game.last()
        assert not truncation
        game.step(None if termination else "six")
    assert game.unwrapped.trace.ended == Ended.TERMINAL and game.unwrapped.trace.metrics["pay"] == -0.5


def test_training_keeps_the_outcome_and_tries_the_rest_again(env):
    from unitymas.agents.team import Team
    from unitymas.trainers.controller.collect import Collector, Draws
    from unitymas.trainers.controller.step import collected

    arena = env().arena
    for text, kept, asked in (("six", 1, 1), ("down", 0, 3)):
        tries = []

        def writer(agent, messages, text=text, tries=tries):
            tries.append(agent)
            return text

        team = Team({"*": writer}).bind(arena.roles)
        collector = Collector(arena, team, {}, {}, trained=set(), concurrency=1, retries=2)
        harvest = asyncio.run(collector.collect(["1"], Draws(1, 0, "0")))
        assert (len(harvest.traces), sum(harvest.failures.values())) == (kept, 0 if kept else 3)
        assert tries.count("writer") == asked
        if kept:
            assert collected(harvest)["tool_misused"] == 1.0


def test_an_evaluation_counts_it_as_played_and_says_why(env):
    result = unitymas.evaluate(env(), {"*": lambda agent, messages: "six"}, k=2)
    (row, _) = result.rows
    assert (row.failed, row.unanswered, row.reason) == (False, False, "tool: ToolError")
    assert result.figures["failures"] == {"tool: ToolError": 2}
