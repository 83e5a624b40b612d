"""A hub of this machine: as much of the Hugging Face Hub's HTTP interface as `huggingface_hub` uses to download.

It knows models and data sets by branch, tag and commit, private and gated ones, tokens, and can cut a connection in the
middle of a file or answer nothing but errors.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

TOKEN = "hf_right"
"""Token of an account that may read private and gated repositories."""
STRANGER = "hf_stranger"
"""Token of an account that may read neither."""


@dataclass
class Repo:
    """A repository: its files by commit, and its branches and tags."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a commit."""
        return self.refs.get(revision, revision if revision in self.commits else None)


def repo(*versions: Mapping[str, bytes], **how: Any) -> Repo:
    """Return a repository with one commit for each version. The last one is `main`, all are tagged v1, v2 …"""
    named = {hashlib.sha1(str(sorted(one.items())).encode()).hexdigest(): dict(one) for one in versions}
    refs = {f"v{number}": commit for number, commit in enumerate(named, 1)}
    return Repo(named, {**refs, "main": list(named)[-1]}, **how)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, by name."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@dataclass
class LocalHub:
    """Repositories (data sets as `datasets/ORG/NAME`), faults, and what was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    """Number of answers for a file of this name that end in the middle."""
    down: int = 0
    """Status of every answer, if it is not 0."""
    down_after_cut: int = 0
    """Status of every answer after the next cut."""
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Method, path, token and range of each request."""
    address: str = ""

    def clear(self) -> None:
        """Forget faults and what was asked."""
        self.cuts, self.down, self.down_after_cut, self.asked = {}, 0, 0, []

    def files_asked(self) -> list[str]:
        """Names of the files that were sent, in order."""
        return [
            path.rpartition("/")[2]
            for method, path, *_ in self.asked
            if method == "GET" and "/resolve/" in path
        ]

    def point(self, patch: Any, home: Path) -> None:
        """Let this process's `huggingface_hub` use this hub and an empty cache (what HF_ENDPOINT and HF_HOME do at its import)."""
        patch.setattr(constants, "ENDPOINT", self.address)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            self.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)


@contextmanager
def serve() -> Iterator[LocalHub]:
    """Run a hub in a thread."""
    hub = LocalHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
        server.shutdown()


PATHS = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<api>[^/]+/[^/]+)"
    r"(?:/(?P<verb>revision|tree|auth-check|paths-info)(?:/(?P<of>[^/]+))?(?:/(?P<under>.*))?)?"
    r"|/(?P<name>(?:datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.form = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.hub.asked.append((self.command, path, token, self.headers.get("Range") or ""))
        if self.hub.down:
            return self._send(self.hub.down)
        match = PATHS.fullmatch(path)
        if match is None:
            return self._send(404)
        name = match["name"] or ("datasets/" if match["kind"] == "datasets" else "") + match["api"]
        repo = self.hub.repos.get(name)
        if token not in ("", TOKEN, STRANGER):
            return self._send(401, message="Invalid credentials in Authorization header")
        if repo is None or repo.private and token != TOKEN:
            return self._send(
                404 if token else 401, "RepoNotFound" if token else "", "Invalid username or password."
            )
        revision = unquote(match["revision"] or match["of"] or "main")
        commit = repo.commit(revision)
        if commit is None:
            return self._send(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        refused = repo.gated and token != TOKEN
        if match["verb"] == "auth-check" or match["name"]:
            if refused:
                return self._send(403 if token else 401, "GatedRepo", "Access to model is restricted")
            if match["name"]:
                return self._file(repo, commit, unquote(match["file"]))
            return self._json({})
        self._about(name, repo, commit, match["verb"], unquote(match["under"] or ""))

    def _about(self, name: str, repo: Repo, commit: str, verb: str | None, under: str) -> None:
        """Answer what a repository is, or which files it has."""
        files = repo.commits[commit]
        if verb == "tree":
            inside, listed = f"{under}/" if under else "", list[Any]()
            for path, data in files.items():
                child, below, _ = path.removeprefix(inside).partition("/")
                if below and "recursive=true" not in urlsplit(self.path).query.lower():
                    path, data = f"{inside}{child}", b""
                what = {"type": "directory" if below and not data else "file", "path": path}
                row = {**what, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                if path.startswith(inside) and row not in listed:
                    listed.append(row)
            return self._json(listed) if listed or not under else self._send(404, "EntryNotFound")
        self._json({
            "id": name.removeprefix("datasets/"), "sha": commit, "gated": "manual" if repo.gated else False,
            "private": repo.private, "siblings": [{"rfilename": path} for path in files], "tags": [],
        })  # fmt: skip

    def _file(self, repo: Repo, commit: str, path: str) -> None:
        data = repo.commits[commit].get(path)
        if data is None:
            return self._send(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.command == "GET" and self.hub.cuts.get(path, 0) > 0
        self._send(
            206 if start else 200,
            body=data[start:],
            headers=headers,
            sent=(len(data) - start) // 2 if cut else None,
        )
        if cut:
            self.hub.cuts[path] -= 1
            self.hub.down = self.hub.down_after_cut
            self.close_connection = True

    def _json(self, value: object) -> None:
        self._send(200, body=json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        code: str = "",
        message: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        sent: int | None = None,
    ) -> None:
        """Send an answer, of which only `sent` bytes arrive."""
        self.send_response(status)
        marks = {
            "X-Error-Code": code,
            "X-Error-Message": message,
            **(headers or {}),
            "Content-Length": str(len(body)),
        }
        for name, value in marks.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *_: Any) -> None:
        pass
