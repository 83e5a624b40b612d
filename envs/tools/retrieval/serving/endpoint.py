"""Client's state of one retrieval server: its address, path and dialect, and a circuit breaker.

For an address without a path, the client tries /retrieve, /query, /search and /, in both dialects, and then keeps the first
that works. Circuit breaker: after a few failures in a row, the server gets no requests for a while, and then a single one
as a test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from ..retriever import Passage
from ..wire import DIALECTS, BadAnswer, Misaligned, decode_response, encode_request

if TYPE_CHECKING:
    from aiohttp import ClientSession

PATHS = ("/retrieve", "/query", "/search", "/")
NOT_THIS_WAY = {400, 404, 405, 415, 422}  # wrong path or dialect: another one may work
LARGEST_ANSWER = 64 << 20
PASSAGE = 64 << 10  # bytes allowed for each passage of an answer, in addition to the first megabyte
LONG_ANSWER = 1 << 20  # bytes; longer ones are read in a thread


class Trouble(Exception):
    """Raised when a request to an endpoint fails. The final error contains its text."""

    def __init__(self, endpoint: Endpoint, why: str) -> None:
        super().__init__(f"{endpoint.address}: {why}")
        self.endpoint = endpoint


class _NoAnswer(Exception):
    """Raised when one request gets no usable answer."""


class Endpoint:
    """State of one server."""

    def __init__(self, address: str, dialect: str, *, breaker_failures: int, breaker_seconds: float) -> None:
        self.address = address
        self.routes = [
            (url, name) for url in _urls(address) for name in (DIALECTS if dialect == "auto" else [dialect])
        ]
        self.route: tuple[str, str] | None = self.routes[0] if len(self.routes) == 1 else None
        self.failures = 0
        self.last_error = ""
        self.closed_until = 0.0  # time before which it gets no requests
        self._probing = False
        self._breaker_failures, self._breaker_seconds = breaker_failures, breaker_seconds

    @property
    def broken(self) -> bool:
        """Flag: the circuit breaker is open."""
        return self.failures >= self._breaker_failures

    def available(self, now: float) -> bool:
        """Tell whether the server may get a request now."""
        return not self.broken or (now >= self.closed_until and not self._probing)

    async def ask(
        self,
        session: ClientSession,
        queries: Sequence[str],
        k: int,
        timeout: float,
        expected_index: str | None,
    ) -> tuple[list[list[Passage]], str | None]:
        """Return the rows for `queries`, and the fingerprint of the index that the server names. Raise Trouble on failure."""
        self._probing = self.broken
        try:
            answer = await asyncio.wait_for(self._find_answer(session, queries, k, expected_index), timeout)
        except (_NoAnswer, BadAnswer, OSError, asyncio.TimeoutError) as error:
            why = (
                f"no answer within {timeout:.2g} s"
                if isinstance(error, asyncio.TimeoutError)
                else _say(error)
            )
            self._failed(asyncio.get_running_loop().time(), why)
            raise Trouble(self, why) from error
        finally:
            self._probing = False
        self.failures, self.last_error = 0, ""
        return answer

    async def _find_answer(
        self, session: ClientSession, queries: Sequence[str], k: int, expected_index: str | None
    ) -> tuple[list[list[Passage]], str | None]:
        """Use the known path and dialect, or else try each in order."""
        refusals: list[tuple[bool, str]] = []  # "not found" last, as it says least
        for url, dialect in [self.route] if self.route else self.routes:
            largest = min(LARGEST_ANSWER, (1 << 20) + len(queries) * k * PASSAGE)
            status, headers, raw = await _post(session, url, encode_request(dialect, queries, k), largest)
            if status in NOT_THIS_WAY:
                refusals.append((status in {404, 405}, f"{url} answered {status}: {_start(raw)}"))
                continue
            if status != 200:
                raise _NoAnswer(f"{url} answered {status}: {_start(raw)}")
            index = headers.get("X-Index-Fingerprint")
            if expected_index and index and index != expected_index:
                raise _NoAnswer(f"{url} serves the index {index}, the pool began with {expected_index}")
            try:
                if len(raw) > LONG_ANSWER:
                    rows = await asyncio.to_thread(decode_response, raw, queries, k)
                else:
                    rows = decode_response(raw, queries, k)
            except BadAnswer as error:
                if self.route or isinstance(error, Misaligned):
                    raise
                refusals.append((False, f"{url}: {error}"))
                continue
            self.route = url, dialect
            return rows, index
        if len(self.routes) > 1:
            self.route = None  # the server may have been replaced by one with another dialect
        raise _NoAnswer(min(refusals, key=lambda refusal: refusal[0])[1])

    def _failed(self, now: float, why: str) -> None:
        self.failures += 1
        self.last_error = why
        if self.broken:
            self.closed_until = now + self._breaker_seconds


async def _post(
    session: ClientSession, url: str, payload: Mapping[str, object], largest: int = LARGEST_ANSWER
) -> tuple[int, Mapping[str, str], bytes]:
    """Return status, headers and body of the answer. The body has a limit, and redirects are not followed."""
    from aiohttp import ClientError

    data = json.dumps(payload).encode()
    try:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise BadAnswer(f"{url} sent a compressed answer that nobody asked for")
            parts, size = [], 0
            async for part in response.content.iter_chunked(1 << 16):
                parts.append(part)
                size += len(part)
                if size > largest:
                    raise BadAnswer(f"the answer of {url} is larger than {largest >> 20} MB")
            return response.status, response.headers, b"".join(parts)
    except ClientError as error:
        raise _NoAnswer(f"{url}: {_say(error)}") from error


def _start(raw: bytes) -> str:
    return raw[:200].decode(errors="replace")


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _urls(address: str) -> list[str]:
    """Return the addresses to try for the user's address."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ValueError(f"a retriever's address looks like http://host:port, got {address!r}")
    paths: Sequence[str] = [parts.path]
    if parts.path in {"", "/"}:
        paths = PATHS
    elif parts.path.endswith("/retrieve"):
        stem = parts.path.removesuffix("/retrieve")
        paths = [parts.path, f"{stem}/query", f"{stem}/search"]
    return [urlunsplit(parts._replace(path=path)) for path in paths]
