"""The HTTP pool and the server: both dialects, and every fault a server can have."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from unitymas.envs.tools import Infrastructure, Tool
from unitymas.envs.tools.retrieval import (
    AnswerCache,
    Bm25Index,
    Passage,
    RetrievalError,
    RetrieverPool,
    RetrieverUnavailable,
    make_app,
)
from unitymas.envs.tools.retrieval.wire import (
    BadAnswer,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    read_passage,
)

web = pytest.importorskip("aiohttp.web")
QUICK: dict[str, Any] = {"deadline": 60.0, "backoff": 0.01, "most_backoff": 0.05, "breaker_seconds": 0.2}
FACTS = [Passage(id=str(n), title=f"Town {n}", text=f"town{n} lies on the river{n % 7}") for n in range(300)]
QUESTIONS = [f"town{n}" for n in range(300)]
INDEX = Bm25Index.build(FACTS)
EXPECTED = INDEX.retrieve_many(QUESTIONS, 1)

Handler = Callable[[Any], Awaitable[Any]]


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[str]:
    """The address of a server in this process."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def app_of(handler: Handler, path: str = "/retrieve") -> Any:
    app = web.Application()
    app.router.add_post(path, handler)
    return app


def ask(apps: list[Any], work: Callable[[RetrieverPool], Awaitable[Any]], **options: Any) -> Any:
    """Run `work` on a pool of these servers."""

    async def play() -> Any:
        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(running(app)) for app in apps]
            async with RetrieverPool(addresses, **{**QUICK, **options}) as pool:
                return await work(pool)

    return asyncio.run(play())


async def ask_all(pool: RetrieverPool) -> list[list[Passage]]:
    return await pool.aretrieve_many(QUESTIONS, 1)


# the faults ----------------------------------------------------------------------------------------------------


async def hang(request: Any) -> Any:
    await asyncio.sleep(60)


async def garbage(request: Any) -> Any:
    return web.Response(body=b"<html>\xff not json")


async def wrong_json(request: Any) -> Any:
    return web.json_response({"surprise": 1})


async def deep_json(request: Any) -> Any:
    return web.Response(body=b"[" * 100_000)


async def failing(request: Any) -> Any:
    return web.Response(status=503, text="overloaded")


async def fewer_rows(request: Any) -> Any:
    asked = decode_request(await request.json(), most_queries=9999, most_k=99)
    rows = encode_response(asked, [[] for _ in asked.queries])
    return web.json_response(rows[:-1] if isinstance(rows, list) else {"result": rows["result"][:-1]})


async def shifted_rows(request: Any) -> Any:
    asked = decode_request(await request.json(), most_queries=9999, most_k=99)
    rows = encode_response(
        asked, [[(passage, 1.0) for passage in INDEX(query, 1)] for query in asked.queries]
    )
    if isinstance(rows, list):
        return web.json_response(rows[1:] + rows[:1])
    return web.json_response({key: row[1:] + row[:1] for key, row in rows.items()})


async def cut_off(request: Any) -> Any:
    response = web.StreamResponse(headers={"Content-Length": "100000"})
    await response.prepare(request)
    await response.write(b'[{"top_k_docs": [')
    request.transport.abort()
    return response


def patience(fault: Handler) -> dict[str, float]:
    """Only where an answer never comes is it worth giving up soon: a busy machine may be slow with the others."""
    return {"attempt": 0.3 if fault is hang else 30.0}


FAULTS = [hang, garbage, wrong_json, deep_json, failing, fewer_rows, shifted_rows, cut_off]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("dialect", ["auto", "unitymas", "search-r1"])
@pytest.mark.parametrize("choice", ["sticky", "random"])
def test_a_faulty_server_beside_a_good_one(fault: Handler, choice: str, dialect: str) -> None:
    rows = ask(
        [app_of(fault), make_app(INDEX)], ask_all, choice=choice, dialect=dialect, batch=30, **patience(fault)
    )
    assert rows == EXPECTED


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_server_alone_is_a_clear_error(fault: Handler) -> None:
    says = {
        "hang": "no answer within",
        "garbage": "not JSON",
        "wrong_json": "surprise",
        "deep_json": "not JSON",
        "failing": "503: overloaded",
        "fewer_rows": "299 rows came back",
        "shifted_rows": "where 'town0' was asked",
        "cut_off": "/retrieve",
    }[fault.__name__]
    with pytest.raises(RetrieverUnavailable, match=says) as caught:
        ask([app_of(fault)], ask_all, batch=300, attempts=3, **patience(fault))
    assert isinstance(caught.value, Infrastructure) and isinstance(caught.value, RetrievalError)
    assert "127.0.0.1" in str(caught.value) and "unitymas serve retriever" in str(caught.value)


