"""Requests that are hardly HTTP, sent byte by byte: each is refused at once, and none is told to the log."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from .test_retrieval_servers import SERVE

ASK = json.dumps({"queries": ["town7"], "topk": 1}).encode()
HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def request(body: bytes = ASK, headers: bytes = b"", length: object = None) -> bytes:
    size = str(len(body) if length is None else length).encode()
    return HEAD + headers + b"Content-Length: " + size + b"\r\n\r\n" + body


RAW = {
    "a negative length": request(length=-1),
    "an endless length": request(length=10**30),
    "a length in words": request(length="x"),
    "two lengths": request(headers=b"Content-Length: 3\r\n"),
    "a length and chunks": request(headers=b"Transfer-Encoding: chunked\r\n"),
    "a chunk below nothing": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n",
    "packed blanks": request(zlib.compress(b"[" * 100_000_000), b"Content-Encoding: deflate\r\n"),
    "a long header": b"POST /retrieve HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    "many headers": b"POST /retrieve HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(2000)) + b"\r\n",
    "a blank before the colon": request(headers=b"Content-Length : 5\r\n"),
    "a folded header": request(headers=b"X: a\r\n b\r\n"),
    "line feeds alone": request().replace(b"\r\n", b"\n"),
    "nought in the path": request().replace(b"/retrieve", b"/\x00"),
    "a way up": b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a greeting in secret": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "an expectation": request(headers=b"Expect: 200-x\r\n"),
    "digits": request(b'{"queries":["a"],"topk":' + b"9" * 500_000 + b"}"),
    "no number": request(b'{"queries":["a"],"topk":NaN}'),
    "a deep list": request(b"[" * 900_000),
    "no text": request(b"\xff\xfe{"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = urlsplit(process.stdout.readline().split()[-1])
        assert address.hostname and address.port
        yield address.hostname, address.port
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.stdout.read() == ""  # nothing that a client sends fills the log
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def answer(server: tuple[str, int], sent: bytes) -> bytes:
    """The first bytes of the answer; nothing where the server hangs up."""
    with socket.create_connection(server, 30) as connection:
        try:
            connection.sendall(sent)
            return connection.recv(200)
        except ConnectionError:
            return b""


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_request_is_refused(server: tuple[str, int], name: str) -> None:
    status = answer(server, RAW[name])[:12].partition(b" ")[2]
    assert status[:1] in (b"4", b""), status
    assert answer(server, request()).startswith(b"HTTP/1.1 200")
