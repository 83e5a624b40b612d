"""The OpenAI-compatible policy against a small real HTTP server."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unitymas.agents.policies import Call
from unitymas.agents.remote import OpenAIPolicy, RemoteError, RemoteUnavailable
from unitymas.agents.roles import Tags
from unitymas.agents.spending import Spending
from unitymas.agents.text.reply_readers import split_thinking


class Server:
    """Answers each request with the next of `script`: (status, body or text, headers)."""

    def __init__(self):
        self.script, self.seen = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, dict(self.headers), body))
                status, answer, headers = outer.script.pop(0) if outer.script else (200, said("hello"), {})
                if status == "hang up":
                    self.connection.close()
                    return
                if status == "sleep":
                    time.sleep(answer)
                    status, answer = 200, said("late")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def said(text, reason="stop"):
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3},
    }


def apart(thinking, text, reason="stop"):
    """An answer of a server that tells thinking apart from the reply."""
    answer = said(text, reason)
    answer["choices"][0]["message"]["reasoning_content"] = thinking
    return answer


@pytest.fixture
def server():
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


def ask(server, *, call=None, **how):
    call = call or Call("solver", "solver", [{"role": "user", "content": "hi"}], seed=5)
    return asyncio.run(OpenAIPolicy("m", server.url, **{"api_key": "secret", **how}).act(call))


def test_a_call_becomes_a_chat_completion_and_back(server):
    call = Call(
        "solver_1", "solver", [{"role": "user", "content": "hi"}], max_tokens=7, stop=("</a>",), seed=5
    )
    server.script = [(200, said("<a>x"), {})]
    answer = ask(server, call=call, temperature=0.5, system={"solver": "Be brief."})
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "m", "seed": 5, "temperature": 0.5, "max_tokens": 7, "stop": ["</a>"],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert answer.text == "<a>x</a>"  # endpoints leave the stop string out; formats need it
    assert answer.meta == {"policy": "openai:m", "tokens_in": 11, "tokens_out": 3, "finish_reason": "stop"}


def test_a_reply_that_was_cut_stays_cut(server):
    server.script = [(200, said("<a>x", "length"), {})]
    answer = ask(server, call=Call("s", "s", [{"role": "user", "content": "hi"}], stop=("</a>",)))
    assert (answer.text, answer.meta["finish_reason"]) == ("<a>x", "length")


THOUGHTS = {
    "in the text": (
        said("<think>first <a>draft"),
        said("<think>first <a>draft</a></think><a>x</a> <a>y</a>"),
    ),
    "told apart": (apart("first <a>draft", ""), apart("first <a>draft</a>", "<a>x</a> and more")),
}


@pytest.mark.parametrize("thoughts", THOUGHTS)
def test_a_stop_string_within_a_thought_ends_no_reply(server, thoughts):
    """The server ended its reply there; it is asked again, without stop strings, and what follows the reply is cut."""
    half, full = THOUGHTS[thoughts]
    server.script = [(200, half, {}), (200, full, {})]
    spending = Spending()
    call = Call("s", "s", [{"role": "user", "content": "hi"}], stop=("</a>",))
    answer = ask(server, call=call, spending=spending)
    thinking, text, closed = split_thinking(answer.text)
    assert closed and "draft</a>" in thinking and text == "<a>x</a>"
    assert answer.meta["finish_reason"] == "stop"
    assert [("stop" in body) for _, _, body in server.seen] == [True, False]
    assert spending.total.tokens_in == 22  # both are paid for


def test_a_reply_that_never_thought_is_asked_for_once(server):
    server.script = [(200, said("<a>x"), {}), (200, said(""), {})]
    call = Call("s", "s", [{"role": "user", "content": "hi"}], stop=("</a>",))
    assert [ask(server, call=call).text for _ in range(2)] == ["<a>x</a>", ""]
    assert len(server.seen) == 2


def test_what_may_pass_is_tried_again(server):
    server.script = [
        (429, {}, {"Retry-After": "0.05"}),
        (503, {}, {"Retry-After": "0"}),
        ("hang up", None, {}),
        (200, {"error": "no choices"}, {}),
        (200, said("at last"), {}),
    ]
    assert ask(server).text == "at last"
    assert len(server.seen) == 5


@pytest.mark.parametrize("answer", ["<html>", {"choices": []}, None])
def test_an_endpoint_that_never_gave_a_completion_is_given_up_early(server, monkeypatch, answer):
    """It may be no such endpoint at all. One that has answered before has the whole deadline."""
    monkeypatch.setattr(OpenAIPolicy, "first_answer", 0.4)
    server.script, began = [(200, answer, {})] * 50, time.monotonic()
    with pytest.raises(RemoteUnavailable, match="no answer for 'm' within"):
        ask(server)
    assert time.monotonic() - began < 10  # not the 120 s of a request
    server.script = [(200, said("yes"), {}), *[(200, answer, {})] * 2, (200, said("yes again"), {})]
    policy = OpenAIPolicy("m", server.url, api_key="secret")
    call = Call("solver", "solver", [{"role": "user", "content": "hi"}], seed=5)

    async def twice():
        return [(await policy.act(call)).text for _ in range(2)]

    assert asyncio.run(twice()) == ["yes", "yes again"]


def test_a_pause_beyond_the_deadline_is_not_waited_for(server):
    server.script = [(429, {"error": "come back tomorrow"}, {"Retry-After": "86400"})]
    with pytest.raises(
        RemoteUnavailable, match=r"wait for 86,400 s.* has 120 s: HTTP 429 come back tomorrow"
    ):
        ask(server)
    assert len(server.seen) == 1


def test_what_is_tried_again_is_told(server, capsys):
    server.script = [(429, {"error": "slow down"}, {"Retry-After": "0.01"})] * 3
    assert ask(server).text == "hello"
    told = capsys.readouterr().err
    assert told.count("HTTP 429 slow down; it is tried again for up to 120 s") == 1


def test_what_cannot_pass_is_told_at_once(server):
    server.script = [(404, {"error": "no model 'm'"}, {})]
    with pytest.raises(RemoteError, match=r"HTTP 404 .*no model 'm'"):
        ask(server)
    assert len(server.seen) == 1


def test_the_deadline_holds_and_names_the_last_cause(server):
    server.script = [(503, "overloaded", {"Retry-After": "0.2"})] * 50
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable, match=r"within 0\.5 s.*HTTP 503"):
        ask(server, deadline=0.5)
    assert time.monotonic() - began < 3
    server.script = [("sleep", 5, {})]
    with pytest.raises(RemoteUnavailable, match="within"):
        ask(server, deadline=0.4)


@pytest.mark.parametrize(("reply", "text"), [("2", "2"), (" '2'. ", "2"), ("either", "either"), ("12", "12")])
def test_choices_are_told_and_read(server, reply, text):
    server.script = [(200, said(reply), {})]
    call = Call("judge", "judge", [{"role": "user", "content": "which?"}], choices=("1", "2"))
    assert ask(server, call=call).text == text
    assert server.seen[0][2]["messages"][-1]["content"] == "which?\n\nAnswer with exactly one of: 1, 2"
    ask(server, call=call, choices="guided")
    assert server.seen[1][2]["structured_outputs"] == {"choice": ["1", "2"]}


def test_many_calls_run_at_once(server):
    server.script = [("sleep", 0.3, {})] * 8

    async def all_of_them():
        policy = OpenAIPolicy("m", server.url)
        call = Call("s", "s", [{"role": "user", "content": "hi"}])
        return await asyncio.gather(*(policy.act(call) for _ in range(8)))

    began = time.monotonic()
    assert len(asyncio.run(all_of_them())) == 8
    assert time.monotonic() - began < 2


def test_names():
    policy = OpenAIPolicy.of("openai:Qwen/Qwen3-8B@http://localhost:8000/v1/")
    assert (policy.model, policy.url) == ("Qwen/Qwen3-8B", "http://localhost:8000/v1")
    assert OpenAIPolicy.of("openai:gpt-x").url == "https://api.openai.com/v1"
    for wrong in ("openai:", "openai:m@localhost:8000"):
        with pytest.raises(ValueError, match="openai:MODEL@URL"):
            OpenAIPolicy.of(wrong)


def test_a_redirect_is_not_followed_and_takes_no_key_away(server):
    elsewhere = Server()
    try:
        for status in (301, 302, 303, 307, 308):
            server.script.append((status, {}, {"Location": f"{elsewhere.url}/chat/completions"}))
            with pytest.raises(RemoteError, match=f"HTTP {status}"):
                ask(server, api_key="secret")
        assert not elsewhere.seen
    finally:
        elsewhere.http.shutdown()
        elsewhere.http.server_close()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_a_server_parsed_as_reasoning_is_kept_as_thinking(server, field):
    answer = said("<answer>Paris")
    answer["choices"][0]["message"][field] = "Rome? </answer> No."
    server.script.append((200, answer, {}))
    text = ask(
        server, call=Call("solver", "solver", [{"role": "user", "content": "?"}], stop=("</answer>",))
    ).text
    assert text == "<think>Rome? </answer> No.</think>\n<answer>Paris</answer>"
    assert Tags("answer").parse(text)[1:3] == (True, "Paris")