def test_the_deadline_holds_while_servers_hang() -> None:
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match="no time is left of the deadline of 0.7 s"):
        ask([app_of(hang)] * 2, ask_all, batch=1, concurrency=3, deadline=0.7, attempt=0.3)
    assert time.monotonic() - start < 10


def test_nobody_listens() -> None:
    with pytest.raises(RetrieverUnavailable, match="127.0.0.1:9"):
        RetrieverPool(["http://127.0.0.1:9"], **QUICK).retrieve_many(["town1"], 1)


SERVE = (
    "from unitymas.envs.tools.retrieval import serve_main; serve_main(['retriever', {path!r}, '--port', '0'])"
)


def start_server(path: Path) -> tuple[subprocess.Popen[str], str]:
    """A real server process, and its address as it prints it."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(path=str(path))], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    assert "serving 300 passages" in line
    return server, line.split()[-1]


def test_servers_killed_in_mid_batch(tmp_path: Path) -> None:
    """Two real servers; the favourite is killed (-9) while its requests are under way. All rows come, all right."""
    Bm25Index.build(FACTS, tmp_path / "index")
    servers = [start_server(tmp_path / "index") for _ in range(2)]

    async def play() -> list[list[Passage]]:
        pool = RetrieverPool([address for _, address in servers], batch=1, concurrency=4, **QUICK)
        async with pool:
            asking = asyncio.create_task(pool.aretrieve_many(QUESTIONS * 3, 1))
            while len(pool.cache) < 20:
                await asyncio.sleep(0.001)
            servers[0][0].kill()
            assert not asking.done()
            rows = await asking
            assert pool.endpoints[0].failures > 0
            return rows

    try:
        assert asyncio.run(play()) == EXPECTED * 3
        servers[1][0].send_signal(signal.SIGTERM)
        assert servers[1][0].wait(10) == 0  # a polite end
    finally:
        for server, _ in servers:
            server.kill()
            server.wait()


# the breaker, the cache, the clock --------------------------------------------------------------------------------


def test_the_breaker_leaves_a_server_alone_then_probes_it() -> None:
    calls: list[float] = []
    healed = False

    async def sick(request: Any) -> Any:
        calls.append(time.monotonic())
        return web.Response(status=500) if not healed else await good(request)

    async def good(request: Any) -> Any:
        asked = decode_request(await request.json(), most_queries=9, most_k=9)
        return web.json_response(encode_response(asked, [[] for _ in asked.queries]))

    async def work(pool: RetrieverPool) -> None:
        nonlocal healed
        for number in range(20):
            pool._favourite = 0
            await pool.aretrieve_many([f"town{number}"], 1)
        assert len(calls) == 3  # then it was left alone
        healed, pool._favourite = True, 0
        pool.endpoints[0].closed_until = 0.0  # the time has passed
        await asyncio.gather(*(pool.aretrieve_many([f"again {number}"], 1) for number in range(3)))
        assert len(calls) == 4  # one probe, not three
        assert not pool.endpoints[0].broken

    ask([app_of(sick), make_app(INDEX)], work, breaker_seconds=600.0)


def test_all_broken_then_one_recovers_within_the_deadline() -> None:
    start = time.monotonic()

    async def late(request: Any) -> Any:
        if time.monotonic() - start < 0.6:
            return web.Response(status=500)
        asked = decode_request(await request.json(), most_queries=999, most_k=9)
        return web.json_response(
            encode_response(asked, [[(p, 1.0) for p in INDEX(q, 1)] for q in asked.queries])
        )

    assert ask([app_of(late)], ask_all, attempts=50) == EXPECTED


def test_answers_are_cached_deduplicated_and_unspoiled() -> None:
    asked: list[str] = []

    async def counting(request: Any) -> Any:
        body = decode_request(await request.json(), most_queries=999, most_k=9)
        asked.extend(body.queries)
        return web.json_response(encode_response(body, [[(FACTS[0], 1.0)] for _ in body.queries]))

    async def work(pool: RetrieverPool) -> None:
        rows = await pool.aretrieve_many(["a", "b", " ", "a"], 1)
        rows[0][0]["text"] = "spoiled"
        assert rows[3] == [FACTS[0]] and rows[2] == []
        assert await pool("a", 1) == [FACTS[0]]
        await pool("a", 2)  # another k is another question

    ask([app_of(counting)], work)
    assert asked == ["a", "b", "a"]


def test_the_cache_forgets_the_oldest() -> None:
    cache = AnswerCache(2)
    for query in "abc":
        cache.put("index", query, 1, [])
        cache.get("index", "a", 1)
    assert [cache.get("index", query, 1) for query in "abc"] == [[], None, []]
    assert cache.get("other", "a", 1) is None and len(cache) == 2
    assert pickle.loads(pickle.dumps(cache)).capacity == 2


def test_servers_of_different_indexes_are_not_mixed() -> None:
    other = Bm25Index.build(FACTS[:10])

    async def work(pool: RetrieverPool) -> None:
        await pool("town1", 1)
        pool.endpoints[0].failures = 99
        pool.endpoints[0].closed_until = float("inf")
        await pool("town2", 1)

    with pytest.raises(RetrieverUnavailable, match="serves the index .*, the pool began with"):
        ask([make_app(INDEX), make_app(other)], work, deadline=0.5)


def test_random_choice_spreads_and_sticky_stays() -> None:
    for choice, least in (("random", 10), ("sticky", 0)):
        counts = [0, 0]

        def counted(place: int, counts: list[int]) -> Handler:
            async def handle(request: Any) -> Any:
                counts[place] += 1
                return web.json_response([{"top_k_docs": []}])

            return handle

        ask([app_of(counted(0, counts)), app_of(counted(1, counts))], ask_all, choice=choice, batch=1)
        assert sum(counts) == 300 and min(counts) >= least and (choice == "random" or counts == [300, 0])


def test_a_pool_travels_and_works_without_a_loop() -> None:
    with multiprocessing.get_context("spawn").Pool(
        1
    ):  # a pool has no state that keeps it from another process
        pool = RetrieverPool(["host:1", "http://host:2/retrieve"], choice="random", seed=3)
        copy = pickle.loads(pickle.dumps(pool))
    assert copy.fingerprint == pool.fingerprint and copy.choice == "random" and len(copy.endpoints) == 2
    assert [url for url, _ in copy.endpoints[1].routes][::2] == [
        f"http://host:2/{p}" for p in ("retrieve", "query", "search")
    ]
    assert Tool(pool).is_async


def test_health_says_what_is_wrong_with_each() -> None:
    says = list(ask([make_app(INDEX), app_of(failing)], lambda pool: pool.health()).values())
    assert says[0] == "ok" and "503" in says[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoints": []}, "at least one"),
        ({"endpoints": "http://x"}, "list"),
        ({"dialect": "french"}, "french"),
        ({"choice": "best"}, "sticky"),
        ({"endpoints": ["ftp://x"]}, "http://host:port"),
        ({"batch": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RetrieverPool(**{"endpoints": ["http://x"], **options})


# the dialects ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["unitymas", "search-r1"])
@pytest.mark.parametrize("scores", [False, True])
def test_requests_and_responses_round_trip(dialect: str, scores: bool) -> None:
    passages = [
        Passage(id="1", title='A "quoted"\ntitle', text="line\nline"),
        Passage(id="2", title="", text="x"),
    ]
    body = encode_request(dialect, ["q", "r"], 3) | (
        {"return_scores": scores} if dialect == "search-r1" else {}
    )
    asked = decode_request(json.loads(json.dumps(body)), most_queries=9, most_k=9)
    assert (asked.queries, asked.k, asked.dialect) == (("q", "r"), 3, dialect)
    answer = encode_response(asked, [[(passage, 0.5) for passage in passages], []])
    assert decode_response(json.dumps(answer).encode(), ["q", "r"], 3) == [passages, []]


@pytest.mark.parametrize(
    "doc",
    [
        "The text.",
        {"text": "The text."},
        {"content": "The text."},
        {"contents": "The text."},
        {"document": "The text."},
        {"document": {"contents": "The text."}, "score": 1.0},
    ],
)
def test_foreign_passages_are_read(doc: Any) -> None:
    found = read_passage(doc)
    assert found["text"] == "The text." and found["id"].startswith("text-")


def test_search_r1_contents_carry_the_title() -> None:
    assert read_passage({"id": 7, "contents": '"Fritz Lang"\nA director.'}) == Passage(
        id="7", title="Fritz Lang", text="A director."
    )


@pytest.mark.parametrize(
    "body",
    [[{"top_k_docs": ["x"]}], {"result": [["x"]]}, {"top_k_docs": ["x"]}, {"top_k_docs": [["x"]]}, [["x"]]],
)
def test_foreign_answers_are_read(body: Any) -> None:
    assert [
        [found["text"] for found in row] for row in decode_response(json.dumps(body).encode(), ["q"], 5)
    ] == [["x"]]


@pytest.mark.parametrize(
    "body", [3, None, {}, [3], [["x"], ["y"]], [[3]], [{"top_k_docs": 3}], [[{"title": "x"}]]]
)
def test_nonsense_answers_are_refused(body: Any) -> None:
    with pytest.raises(BadAnswer):
        decode_response(json.dumps(body).encode(), ["q"], 5)


@pytest.mark.parametrize(
    ("path", "dialect"), [("/retrieve", "search-r1"), ("/search", "search-r1"), ("/", "unitymas")]
)
def test_the_pool_finds_path_and_dialect(path: str, dialect: str) -> None:
    tried: list[str] = []

    async def picky(request: Any) -> Any:
        body = await request.json()
        tried.append(path)
        if ("queries" in body) != (dialect == "search-r1"):
            return web.json_response({"detail": "field required"}, status=422)
        asked = decode_request(body, most_queries=999, most_k=9)
        return web.json_response(
            encode_response(asked, [[(p, 1.0) for p in INDEX(q, 1)] for q in asked.queries])
        )

    rows = ask([app_of(picky, path)], ask_all, batch=100, concurrency=1)
    assert rows == EXPECTED and len(tried) <= 4  # what worked is kept


# the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("[]", "send"),
        ("nonsense", "Expecting value"),
        ("{}", "send"),
        ('{"queries": ["a"], "questions": ["a"]}', "send"),
        ('{"queries": "a"}', "list of strings"),
        ('{"queries": [1]}', "list of strings"),
        ("[" * 9999, "recursion"),
        ('{"questions": ["a"], "N": 0}', "N must be"),
        ('{"queries": ["a"], "topk": 99999}', "topk must be"),
        (json.dumps({"queries": ["a"] * 5000}), "4096 at a time"),
    ],
)
def test_bad_requests_are_explained(body: str, says: str) -> None:
    import aiohttp

    async def play() -> tuple[int, str]:
        async with (
            running(make_app(INDEX)) as address,
            aiohttp.ClientSession() as session,
            session.post(
                f"{address}/retrieve", data=body, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            return response.status, (await response.json())["error"]

    status, error = asyncio.run(play())
    assert status == 400 and says in error


def test_the_server_says_what_it_serves() -> None:
    import aiohttp

    async def play() -> Any:
        async with (
            running(make_app(INDEX)) as address,
            aiohttp.ClientSession() as session,
            session.get(f"{address}/health") as response,
        ):
            return await response.json()

    facts = asyncio.run(play())
    assert facts["status"] == "ok" and facts["passages"] == 300 and facts["fingerprint"] == INDEX.fingerprint


WITHOUT_AIOHTTP = """
import sys
sys.modules["aiohttp"] = None
from unitymas.envs.tools.retrieval import Bm25Index, RetrieverPool, make_app
index = Bm25Index.build([{"id": "1", "title": "", "text": "river"}])
assert index("river", 1)
for use in (lambda: RetrieverPool(["http://x"]).retrieve_many(["river"], 1), lambda: make_app(index)):
    try:
        use()
    except ImportError as error:
        assert "unitymas[serve]" in str(error)
    else:
        raise SystemExit("no error")
assert not {"torch", "faiss", "datasets", "pyarrow", "bm25s"} & set(sys.modules)
"""


def test_an_index_needs_no_aiohttp_and_loads_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_AIOHTTP], check=True, env={**os.environ}, timeout=60)
