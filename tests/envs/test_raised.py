"""Whatever somebody's code raises in an episode is told as its error. Nothing hangs, stops the event loop, or looks like Ctrl-C."""

import asyncio
import concurrent.futures

import pytest

import unitymas
import unitymas.agents.team
from unitymas import Custom, Outcome, Role, Workflow
from unitymas.agents.basics.threads import ThreadError
from unitymas.envs.core.drivers import LONG_REPLY
from unitymas.envs.registry import unregister
from unitymas.envs.tools import Tool


class Odd(BaseException):
    pass


ERRORS = [
    asyncio.CancelledError(),
    concurrent.futures.CancelledError(),
    SystemExit(3),
    Odd("x"),
    StopIteration("x"),
]
ENDS_ONE = ["policy", "async policy", "plain tool", "blocking tool", "async tool", "run", "grade"]
"""Places where an error ends its episode. The other places are everybody's: a rule, a format, a sink, a policy's doors."""
ENDS_ALL = ["format", "format of a long reply", "on_node", "metrics", "on_trace", "open", "close"]


def played(place: str, error: BaseException) -> list:
    """Play two episodes, in which `error` is raised at `place`."""

    def boom(*_: object, **__: object) -> None:
        raise error

    async def later(*_: object, **__: object) -> None:
        raise error

    def at(*places: str) -> None:
        if place in places:
            raise error

    class Speaks(Workflow):
        roles = (Role("first", reply=Custom(lambda text: at("format", "format of a long reply") or text)),)
        tools = ("look",)

        async def run(self, ep):
            await ep.act("first", "hello")
            at("run")
            if "tool" in place:
                await ep.use("look", query="x")
            return Outcome(answer="a")

        async def grade(self, ep, trace, task):
            at("grade")

    class Rule:
        name = "rule"

        def on_node(self, trace, node, task):
            at("on_node")
            return ()

        def on_end(self, trace, task):
            return ()

        def metrics(self, trace, task):
            at("metrics")
            return {"score": 1.0}

    class Player:
        def act(self, call):
            at("policy")
            if place == "async policy":
                return later()
            return "w" * (LONG_REPLY + 1) if "long" in place else "w"

        async def open(self):
            at("open")

        async def close(self):
            at("close")

    rows = [{"id": str(i), "question": "q", "answers": ["a"]} for i in range(2)]
    unitymas.register("raises-in-an-episode", workflow=Speaks, reward=Rule, tasks=rows)
    look = Tool(later if place == "async tool" else boom, "look", blocking=place == "blocking tool")
    try:
        env = unitymas.make("raises-in-an-episode", tools={"look": look})
        sink = boom if place == "on_trace" else None
        return asyncio.run(asyncio.wait_for(unitymas.arollout(env, Player(), on_trace=sink), 20))
    finally:
        unregister("raises-in-an-episode")


@pytest.mark.parametrize(
    "error", ERRORS, ids=lambda error: type(error).__qualname__ + type(error).__module__[:3]
)
@pytest.mark.parametrize("place", ENDS_ONE)
def test_an_error_of_an_episode_ends_that_episode(place, error):
    traces = played(place, error)
    assert [str(trace.ended) for trace in traces] == ["error", "error"]
    assert all(type(error).__name__ in str(trace.error) for trace in traces)


@pytest.mark.parametrize(
    "error", ERRORS, ids=lambda error: type(error).__qualname__ + type(error).__module__[:3]
)
@pytest.mark.parametrize("place", ENDS_ALL)
def test_an_error_of_what_all_episodes_share_is_raised(place, error):
    # StopIteration in a task is Python's RuntimeError
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        played(place, error)
    assert isinstance(caught.value, ThreadError) or isinstance(error, StopIteration)


def test_who_was_opened_is_closed_though_another_fails(capsys):
    doors = []

    class Player:
        def __init__(self, name, wrong=""):
            self.name, self.wrong = name, wrong

        def act(self, call):
            return "w"

        async def open(self):
            doors.append(f"open {self.name}")
            if self.wrong == "open":
                raise OSError("no such door")

        async def close(self):
            doors.append(f"close {self.name}")
            if self.wrong == "close":
                raise OSError(f"{self.name} is stuck")

    async def enter(**players):
        async with unitymas.agents.team.BoundTeam(players, {}):
            pass

    with pytest.raises(OSError, match="no such door"):
        asyncio.run(enter(a=Player("a"), b=Player("b", "open"), c=Player("c")))
    assert doors == ["open a", "open b", "close a", "close b"]
    doors.clear()
    with pytest.raises(OSError, match="a is stuck"):
        asyncio.run(enter(a=Player("a", "close"), b=Player("b", "close"), c=Player("c")))
    assert doors[3:] == ["close a", "close b", "close c"] and "b is stuck" in capsys.readouterr().err
