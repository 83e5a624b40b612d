"""The link between the controller and an actor: order, batches, errors and cancelling, over a link that reorders."""

import asyncio
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.group.actor import ActorLink, GroupActor


class Remote:
    """A method of an actor: `remote` starts it after a delay, and counts the messages."""

    def __init__(self, link: "Post", method: Any) -> None:
        self.link, self.method = link, method

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        self.link.messages += 1

        async def deliver() -> Any:
            for _ in range(self.link.chance.randrange(self.link.delay)):
                await asyncio.sleep(0)
            if self.link.dead:
                raise ConnectionError("the actor died")
            return await self.method(*arguments)

        return asyncio.ensure_future(deliver())


class Post:
    """An actor behind messages that overtake each other."""

    def __init__(self, group: Any, seed: int = 0, delay: int = 1) -> None:
        self.station = GroupActor(lambda: group)
        self.chance, self.delay, self.messages, self.dead = random.Random(seed), delay, 0, False

    def __getattr__(self, name: str) -> Remote:
        return Remote(self, getattr(self.station, name))


class Echo:
    """A group that answers after a few ticks, and writes down what began."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    async def say(self, value: Any, ticks: int = 0) -> Any:
        self.begun.append(value)
        for _ in range(ticks):
            await asyncio.sleep(0)
        return value

    async def fail(self, error: Exception) -> None:
        raise error

    async def lock(self) -> Any:
        return threading.Lock()

    async def forever(self) -> None:
        await asyncio.Event().wait()


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.lists(st.integers(0, 6), min_size=1, max_size=60))
def test_every_call_is_answered_once_and_calls_begin_in_order(
    seed: int, delay: int, ticks: list[int]
) -> None:
    async def run() -> None:
        echo = Echo()
        link = ActorLink(Post(echo, seed, delay))
        asked = []
        for i, wait in enumerate(ticks):
            asked.append(asyncio.ensure_future(link.ask("say", i, wait)))
            if seed >> i & 1:
                await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.gather(*asked), 60) == list(range(len(ticks)))
        assert echo.begun == list(range(len(ticks)))
        assert not link.open

    asyncio.run(run())


def test_calls_of_one_tick_are_one_message() -> None:
    async def run() -> int:
        post = Post(Echo())
        link = ActorLink(post)
        await asyncio.gather(*(link.ask("say", i) for i in range(500)))
        return post.messages

    assert asyncio.run(run()) <= 4


def test_an_error_is_the_very_exception_and_only_that_callers() -> None:
    async def run() -> None:
        link = ActorLink(Post(Echo()))
        one, two, three, four = await asyncio.gather(
            link.ask("fail", KeyError("p9")), link.ask("say", 2), link.ask("lock"),
            link.ask("say", threading.Lock()), return_exceptions=True,
        )  # fmt: skip
        assert isinstance(one, KeyError) and one.args == ("p9",)
        assert two == 2
        assert isinstance(three, TypeError) and "pickle" in str(three)
        assert isinstance(four, TypeError) and str(four).startswith("say: an argument cannot")
        with pytest.raises(AttributeError, match="sya"):
            await link.ask("sya")

    asyncio.run(run())


class Unreadable(Exception):
    """An exception as many libraries have it: pickled, it cannot be read again."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{place}: {code}")


def test_what_cannot_be_read_again_harms_its_own_caller_only() -> None:
    class Group(Echo):
        async def refuse(self) -> None:
            raise Unreadable(404, "here")

        async def give(self) -> Any:
            return Unreadable(404, "here")

    async def run() -> None:
        link = ActorLink(Post(Group()))
        raised, sent, given, fine = await asyncio.wait_for(
            asyncio.gather(
                link.ask("refuse"), link.ask("say", Unreadable(1, "there")), link.ask("give"), link.ask("say", 4),
                return_exceptions=True,
            ), 60,
        )  # fmt: skip
        assert isinstance(raised, RuntimeError) and str(raised) == "Unreadable: here: 404"
        assert isinstance(sent, TypeError) and "missing 1 required positional argument" in str(sent)
        assert isinstance(given, TypeError) and "cannot be read here" in str(given)
        assert fine == 4

    asyncio.run(run())


def test_an_actor_that_dies_fails_all_who_wait_and_who_ask_later() -> None:
    async def run() -> None:
        post = Post(Echo())
        link = ActorLink(post)
        waits = [asyncio.ensure_future(link.ask("say", i, 10**6)) for i in range(3)]
        await asyncio.sleep(0)
        post.dead = True
        asked = asyncio.ensure_future(link.ask("say", 9))
        for wait in (*waits, asked):
            with pytest.raises(ConnectionError, match="the actor died"):
                await asyncio.wait_for(wait, 60)
        with pytest.raises(ConnectionError):
            await link.ask("say", 10)

    asyncio.run(run())


def test_a_cancelled_caller_disturbs_nobody() -> None:
    async def run() -> None:
        link = ActorLink(Post(Echo()))
        waits = asyncio.ensure_future(link.ask("forever"))
        assert await link.ask("say", 1) == 1
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert await link.ask("say", 2) == 2
        assert not link.open

    asyncio.run(run())
