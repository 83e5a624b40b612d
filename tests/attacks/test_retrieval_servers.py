"""A retrieval server among strangers, and a client among strange servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from unitymas.envs.tools.retrieval import Bm25Index, Passage, RetrieverPool, RetrieverUnavailable, make_app
from unitymas.envs.tools.retrieval.retriever import Hit
from unitymas.envs.tools.retrieval.serving.server import ServerLimits

web = pytest.importorskip("aiohttp.web")
FACTS = [Passage(id=str(n), title=f"Town {n}", text=f"town{n} lies on the river{n % 7}") for n in range(300)]
INDEX = Bm25Index.build(FACTS)
JSON = {"Content-Type": "application/json"}


class Slow(Bm25Index):
    """Takes its time for every query."""

    def search_many(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        time.sleep(0.05 * len(queries))
        return super().search_many(queries, k)


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def post(
    app: Any, body: Any, headers: dict[str, str] | None = None, times: int = 1
) -> list[tuple[int, dict[str, Any]]]:
    """Status and JSON of the answers to the same request, sent `times` at once."""
    import aiohttp

    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def one(session: Any, address: str) -> tuple[int, Any]:
        async with session.post(f"{address}/retrieve", data=data, headers=headers or JSON) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw[:1] in b"{[" else raw

    async def play() -> Any:
        async with running(app) as address, aiohttp.ClientSession() as session:
            return await asyncio.gather(*(one(session, address) for _ in range(times)))

    answers: list[tuple[int, dict[str, Any]]] = asyncio.run(play())
    return answers


ASK = {"queries": ["town7"], "topk": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({**JSON, "Origin": "https://evil.example"}, 403),
        ({**JSON, "Origin": "null"}, 403),
        ({**JSON, "Content-Encoding": "gzip"}, 400),  # which it is not
    ],
)
def test_pages_of_a_browser_are_refused(headers: dict[str, str], status: int) -> None:
    assert post(make_app(INDEX), ASK, headers)[0][0] == status


@pytest.mark.parametrize(
    ("told", "status"), [("Bearer sesame", 200), ("Bearer sesam", 401), ("sesame", 401), ("Bearer é", 401), ("", 401)]
)  # fmt: skip
def test_a_token_is_asked_for(told: str, status: int) -> None:
    headers = {**JSON, "Authorization": told} if told else JSON
    assert post(make_app(INDEX, token="sesame"), ASK, headers)[0][0] == status


def test_a_pool_knows_the_token() -> None:
    async def play(token: str) -> Any:
        async with (
            running(make_app(INDEX, token="sesame")) as address,
            RetrieverPool([address], token=token, attempts=1, deadline=20) as pool,
        ):
            return await pool("town7", 1)

    assert asyncio.run(play("sesame")) == INDEX("town7", 1)
    with pytest.raises(RetrieverUnavailable, match="401"):
        asyncio.run(play("sesam"))


@pytest.mark.parametrize(
    ("limits", "body", "status", "says"),
    [
        ({}, {"queries": ["town7"] * 4000, "topk": 1000}, 413, "are more than the 50000 of one request"),
        ({"seconds": 0.2}, {"queries": ["town7"] * 200, "topk": 1}, 413, "send fewer at a time"),
        ({"answer": 2000}, {"queries": ["river1"], "topk": 300}, 413, "ask for fewer passages"),
        ({"body": 2000}, {"queries": ["x" * 4000]}, 413, ""),
    ],
)
def test_a_request_has_a_price_limit(limits: dict[str, Any], body: Any, status: int, says: str) -> None:
    slow = Slow.build(FACTS)
    began = time.monotonic()
    answered, told = post(make_app(slow, limits=ServerLimits(**limits)), body)[0]
    assert answered == status and says in str(told)
    assert time.monotonic() - began < 5.0  # the second would take 10 s


def test_who_comes_when_all_are_busy_is_told_to_come_back() -> None:
    answers = post(
        make_app(Slow.build(FACTS), limits=ServerLimits(waiting=3)), {"queries": ["town7"] * 8}, times=8
    )
    assert sorted(status for status, _ in answers) == [200] * 3 + [503] * 5


def test_a_request_that_never_arrives_is_given_up() -> None:
    async def play() -> bytes:
        async with running(make_app(INDEX, limits=ServerLimits(seconds=0.3))) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(
                b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            )
            return await asyncio.wait_for(reader.read(100), 20)

    assert b" 408 " in asyncio.run(play())


# connections that send nothing, or not all -----------------------------------------------------------------

HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a word": b"PO",
    "half of the headers": HEAD,
    "half of the body": HEAD + b"Content-Length: 99\r\n\r\n{",
    "half of a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n{",
}


@asynccontextmanager
async def sockets(
    address: str, count: int, sends: bytes
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Connections that send these bytes and then wait."""
    port = int(address.rpartition(":")[2])
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in pairs:
        writer.write(sends)
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.transport.abort()


