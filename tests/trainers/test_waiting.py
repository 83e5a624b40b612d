"""Nothing that is raised in a thread is lost; critics may live in any group; a watchdog says who waits for whom."""

import asyncio
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

import unitymas
from unitymas import Outcome, Role, Workflow
from unitymas.agents.basics.threads import ThreadError, in_thread, together
from unitymas.envs.registry import unregister
from unitymas.envs.tools import Tool
from unitymas.trainers.algorithms import PolicyGradient, register_algorithm
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.reporting.watchdog import Watchdog
from unitymas.trainers.controller.run import Run

from .pairs import register_pair, right


class Raises(PolicyGradient):
    """Its loss raises what no future can carry."""

    name = "raises-stop-iteration"

    def advantages(self, table, mine, state):
        return self.signals(table, mine, advantage=table.reward)

    def loss(self, batch, denominators):
        return next(iter(()))


register_algorithm("raises-stop-iteration", Raises)


@pytest.fixture(scope="module", autouse=True)
def environment():
    register_pair("two-of-waiting")
    yield
    unregister("two-of-waiting")


def made(model, tmp_path, *, critic="", court=None, **more):
    """A run of one team; with `critic`, of one that is judged in a group of the critic's own."""
    group = {"model": model, "slots": 8, "threads": 1}
    team = {
        "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 4},
        **more.pop("policy", {}),
    }
    tree = {"groups": {"main": group}, "policies": {"team": team}, "map": {"*": "team"}}
    if critic:
        tree["groups"]["court"] = {**group, "model": court or model}
        tree["policies"]["judge"] = {"group": "court", "learning": {"lr": 1e-2}}
        team["critic"] = "judge"
        if critic == "beside a speaker":
            tree["policies"]["other"] = {**team, "group": "court", "critic": "judge"}
            tree["map"] = {"first": "team", "second": "other"}
    common = {
        "steps": 1, "tasks_per_step": 4, "k": 2, "minibatches": 1, "starved": False, "deterministic": True,
        "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0},
    }  # fmt: skip
    return Run(resolve("two-of-waiting", **{**common, **tree, **more}), tmp_path / "run")


async def within(seconds, work):
    """Its result, or the test fails: a hang must not stop the suite."""
    return await asyncio.wait_for(work, seconds)


@pytest.mark.parametrize("where", ["alone", "beside a speaker"])
@pytest.mark.parametrize(
    "algorithm",
    [{"name": "mappo"}, {"name": "ppo"}, {"name": "at_grpo", "tree": 2, "tree_score": "value"}],
    ids=lambda a: a["name"],
)
def test_a_critic_in_another_group_judges_and_learns(algorithm, where, tiny_llama, tmp_path):
    run = made(tiny_llama, tmp_path, critic=where, policy={"algorithm": algorithm})
    asyncio.run(within(60, run.train()))
    assert run.history[-1]["ending"] == "done"
    judge = run.groups["court"].hosted["judge"]
    assert judge.version >= 1 and judge.learner.steps >= 1
    counts = asyncio.run(run.groups["court"].report())["samples"]
    assert counts["held/open"] == counts["held/sealed"] == counts["held/taken"] == 0  # guests left too


def test_a_critic_with_another_tokenizer_is_refused(tiny_llama, tmp_path):
    run = made(tiny_llama, tmp_path, critic="alone", court="tiny", policy={"algorithm": {"name": "mappo"}})
    with pytest.raises(ConfigError, match=r"policies\.team\.critic: 'judge' .* another tokenizer"):
        asyncio.run(run.train())


