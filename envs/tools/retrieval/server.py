"""One index behind HTTP, in both dialects (wire.py): `unitymas serve retriever INDEX`.

POST /retrieve, /query, /search or / searches; GET /health and /info say what is served. Every answer names the
index in the header X-Index-Fingerprint, so that a client of several servers notices when they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....hints import counted
from .base import Index
from .wire import decode_request, encode_response

MOST_QUERIES = 4096
MOST_K = 1000
LARGEST_REQUEST = 16 << 20


def make_app(index: Index, *, threads: int = 2) -> Any:
    """An aiohttp application that answers from `index`."""
    web = _web()
    app = web.Application(client_max_size=LARGEST_REQUEST)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
    named = {"X-Index-Fingerprint": index.fingerprint}

    async def search(request: Any) -> Any:
        try:
            asked = decode_request(json.loads(await request.read()), most_queries=MOST_QUERIES, most_k=MOST_K)
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400, headers=named)
        rows = await asyncio.get_running_loop().run_in_executor(pool, _rows, index, asked.queries, asked.k)
        return web.json_response(encode_response(asked, rows), headers=named)

    async def info(_: Any) -> Any:
        facts = {
            "status": "ok",
            "kind": type(index).__name__,
            "passages": len(index),
            "fingerprint": index.fingerprint,
        }
        return web.json_response(facts, headers=named)

    async def stop(_: Any) -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    for path in ("/retrieve", "/query", "/search", "/"):
        app.router.add_post(path, search)
    for path in ("/health", "/info"):
        app.router.add_get(path, info)
    app.on_cleanup.append(stop)
    return app


def serve(index: Index, host: str = "127.0.0.1", port: int = 8000, *, threads: int = 2) -> None:
    """Serve `index` until interrupted. Port 0 takes a free one; the line printed says which."""
    asyncio.run(_serve(index, host, port, threads))


async def _serve(index: Index, host: str, port: int, threads: int) -> None:
    import signal

    web = _web()
    runner = web.AppRunner(make_app(index, threads=threads), access_log=None)
    await runner.setup()
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        print(
            f"serving {counted(len(index), 'passage')} ({index.fingerprint}) at http://{address[0]}:{address[1]}",
            flush=True,
        )
        await stopped.wait()
    finally:
        await runner.cleanup()


def serve_main(argv: Sequence[str] | None = None) -> int:
    """`unitymas serve retriever INDEX`."""
    from .build import open_index

    parser = argparse.ArgumentParser(prog="unitymas serve", description="Serve an index over HTTP.")
    parser.add_argument("what", choices=["retriever"])
    parser.add_argument("index", help="a directory made by `unitymas data index`")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (0.0.0.0: reachable from outside)"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2, help="batches searched at once")
    options = parser.parse_args(argv)
    serve(open_index(options.index), options.host, options.port, threads=options.threads)
    return 0


def _rows(index: Index, queries: Sequence[str], k: int) -> list[list[Any]]:
    return [
        [(index.passage(hit.position), hit.score) for hit in hits] for hits in index.search_many(queries, k)
    ]


def _web() -> Any:
    try:
        from aiohttp import web
    except ImportError as error:
        raise ModuleNotFoundError("serving needs the extra: pip install 'unitymas[serve]'") from error
    return web