async def honest(address: str, times: int = 3) -> list[list[Passage]]:
    """Rows for a client that stays, and for one that comes anew, each time."""
    rows = []
    async with RetrieverPool([address], attempts=1, deadline=60, attempt=50, cache=0) as pool:
        for time_ in range(times):
            rows.append(await pool(f"town{time_}", 1))
            async with RetrieverPool([address], attempts=1, deadline=60, attempt=50) as other:
                rows.append(await other(f"town{time_}", 1))
    return rows


@pytest.mark.parametrize("sends", UNFINISHED.values(), ids=UNFINISHED)
def test_hundreds_of_idle_sockets_keep_nobody_out(sends: bytes) -> None:
    async def play() -> Any:
        async with running(make_app(INDEX)) as address, sockets(address, 400, sends):
            return await honest(address)

    assert asyncio.run(play()) == [INDEX(f"town{n}", 1) for n in range(3) for _ in range(2)]


def test_idle_sockets_do_not_use_up_the_servers_files() -> None:
    """A server that may open 256 files, 400 sockets that say nothing, and a client that must be answered."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + SERVE
    process = subprocess.Popen(
        [sys.executable, "-c", limited], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        address = process.stdout.readline().split()[-1]

        async def play() -> Any:
            async with (
                sockets(address, 400, b"GET / HTTP/1.1\r\n"),
                RetrieverPool([address], deadline=50) as pool,
            ):
                return await pool("river", 1)

        assert [row["id"] for row in asyncio.run(play())] == ["1"]
    finally:
        process.terminate()
        log = process.communicate(timeout=30)[1]
    assert "Too many open files" not in log


@pytest.mark.parametrize("sends", [*UNFINISHED.values()][:3], ids=[*UNFINISHED][:3])
def test_who_sends_no_complete_request_is_hung_up_on(sends: bytes) -> None:
    """A header's byte now and then gains nothing: the time runs from the start."""

    async def play() -> None:
        app = make_app(INDEX, limits=ServerLimits(seconds=0.5))
        async with running(app) as address, sockets(address, 3, sends) as pairs:

            async def drip(writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        writer.write(b"x")
                        await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip(pairs[0][1]))
            for reader, _ in pairs:
                with contextlib.suppress(ConnectionError):
                    assert b" 200 " not in await asyncio.wait_for(reader.read(), 30)
            dripping.cancel()

    asyncio.run(play())


def test_an_idle_connection_is_closed_after_its_answer_too() -> None:
    async def play() -> bytes:
        app = make_app(INDEX, limits=ServerLimits(idle=0.3))
        async with (
            running(app) as address,
            sockets(address, 1, b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n") as pairs,
        ):
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(pairs[0][0].readuntil(b"}"), 30) + await asyncio.wait_for(
                    pairs[0][0].read(), 30
                )
        return b""

    assert b" 200 " in asyncio.run(play())


def test_who_takes_no_answer_holds_a_place_for_a_time_only() -> None:
    """Answers of some 20 MB that nobody reads: the only place is free again when their time is over."""
    big = Bm25Index.build([Passage(id=str(n), title="", text=f"river {'x' * 20_000}") for n in range(1000)])
    body = json.dumps({"queries": ["river"], "topk": 1000}).encode()
    request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def play() -> Any:
        app = make_app(big, limits=ServerLimits(waiting=1, seconds=1.0))
        async with (
            running(app) as address,
            sockets(address, 1, request),
            RetrieverPool(
                [address],
                attempts=1000,
                backoff=0.05,
                most_backoff=0.1,
                breaker_failures=10_000,
                deadline=60,
                attempt=50,
            ) as pool,
        ):
            return await pool("river", 1)

    assert asyncio.run(play()) == big("river", 1)


def test_an_address_has_a_share_and_the_rest_are_others() -> None:
    """127.0.0.1 opens more than all places; 127.0.0.2, idle since before, is not the one to leave."""

    async def play() -> tuple[bool, list[bool]]:
        limits = ServerLimits(connections=20, connections_each=20)
        async with running(make_app(INDEX, limits=limits)) as address:
            port = int(address.rpartition(":")[2])
            other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            async with sockets(address, 60, b"") as pairs:
                await honest(address, 1)
                closed = [reader.at_eof() or reader.exception() is not None for reader, _ in pairs]
                stays = not other[0].at_eof() and other[0].exception() is None
            other[1].transport.abort()
            return stays, closed

    stays, closed = asyncio.run(play())
    assert stays and sum(closed) >= 40
    assert closed == sorted(closed, reverse=True)  # who has been idle longest leaves first


SERVE = """
import sys, time
from unitymas.envs.tools.retrieval import Bm25Index
from unitymas.envs.tools.retrieval.serving import server

class Slow(Bm25Index):
    def search_many(self, queries, k):
        time.sleep(0.2 * len(queries))
        return super().search_many(queries, k)

server.serve(Slow.build([{"id": "1", "title": "", "text": "river"}]), port=0)
"""


def test_sigterm_ends_a_server_that_is_busy(tmp_path: Path) -> None:
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        body = json.dumps({"queries": ["river"] * 4000, "topk": 10}).encode()

        def send() -> None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(address, body, JSON), timeout=60).read()

        with ThreadPoolExecutor(6) as threads:
            for _ in range(6):
                threads.submit(send)
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) is not None
    finally:
        process.kill()
        process.wait()