def test_a_critic_that_plays_is_refused(tiny_llama, tmp_path):
    tree = {
        "groups": {"main": {"model": tiny_llama}}, "map": {"first": "a", "second": "b"},
        "policies": {"a": {"critic": "b", "algorithm": {"name": "mappo"}}, "b": {"algorithm": {"name": "grpo"}}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"policies\.a\.critic: 'b' plays a role"):
        Run(resolve("two-of-waiting", **tree), tmp_path)


def test_what_an_update_raises_ends_the_run(tiny_llama, tmp_path):
    policy = {"algorithm": {"name": "raises-stop-iteration"}}
    run = made(tiny_llama, tmp_path, policy=policy)
    with pytest.raises(ThreadError, match="StopIteration"):
        asyncio.run(within(60, run.train()))
    assert "failed: ThreadError" in run.history[-1]["ending"]


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        StopIteration("x"),
        Odd("x"),
        SystemExit(3),
        KeyboardInterrupt(),
        CancelledError(),
        asyncio.CancelledError(),
    ],
)
def test_a_thread_raises_what_a_future_cannot_carry(error):
    def work():
        raise error

    async def go():
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(ThreadError, match=type(error).__name__) as caught:
                await within(10, in_thread(pool, work))
            assert caught.value.__cause__ is error
            with pytest.raises(ZeroDivisionError):  # what it can carry is raised as it is
                await in_thread(pool, lambda: 1 / 0)

    asyncio.run(go())


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), Odd("x"), asyncio.CancelledError()])
@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_tool_that_raises_such_a_thing_is_a_failed_tool(kind, error):
    def blocking(query: str) -> str:
        raise error

    async def waiting(query: str) -> str:
        raise error

    class Uses(Workflow):
        roles = (Role("first"),)
        tools = ("look",)

        async def run(self, ep):
            await ep.act("first", "hello")
            found = await ep.use("look", query="x")
            return Outcome(answer=str(found))

    tool = Tool(waiting if kind == "async" else blocking, "look")
    unitymas.register(
        "uses-of-waiting", workflow=Uses, reward=right, tasks=[{"id": "t", "question": "q", "answers": ["a"]}]
    )
    try:
        env = unitymas.make("uses-of-waiting", tools={"look": tool})
        (trace,) = asyncio.run(within(10, unitymas.arollout(env, {"*": lambda agent, messages: "hi"})))
    finally:
        unregister("uses-of-waiting")
    (use,) = trace.uses()
    assert type(error).__name__ in use.error


def test_the_first_error_is_raised_at_once_and_the_second_is_told(capsys):
    async def fail(seconds, text):
        await asyncio.sleep(seconds)
        raise ValueError(text)

    async def go():
        began = time.monotonic()
        with pytest.raises(ValueError, match="first"):
            await together(fail(0.01, "first"), fail(0.1, "second"), asyncio.sleep(0.2))
        assert time.monotonic() - began < 0.1
        await asyncio.sleep(0.2)

    asyncio.run(go())
    assert "besides, ValueError: second" in capsys.readouterr().err


def test_who_is_cancelled_waits_for_its_thread_and_hears_of_its_error(capsys):
    """Nobody else may touch a policy while a thread is at work on it, whoever waited for that thread."""
    ended = []

    def work():
        time.sleep(0.2)
        ended.append(True)
        raise ValueError("late")

    async def go():
        with ThreadPoolExecutor(1) as pool:
            task = asyncio.ensure_future(in_thread(pool, work))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended

    asyncio.run(go())
    assert "besides, ValueError: late" in capsys.readouterr().err


def test_the_watchdog_names_who_waits_for_whom(tiny_llama, tmp_path):
    """A group that never answers: which call of it, for whose node, and where the threads are."""
    run, told = made(tiny_llama, tmp_path, watchdog=0.2), []
    run.watchdog.tell = told.append

    async def go():
        await run._start()
        run.watchdog.start()
        group = run.groups["main"]
        policy = group._group.hosted["team"].speaker

        async def never(*_):
            await asyncio.Event().wait()

        policy.say = never
        collecting = asyncio.ensure_future(run.recipe.collect(run))
        async with asyncio.timeout(20) if hasattr(asyncio, "timeout") else _nothing():
            while not told:
                await asyncio.sleep(0.05)
        collecting.cancel()
        run.watchdog.stop()

    asyncio.run(go())
    assert "nothing has ended for" in told[0]
    assert "group 'main': generate of policy 'team', episode 0:0.0, node 0, role 'first'" in told[0]
    assert "episode 0:0.0: waits for agent 'first' at node 0" in told[0]
    assert "thread MainThread: " in told[0]


class _nothing:
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


def test_the_watchdog_changes_nothing(tiny_llama, tmp_path):
    """It barks all the time, and the weights are the same to the last bit."""
    weights = []
    for name, seconds in (("quiet", 0.0), ("loud", 1e-4)):
        run = made(tiny_llama, tmp_path / name, watchdog=seconds)
        run.watchdog.tell = lambda text: None
        asyncio.run(run.train())
        weights.append(
            [p.detach().clone() for p in run.groups["main"].hosted["team"].parameters.model.parameters()]
        )
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_nothing_is_told_while_things_end():
    told = []
    dog = Watchdog(0.4, told.append)
    dog.start()
    for _ in range(12):
        with dog.call("main", "publish", ()):
            time.sleep(0.05)
    dog.stop()
    assert not told
