"""HTTP server of one index, in both dialects (wire.py): `unitymas serve retriever INDEX`.

POST to /retrieve, /query, /search or / searches. GET /health and /info describe the index. Every answer names the index in
the header X-Index-Fingerprint, so a client of several servers notices if they differ.

Clients are not trusted, so each request has limits: on its body, its queries, its passages and the size of its answer. A
search that takes too long stops between two queries. If more than `waiting` requests wait, the next one gets a status that
asks the client to retry. The number of connections is limited, and silent ones are closed first (connection_limits.py). Pages in a
browser are refused by their Origin. With a `token`, clients without it are refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .....cli.arguments import PORT, Parser
from ..retriever import Index, Passage, batches
from ..wire import SearchRequest, decode_request, encode_response
from .connection_limits import Connections, descriptors

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware
    from aiohttp.web import Application, Request, Response, StreamResponse

BATCH = 8  # queries that are searched together; the time limit is checked between two batches


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on one request, and on the number of requests and connections."""

    body: int = 4 << 20
    """Bytes of a request."""
    queries: int = 4096
    k: int = 1000
    passages: int = 50_000
    """Number of passages: queries times k."""
    answer: int = 32 << 20
    """Characters of the passages in an answer."""
    seconds: float = 10.0
    """Seconds for each step: to send the headers, to send the body, to search, to receive the answer."""
    waiting: int = 64
    """Requests that are searched or answered at the same time."""
    waiting_each: int = 48
    """Requests among these from one address."""
    connections: int = 512
    """Connections at the same time, and at most half of the files that the process may open."""
    connections_each: int = 128
    """Connections among these from one address."""
    idle: float = 60.0
    """Seconds between two requests of a connection."""


class _Refused(Exception):
    """Raised for a request beyond a limit, with the status and a remedy."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def make_app(
    index: Index, *, threads: int = 2, token: str = "", limits: ServerLimits = ServerLimits()
) -> Application:
    """Return an aiohttp application that answers from `index`. With `token`, clients must send it as a bearer token."""
    try:
        from aiohttp import web
    except ImportError as error:
        raise ModuleNotFoundError("serving needs the extra: pip install 'unitymas[serve]'") from error
    named = {"X-Index-Fingerprint": index.fingerprint}
    pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
    stopping = threading.Event()

    def refuse(status: int, why: str) -> Response:
        headers = {**named, "Retry-After": "1"} if status == 503 else named
        return web.json_response({"error": why}, status=status, headers=headers)

    async def search(request: Request) -> Response:
        try:
            raw = await request.read()  # the guard has already waited for it
            asked = decode_request(json.loads(raw), most_queries=limits.queries, most_k=limits.k)
        except (ValueError, RecursionError) as error:
            return refuse(400, str(error))
        try:
            run = asyncio.get_running_loop().run_in_executor
            body = await run(pool, _answer, index, asked, limits, stopping)
        except _Refused as error:
            return refuse(error.status, str(error))
        return web.Response(body=body, content_type="application/json", headers=named)

    async def info(_: object) -> Response:
        facts = {
            "status": "ok",
            "kind": type(index).__name__,
            "passages": len(index),
            "fingerprint": index.fingerprint,
        }
        return web.json_response(facts, headers=named)

    async def halt(_: object) -> None:
        stopping.set()

    async def stop(_: object) -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    connections = Connections(
        most=limits.connections, most_each=limits.connections_each, slots=limits.waiting,
        slots_each=limits.waiting_each, first=limits.seconds, idle=limits.idle,
    )  # fmt: skip
    guard = _guard(refuse, token, limits, connections)
    app = web.Application(client_max_size=limits.body, middlewares=[guard])
    connections.watch(app)
    for path in ("/retrieve", "/query", "/search", "/"):
        app.router.add_post(path, search)
    for path in ("/health", "/info"):
        app.router.add_get(path, info)
    app.on_shutdown.append(halt)
    app.on_cleanup.append(stop)
    return app


def _guard(
    refuse: Callable[[int, str], Response], token: str, limits: ServerLimits, connections: Connections
) -> Middleware:
    """Return the middleware that checks every request before any work. The body and the answer have time limits."""
    from aiohttp import web

    secret = f"Bearer {token}".encode()
    full = f"{limits.waiting} requests are under way, or too many of yours; ask again in a moment"

    def stranger(request: Request) -> Response | None:
        """Return a refusal because of the headers, or None."""
        if "Origin" in request.headers:
            return refuse(403, "this server answers programs, not the pages of a browser (Origin)")
        told = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(told, secret):
            return refuse(401, "send the server's token: Authorization: Bearer …")
        if request.method == "POST" and request.content_type != "application/json":
            return refuse(415, "send JSON, with Content-Type: application/json")
        return None if connections.has_slot(request.protocol) else refuse(503, full)

    async def arrived(request: Request) -> Response | None:
        """Read the body. Return a refusal if it does not arrive."""
        try:
            await asyncio.wait_for(request.read(), limits.seconds)
        except asyncio.TimeoutError:
            return refuse(408, f"the request did not arrive within {limits.seconds:g} s")
        except (web.RequestPayloadError, ConnectionError) as error:  # a client that disconnects
            return refuse(400, str(error))
        return None

    @web.middleware
    async def guard(request: Request, handler: Handler) -> StreamResponse:
        with connections.request(request.protocol):
            if refusal := stranger(request) or await arrived(request):
                return refusal
            with connections.slot(request.protocol) as free:
                if not free:
                    return refuse(503, full)
                response = await handler(request)
                await _send(request, response, limits.seconds)  # here, so that the request keeps its slot
                return response

    return guard


async def _send(request: Request, response: StreamResponse, seconds: float) -> None:
    """Send an answer. A client that does not receive it in time is disconnected."""
    await response.prepare(request)
    try:
        await asyncio.wait_for(response.write_eof(), seconds)
    except asyncio.TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _answer(index: Index, asked: SearchRequest, limits: ServerLimits, stopping: threading.Event) -> bytes:
    """Return the body of an answer. This runs in a thread, few queries at a time, to check time, size and the server's end."""
    if len(asked.queries) * asked.k > limits.passages:
        raise _Refused(
            413,
            f"{len(asked.queries)} queries of {asked.k} passages are more than the {limits.passages} of one request",
        )
    end, left = time.monotonic() + limits.seconds, limits.answer
    rows: list[list[tuple[Passage, float]]] = []
    for queries in batches(asked.queries, BATCH):
        if stopping.is_set():
            raise _Refused(503, "the server is stopping")
        if time.monotonic() > end:
            raise _Refused(
                413,
                f"{len(rows)} of {len(asked.queries)} queries took {limits.seconds:g} s; send fewer at a time",
            )
        for hits in index.search_many(queries, asked.k):
            row = []
            for hit in hits:
                passage = index.passage(hit.position)
                left -= len(passage["text"]) + len(passage["title"]) + 100
                if left < 0:
                    raise _Refused(
                        413, f"the answer is larger than {limits.answer >> 20} MB; ask for fewer passages"
                    )
                row.append((passage, hit.score))
            rows.append(row)
    return json.dumps(encode_response(asked, rows)).encode()


