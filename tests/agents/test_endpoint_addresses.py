"""Addresses of endpoints: names, secrets, TLS, proxies. What cannot work is an error before or at the first call."""

import asyncio
import re
import time
from contextlib import suppress

import pytest

import unitymas
from unitymas.agents.remote import OpenAIPolicy, RemoteError, RemoteRefused
from unitymas.agents.spending import Spending
from unitymas.agents.team import Team, TeamError

from .test_remote_attacks import DONE, HEAD, HI, USAGE, ask, chunk, event, piece, quick, status, stream, wire

__all__ = ["quick", "wire"]  # fixtures


@pytest.mark.parametrize("model", ["@cf/meta/llama", "gpt@2024", "a@b@c"])
def test_a_model_may_have_an_at_sign_in_its_name(model):
    policy = OpenAIPolicy.of(f"openai:{model}@https://h:1/v1")
    assert (policy.model, policy.url) == (model, "https://h:1/v1")
    Team(f"openai:{model}@http://h/v1", price={model: (1, 1)}, budget_dollars=1).bind(
        {"a": unitymas.Role("a")}
    )
    with pytest.raises(TeamError, match=f"it has .*{model}"):
        Team(f"openai:{model}@http://h/v1", price={"other": (1, 1)})


@pytest.mark.parametrize(
    "url",
    ["http://", "http://h:99999/v1", "http://h:0/v1", "http://h:abc/v1", "http://[h/v1", "http://h 8000/v1", "http://h\n/v1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_before_any_call(url):
    with pytest.raises(ValueError, match="URL of an endpoint.* (host|blank)"):
        OpenAIPolicy.of(f"openai:m@{url}")


@pytest.mark.parametrize(
    "rest",
    ["http://h/v1#key=sesame", "http://h/v1?code=sesame", "http://h/v1?api_key=", "me:sesame@h/v1", "https:/me:sesame@h"],
)  # fmt: skip
def test_no_refused_address_is_repeated_with_its_secret(rest):
    with pytest.raises(ValueError) as error:
        OpenAIPolicy.of(f"openai:m@{rest}")
    assert "sesame" not in str(error.value)


def test_the_address_of_the_completions_themselves_is_understood(wire):
    asyncio.run(OpenAIPolicy("m", f"{wire.url}/chat/completions/?api-version=3").act(HI))
    assert wire.seen[0][0].startswith("POST /v1/chat/completions?api-version=3 ")


def test_https_where_http_answers_is_an_error_at_once(wire):
    began = time.monotonic()
    wire.answer = lambda connection: (
        connection.recv(100),
        connection.sendall(status(400)),
        connection.close(),
    )
    with pytest.raises(RemoteRefused, match="no server for https answers there; is it http"):
        asyncio.run(OpenAIPolicy("m", wire.url.replace("http:", "https:")).act(HI))
    assert time.monotonic() - began < 10  # not the 15 s that a server may take to start


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("HTTP_PROXY", "http://me:sesame@:bad", "InvalidURL"), ("SSL_CERT_FILE", "/no/such/file", "FileNotFoundError")],
)  # fmt: skip
def test_a_broken_proxy_or_certificate_file_is_named_and_its_password_is_not(
    wire, monkeypatch, name, value, says
):
    monkeypatch.setenv(name, value)
    with pytest.raises(RemoteRefused, match=f"{says} .* look at .*{name}") as error:
        ask(wire)
    assert "sesame" not in str(error.value) and not wire.seen


def test_a_redirect_is_told_with_its_target_and_stops_all_calls(wire):
    wire.script = [status(301, b"", Location="https://other/v1/chat/completions?token=sesame")]
    with pytest.raises(
        RemoteRefused, match=r"redirects to https://other/v1/chat/completions, and no redirect"
    ) as error:
        ask(wire)
    assert "sesame" not in str(error.value)


# replies without text ------------------------------------------------------------------------------------


def test_a_refusal_is_a_reply(wire, capsys):
    parts = [
        event(choices=[{"index": 0, "delta": {"content": None, "refusal": part}}])
        for part in ("I can", "not.")
    ]
    wire.script = [
        stream(*parts, piece("", "stop"), DONE),
        status(
            200, b'{"choices": [{"message": {"content": null, "refusal": "No."}, "finish_reason": "stop"}]}'
        ),
    ]
    assert [ask(wire).text for _ in range(2)] == ["I cannot.", "No."]
    assert "empty" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "says"),
    [("stop", "'stop'"), ("length", "'length'.*max_tokens"), ("tool_calls", "'tool_calls'.*no tools"), ("content_filter", "'content_f")],
)  # fmt: skip
def test_an_empty_reply_is_told_once_with_its_reason(wire, capsys, reason, says):
    wire.script = [stream(piece(""), piece("", reason), DONE)] * 2
    policy = OpenAIPolicy("m", wire.url)
    assert [asyncio.run(policy.act(HI)).text for _ in range(2)] == ["", ""]
    told = capsys.readouterr().err
    assert told.count("a reply is empty") == 1 and re.search(says, told)


# the tokens of what breaks off ---------------------------------------------------------------------------


def hold(*events):
    def send(connection):
        connection.sendall(HEAD + b"".join(map(chunk, events)))
        connection.settimeout(20)
        connection.recv(10)

    return send


def test_the_tokens_of_a_reply_that_misses_its_deadline_are_counted(wire):
    spending = Spending()
    wire.script = [hold(*[piece("x")] * 7)]
    with pytest.raises(RemoteError):
        ask(wire, spending=spending, deadline=0.5)
    assert spending.total.tokens_out == 7


def test_the_tokens_of_a_silent_stream_and_of_a_cancelled_call_are_counted(wire, monkeypatch):
    monkeypatch.setattr("unitymas.agents.remote.connection.Connection.idle", 0.2)
    spending = Spending()
    wire.script = [hold(*[piece("x")] * 5)]
    assert ask(wire, spending=spending).text == "hello" and spending.total.tokens_out == 5 + 3
    monkeypatch.setattr("unitymas.agents.remote.connection.Connection.idle", 20)
    wire.script = [hold(*[piece("x")] * 6)]

    async def go():
        policy = OpenAIPolicy("m", wire.url, spending=spending)
        task = asyncio.create_task(policy.act(HI))
        while len(wire.seen) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while policy._connection._running:
            await asyncio.sleep(0.01)

    asyncio.run(go())
    assert spending.total.tokens_out == 5 + 3 + 6


def test_a_stream_that_is_read_to_its_end_leaves_its_connection(wire):
    """The end of the body comes a moment after the end of the stream."""
    accepted = []

    def serve(connection):
        accepted.append(1)
        with connection, suppress(OSError):
            while connection.recv(65536):
                connection.sendall(HEAD + b"".join(map(chunk, (piece("a"), piece("", "stop"), USAGE, DONE))))
                time.sleep(0.05)
                connection.sendall(b"0\r\n\r\n")

    wire.answer = serve
    policy = OpenAIPolicy("m", wire.url)

    async def go():
        return [(await policy.act(HI)).text for _ in range(3)]

    assert asyncio.run(go()) == ["a"] * 3 and len(accepted) == 1
