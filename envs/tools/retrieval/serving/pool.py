"""Client of one or several retrieval servers, which may fail and return.

    pool = RetrieverPool(["http://node1:8000", "http://node2:8000"])
    rows = await pool.aretrieve_many(["who …", "where …"], 5)

A batch is cut into requests. A failed request is retried, on another server if there is one, until it has exactly one row
for each query or the deadline passes. Rows keep the order of the queries, no matter which server answers. `pool(query, k)`
is async, and can be the `retrieve` tool of a workflow. `pool.retrieve_many` is for code without an event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import weakref
from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...tool import Infrastructure, background
from ..retriever import Passage, RetrievalError, check_k, check_queries
from ..wire import DIALECTS
from .endpoint import Endpoint, Trouble
from .memo import AnswerCache, copied

if TYPE_CHECKING:
    from aiohttp import ClientSession

LONGEST_QUERY = 10_000  # characters of a query, which a model writes; a longer one is cut


class RetrieverUnavailable(RetrievalError, Infrastructure):
    """Raised when no server answers. It is a failure of the infrastructure, so the episode ends and is never trained."""


class RetrieverPool:
    """Client of several servers of one index.

    endpoints: addresses such as "http://host:8000"; without a path the usual ones are tried.
    dialect: "unitymas", "search-r1", or "auto", which tries both.
    choice: "sticky" stays with a server while it works; "random" spreads the load.
    deadline: seconds until a call gives up, all retries included.
    attempt: seconds that one request may take.
    attempts: requests per part of a batch before giving up; every server is tried at least once.
    backoff, most_backoff: the first and the longest pause before asking again, in seconds; pauses are jittered.
    breaker_failures, breaker_seconds: failures in a row after which a server gets no requests, and for how long.
    batch: queries per request.
    concurrency: largest number of requests at the same time.
    cache: an AnswerCache, or its capacity; 0 for none.
    fingerprint: fingerprint of the index, if known; the default is made from the addresses.
    token: secret of the servers, sent as a bearer token.
    seed: makes the choice of servers repeatable. With different seeds, workers spread over the servers.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        dialect: str = "auto",
        choice: str = "sticky",
        deadline: float = 30.0,
        attempt: float = 5.0,
        attempts: int = 5,
        backoff: float = 0.1,
        most_backoff: float = 2.0,
        breaker_failures: int = 3,
        breaker_seconds: float = 5.0,
        batch: int = 64,
        concurrency: int = 32,
        cache: AnswerCache | int = 100_000,
        fingerprint: str | None = None,
        token: str = "",
        seed: int = 0,
    ) -> None:
        options = {name: value for name, value in locals().items() if name != "self"}
        # a pickle makes a new pool, because connections cannot be pickled
        self._again = partial(RetrieverPool, **options)
        _check_choices(endpoints, dialect, choice, batch, concurrency)
        self.endpoints = [
            Endpoint(address, dialect, breaker_failures=breaker_failures, breaker_seconds=breaker_seconds)
            for address in endpoints
        ]
        self.choice, self.deadline, self.attempt = choice, deadline, attempt
        self.attempts = max(attempts, len(self.endpoints))
        self._token = token
        self.backoff, self.most_backoff = backoff, most_backoff
        self.batch, self.concurrency = batch, concurrency
        self.cache = AnswerCache(cache) if isinstance(cache, int) else cache
        addresses = hashlib.sha256("\n".join(sorted(endpoints)).encode()).hexdigest()[:16]
        self.fingerprint = fingerprint or f"http-{addresses}"
        self._served: str | None = None  # the index that the servers name: it must be the same
        self._chance = random.Random(seed)
        self._favourite = seed % len(self.endpoints)
        self._loops: MutableMapping[asyncio.AbstractEventLoop, tuple[ClientSession, asyncio.Semaphore]] = (
            weakref.WeakKeyDictionary()
        )

    async def __call__(self, query: str, k: int) -> list[Passage]:
        return (await self.aretrieve_many([query], k))[0]

    async def aretrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the passages for every query, in order. Blank queries have none. Raise RetrieverUnavailable on failure."""
        check_k(k)
        check_queries(queries)
        queries = [query[:LONGEST_QUERY] for query in queries]
        answers: dict[str, list[Passage]] = {}
        for query in dict.fromkeys(queries):
            answer = self.cache.get(self.fingerprint, query, k) if query.strip() else []
            if answer is not None:
                answers[query] = answer
        missing = [query for query in dict.fromkeys(queries) if query not in answers]
        parts = [missing[start : start + self.batch] for start in range(0, len(missing), self.batch)]
        end = asyncio.get_running_loop().time() + self.deadline
        # Answers of the successful parts are stored even if another part fails, so a retry requests only the rest.
        results = await asyncio.gather(
            *(self._answer(part, k, end) for part in parts), return_exceptions=True
        )
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            answers.update(zip(part, result, strict=True))
        return [copied(answers[query]) for query in queries]

    def retrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return the result of `aretrieve_many`, for code without an event loop."""
        rows: list[list[Passage]] = background(self.aretrieve_many(queries, k)).result()
        return rows

    async def health(self, timeout: float = 2.0) -> dict[str, str]:
        """Test every server. Return "ok" or the fault for each address. Servers that answer are used again."""
        session, _ = self._connect()

        async def probe(endpoint: Endpoint) -> str:
            try:
                await endpoint.ask(session, ["health"], 1, timeout, self._served)
            except Trouble as trouble:
                return str(trouble)
            return "ok"

        says = await asyncio.gather(*map(probe, self.endpoints))
        return {endpoint.address: state for endpoint, state in zip(self.endpoints, says, strict=True)}

    async def close(self) -> None:
        """Close this event loop's connections."""
        session, _ = self._loops.pop(asyncio.get_running_loop(), (None, None))
        if session is not None:
            await session.close()

    async def __aenter__(self) -> RetrieverPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return self._again, ()

    async def _answer(self, queries: list[str], k: int, end: float) -> list[list[Passage]]:
        """Return the rows of one request, with retries until it succeeds, attempts run out, or the time `end` is reached."""
        session, slots = self._connect()
        clock = asyncio.get_running_loop().time
        troubles: list[str] = []
        failed: set[Endpoint] = set()  # since the last pause: any other server is tried without a pause
        while len(troubles) < self.attempts and clock() < end:
            try:
                await asyncio.wait_for(slots.acquire(), end - clock())
            except asyncio.TimeoutError:
                break  # all of the time passed while other requests ran
            try:
                # after the slot is taken, because a probe must follow at once
                endpoint = self._choose(clock(), failed)
                if endpoint is not None:
                    timeout = min(self.attempt, end - clock())
                    rows, served = await endpoint.ask(session, queries, k, timeout, self._served)
                    self._keep(endpoint, served, queries, k, rows)
                    return rows
            except Trouble as trouble:
                troubles.append(str(trouble))
                failed.add(trouble.endpoint)
                continue
            finally:
                slots.release()
            failed.clear()
            pause = self._pause(len(troubles), clock())
            if clock() + pause >= end:
                break
            await asyncio.sleep(pause)
        raise self._give_up(len(queries), troubles)

    def _keep(
        self, endpoint: Endpoint, served: str | None, queries: list[str], k: int, rows: list[list[Passage]]
    ) -> None:
        """Store the answers and the index of a successful request."""
        self._served = self._served or served
        self._favourite = self.endpoints.index(endpoint)
        for query, row in zip(queries, rows, strict=True):
            self.cache.put(self.fingerprint, query, k, row)

    def _choose(self, now: float, failed: set[Endpoint]) -> Endpoint | None:
        """Return a server for the next request, or None if a pause is due."""
        count = len(self.endpoints)
        in_turn = [self.endpoints[(self._favourite + step) % count] for step in range(count)]
        able = [endpoint for endpoint in in_turn if endpoint not in failed and endpoint.available(now)]
        if not able:
            return None
        return able[0] if self.choice == "sticky" else self._chance.choice(able)

    def _pause(self, failures: int, now: float) -> float:
        """Return the seconds to wait: back-off with jitter, and at least until one server may get requests again."""
        longest = min(self.most_backoff, self.backoff * 2.0 ** max(0, failures - 1))
        opening = min((one.closed_until if one.broken else now) for one in self.endpoints)
        return max(longest * self._chance.uniform(0.5, 1.0), opening - now)

    def _give_up(self, queries: int, troubles: list[str]) -> RetrieverUnavailable:
        if len(troubles) < self.attempts:
            reason = f"no time is left of the deadline of {self.deadline:g} s"
        else:
            reason = f"{len(troubles)} attempts failed"
        alone = [f"{one.address}: left alone after: {one.last_error}" for one in self.endpoints if one.broken]
        reports = "\n  ".join(troubles or alone)
        return RetrieverUnavailable(
            f"no retriever answered {queries} queries: {reason}\n  {reports}\n"
            "Start one with `unitymas serve retriever INDEX`, or correct the addresses."
        )

    def _connect(self) -> tuple[ClientSession, asyncio.Semaphore]:
        """Return the session of this event loop, and its slots for requests."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            try:
                import aiohttp
            except ImportError as error:
                raise ModuleNotFoundError(
                    "retrieval over HTTP needs the extra: pip install 'unitymas[serve]'"
                ) from error
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Authorization": f"Bearer {self._token}"} if self._token else None,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            self._loops[loop] = session, asyncio.Semaphore(self.concurrency)
        return self._loops[loop]


def _check_choices(endpoints: Sequence[str], dialect: str, choice: str, batch: int, concurrency: int) -> None:
    if isinstance(endpoints, str) or not endpoints:
        raise ValueError(f"endpoints must be a list of at least one address, got {endpoints!r}")
    if dialect not in {"auto", *DIALECTS}:
        raise ValueError(f"dialect must be 'auto', {' or '.join(map(repr, DIALECTS))}; got {dialect!r}")
    if choice not in {"sticky", "random"}:
        raise ValueError(f"choice must be 'sticky' or 'random', got {choice!r}")
    if batch < 1 or concurrency < 1:
        raise ValueError(f"batch and concurrency must be at least 1, got {batch} and {concurrency}")