def serve(
    index: Index, host: str = "127.0.0.1", port: int = 8000, *, threads: int = 2, token: str = ""
) -> None:
    """Serve `index` until interrupted. Port 0 selects a free port, which is printed."""
    asyncio.run(_serve(index, host, port, threads, token))


async def _serve(index: Index, host: str, port: int, threads: int, token: str = "") -> None:
    import signal

    app = make_app(index, threads=threads, token=token)
    from aiohttp import web

    quiet = logging.getLogger("unitymas.retrieval.requests")
    quiet.addFilter(_is_our_fault)
    runner = web.AppRunner(app, access_log=None, logger=quiet, shutdown_timeout=2.0)
    await runner.setup()
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    try:
        together = min(128, descriptors() // 4)  # connections accepted before any of them can be closed
        await web.TCPSite(runner, host, port, backlog=together).start()
        address = runner.addresses[0]
        print(
            f"serving {len(index):,} passages ({index.fingerprint}) at http://{address[0]}:{address[1]}",
            flush=True,
        )
        await stopped.wait()
    finally:
        await runner.cleanup()


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Tell whether a log record belongs in the log. Requests that are not HTTP do not, so a client cannot fill it."""
    from aiohttp.http_exceptions import HttpProcessingError

    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def serve_main(argv: Sequence[str] | None = None) -> int:
    """Run `unitymas serve retriever INDEX`."""
    from ..index.build import open_index

    parser = Parser(prog="unitymas serve", description="Serve an index over HTTP.")
    parser.add_argument("what", choices=["retriever"], help="what is served")
    parser.add_argument("index", help="a directory made by `unitymas data index`")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (0.0.0.0: reachable from outside)"
    )
    parser.add_argument("--port", type=PORT, default=8000, help="the port to listen on (default 8000)")
    parser.add_argument("--threads", type=int, default=2, help="largest number of searches at the same time")
    parser.add_argument(
        "--token-file", type=Path, help="a file with a secret that clients must send (Authorization: Bearer)"
    )
    options = parser.parse_args(argv)
    token = options.token_file.read_text().strip() if options.token_file else ""
    if options.token_file and not token:
        parser.error(f"{options.token_file} is empty")
    serve(open_index(options.index), options.host, options.port, threads=options.threads, token=token)
    return 0
