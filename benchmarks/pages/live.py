"""Live view of a run: its report and its episodes on a local server, refreshed while they are open.

    unitymas view runs/mask-1 --live       until Ctrl-C
    unitymas train … --watch               while the run lasts

The server is bound to 127.0.0.1 and only reads. Pages ask it every two seconds for changes, and apply them without closing
what the reader has open. A page is built on request, from the files that the run has written so far.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from ...agents.basics.hints import counted
from . import report, viewer
from .html import escape, page

QUIET = 120.0
"""Seconds without a new line after which a run may have been killed. With long steps, the limit is longer."""


class LiveRun:
    """Current state of a run's directory. Its pages are built once for each change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pages: dict[str, tuple[str, bytes]] = {}
        self._lock = threading.Lock()

    def stamp(self) -> str:
        """Return a stamp that changes with every file of the pages."""
        files = [self.folder / "metrics.jsonl", *sorted((self.folder / "traces").glob("*"))]
        return " ".join(f"{s.st_mtime_ns}:{s.st_size}" for f in files if (s := _stat(f)))

    def state(self) -> dict[str, object]:
        """Return the state for the pages: the stamp, and the status of the run in a sentence."""
        return {"stamp": self.stamp(), **self.status()}

    def status(self) -> dict[str, object]:
        """Return the status of the run, and whether more may come."""
        try:
            history = report.read_run(self.folder)
        except FileNotFoundError:
            return {"going": True, "words": f"waiting for {self.folder} to begin"}
        if history.ending != report.History.ending:
            return {"going": False, "words": f"the run has ended: {history.ending}"}
        done, steps = len(history.steps), history.begin.get("config", {}).get("steps")
        words = f"step {done} of {steps}" if steps else counted(done, "step")
        silence = time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        if silence > max(QUIET, 5 * median([row.get("time/step", 0.0) for row in history.steps] or [0.0])):
            words += f"; no news for {silence / 60:.0f} min: it may have been killed (unitymas train --resume {shlex.quote(str(self.folder))})"
        return {"going": True, "words": words}

    def page(self, name: str) -> bytes:
        """Return the current report or viewer page."""
        with self._lock:
            stamp = self.stamp()
            if name not in self._pages or self._pages[name][0] != stamp:
                html = self._report() if name == "report" else self._episodes()
                self._pages[name] = (stamp, html.encode("utf-8", "replace"))
            return self._pages[name][1]

    def _report(self) -> str:
        try:
            history = report.read_run(self.folder)
            if history.ending == report.UNFINISHED:
                history.ending = "running"  # the bar above shows if the run is silent
            body = report.body([history], "episodes.html")
        except FileNotFoundError:
            body = f"<header id='head'><h1>{escape(self.folder.name)}</h1><p class='soft'>Nothing is here yet.</p></header>"
        return (
            page(self.folder.name, body, style="report.css", scripts=("live.js",), live=True)
            + "</body></html>\n"
        )

    def _episodes(self) -> str:
        pairs = list(report.kept(self.folder))
        return "".join(viewer.parts(pairs, title=self.folder.name, live=True))


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        # a foreign page, whose name resolves to this machine, must not read a run
        host = self.headers.get("Host", "").rpartition(":")[0]
        path = self.path.partition("?")[0]
        if host not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path == "/state.json":
            self.server.asked = time.monotonic()
            self._answer(json.dumps(self.server.run.state()).encode(), "application/json")
        elif path in ("/", "/episodes.html"):
            self._answer(
                self.server.run.page("report" if path == "/" else "episodes"), "text/html; charset=utf-8"
            )
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the console belongs to the run."""


class LiveServer(ThreadingHTTPServer):
    """Server of one run, for this machine only."""

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.run = LiveRun(Path(folder))
        self.asked = float("-inf")

    @property
    def address(self) -> str:
        """Address of the pages."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


@contextmanager
def watching(folder: str | Path, port: int = 0, linger: float = 5.0) -> Iterator[LiveServer]:
    """Serve a run in the background. At the end, the server waits until an open page shows the end."""
    with LiveServer(folder, port) as server:
        threading.Thread(target=server.serve_forever, daemon=True, name="live page").start()
        print(f"live page: {server.address}", flush=True)
        try:
            yield server
            ended = time.monotonic()
            while server.asked < ended and server.asked > ended - 10 and time.monotonic() < ended + linger:
                time.sleep(0.05)
        finally:
            server.shutdown()


def in_progress(folder: Path) -> bool:
    """Tell whether this is a training run that has not ended, and that has written something recently."""
    metrics = _stat(folder / "metrics.jsonl")
    recent = metrics is not None and time.time() - metrics.st_mtime < 600
    return recent and bool(LiveRun(folder).status()["going"])


def serve(folder: Path, port: int, open_browser: bool) -> int:
    """Run `unitymas view --live` until Ctrl-C."""
    import webbrowser

    try:
        live = LiveServer(folder, port)
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror}; choose another, or leave it out") from error
    with live as server:
        print(f"{server.address}   (Ctrl-C ends it)", flush=True)
        if open_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