# the client ------------------------------------------------------------------------------------------------

Handler = Callable[[Any], Awaitable[Any]]


async def redirects(request: Any) -> Any:
    raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{request.url.port}/elsewhere")


async def bomb(request: Any) -> Any:
    import zlib

    return web.Response(body=zlib.compress(b"[" + b" " * (64 << 20)), headers={"Content-Encoding": "deflate"})


async def huge(request: Any) -> Any:
    return web.Response(body=b"[" + b" " * (4 << 20))


async def drips(request: Any) -> Any:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def long_names(request: Any) -> Any:
    return web.json_response({"x" * 1_000_000: 1})


@pytest.mark.parametrize(
    ("handler", "says"),
    [(redirects, "307"), (bomb, "compressed"), (huge, "larger than 1 MB"), (drips, "no answer within"), (long_names, "neither")],
)  # fmt: skip
def test_a_strange_server_costs_one_attempt_and_a_line(handler: Handler, says: str) -> None:
    reached: list[str] = []

    async def elsewhere(request: Any) -> Any:
        reached.append(request.headers.get("Authorization", ""))
        return web.json_response([{"top_k_docs": ["gotcha"]}])

    async def play() -> Any:
        app = web.Application()
        app.router.add_post("/retrieve", handler)
        app.router.add_post("/elsewhere", elsewhere)
        async with running(app) as address:
            pool = RetrieverPool(
                [f"{address}/retrieve"], dialect="unitymas", attempts=1, deadline=20, attempt=2.0, token="s"
            )
            async with pool:
                return await pool("town7", 5)

    with pytest.raises(RetrieverUnavailable, match=says) as failed:
        asyncio.run(play())
    assert len(str(failed.value)) < 2000 and not reached


def test_a_models_novel_is_cut_before_it_is_sent() -> None:
    async def play() -> Any:
        async with (
            running(make_app(INDEX, limits=ServerLimits(body=30_000))) as address,
            RetrieverPool([address], attempts=1, deadline=20) as pool,
        ):
            return await pool("town7 " * 100_000, 1)

    assert asyncio.run(play()) == INDEX("town7", 1)


def test_fuzz(fuzz: int) -> None:
    """Any request is answered with rows or a refusal that says why; the server's own errors (500) are none of them."""
    import aiohttp

    rng = random.Random(1609)
    keys = ["queries", "questions", "N", "topk", "return_scores", "x"]
    values: list[Any] = [
        ["town7"], [], ["a", 1], "town7", 5, 0, -1, 10**30, 1e308, True, None, {}, [[]], ["\x00\u202e"], ["x" * 9000],
    ]  # fmt: skip

    def body() -> bytes:
        raw = json.dumps({key: rng.choice(values) for key in rng.sample(keys, rng.randrange(5))}).encode()
        for _ in range(rng.choice([0, 0, 1, 3])):
            place = rng.randrange(len(raw) + 1)
            raw = (
                raw[:place]
                + rng.choice([b"\xff", b"{", b"\x00", b"\\ud800", b"[" * 500, b""])
                + raw[place + 1 :]
            )
        return raw

    async def play() -> set[int]:
        seen = set()
        async with running(make_app(INDEX)) as address, aiohttp.ClientSession() as session:
            for _ in range(fuzz):
                async with session.post(f"{address}/retrieve", data=body(), headers=JSON) as response:
                    raw = await response.read()
                    seen.add(response.status)
                    assert response.status in (200, 400, 413), raw
                    assert response.status == 200 or json.loads(raw)["error"]
        return seen

    assert {200, 400} <= asyncio.run(play())
