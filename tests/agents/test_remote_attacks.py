"""Servers that send anything at all: half streams, storms, floods, drips, other hosts, and keys in their replies."""

import asyncio
import json
import socket
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unitymas
from unitymas.agents.policies import Call
from unitymas.agents.remote import OpenAIPolicy, RemoteError, RemoteRefused, RemoteUnavailable
from unitymas.agents.remote.completion import LARGEST_ANSWER
from unitymas.agents.remote.connection import Connection, Pace
from unitymas.agents.spending import Bill, BudgetSpent, Spending
from unitymas.agents.team import Team, TeamError

KEY = "sk-very-secret-0123456789"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Wire:
    """A server that answers each connection with the next of `script`: bytes, or a function of the socket."""

    def __init__(self):
        self.script, self.seen = [], []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        with connection:
            raw = b""
            while b"\r\n\r\n" not in raw:
                if not (more := connection.recv(65536)):
                    return
                raw += more
            head, _, body = raw.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            while len(body) < length:
                body += connection.recv(65536)
            self.seen.append((head.decode(), json.loads(body)))
            reply = self.script.pop(0) if self.script else whole("hello")
            try:
                if callable(reply):
                    reply(connection)
                else:
                    connection.sendall(reply)
            except OSError:
                pass


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text, reason=None):
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": reason}])


def stream(*events, end=True):
    return HEAD + b"".join(map(chunk, events)) + (b"0\r\n\r\n" if end else b"")


USAGE = event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def whole(text):
    return stream(piece(text), piece("", "stop"), USAGE, DONE)


def status(code, body=b"{}", **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return (
        f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{lines}\r\n".encode()
        + body
    )


@pytest.fixture
def wire():
    running = Wire()
    yield running
    running.socket.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("unitymas.agents.remote.connection.random.uniform", lambda low, high: low / 10)


HI = Call("solver", "solver", [{"role": "user", "content": "hi"}], seed=5, stop=("</a>",))


def ask(wire, call=HI, **how):
    return asyncio.run(OpenAIPolicy("m", wire.url, **{"api_key": KEY, **how}).act(call))


def test_a_stream_is_put_together(wire):
    first = event(choices=[{"index": 0, "delta": {"role": "assistant", "reasoning_content": "Hm"}}])
    other = event(choices=[{"index": 1, "delta": {"content": "of another"}, "finish_reason": "stop"}])
    body = b": ping\r\n\r\n" + first + piece("<a>x") + other + piece("y") + piece("", "stop") + USAGE + DONE
    wire.script = [HEAD + b"".join(chunk(body[i : i + 7]) for i in range(0, len(body), 7)) + b"0\r\n\r\n"]
    answer = ask(wire)
    assert answer.text == "<think>Hm</think>\n<a>xy</a>"
    assert answer.meta == {"policy": "openai:m", "tokens_in": 11, "tokens_out": 3, "finish_reason": "stop"}
    assert wire.seen[0][1]["stream_options"] == {"include_usage": True}


HALVES = {
    "cut": stream(piece("<a>half"), end=False),
    "ended early": stream(piece("<a>half")),
    "done without a reason": stream(piece("<a>half"), DONE),
    "cut within an event": stream(piece("<a>half")[:-20], end=False),
    "cut within a letter": stream(piece("<a>hälf").replace(b"\\u00e4", "ä".encode())[:-40], end=False),
    "an error within": stream(piece("<a>half"), event(error={"message": "worker died", "code": 500})),
    "given up": stream(piece("<a>half"), piece("", "error"), DONE),
    "garbage within": stream(piece("<a>half"), b"data: {]\n\n"),
    "a reply that is a number": stream(event(choices=[{"index": 0, "delta": {"content": 7}}]), DONE),
    "nothing": stream(),
    "only done": stream(DONE),
    "half of a JSON": b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"choices": [{"message": {"content": "<a>half',
    "half of a JSON, ended": b'HTTP/1.0 200 OK\r\n\r\n{"choices": [{"message": {"content": "<a>half',
    "no JSON": status(200, b"<html>busy</html>"),
    "deep JSON": status(200, b"[" * 100_000),
    "a number": status(200, b"9" * 5000),
    "a list": status(200, b"[]"),
    "choices of nonsense": status(200, b'{"choices": [3]}'),
    "no message": status(200, b'{"choices": [{"message": null}]}'),
    "an empty page": status(204, b""),
    "no HTTP": b"\x00\x01\x02garbage\r\n\r\n",
    "hung up": b"",
    "a head that never ends": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 40_000,
}


@pytest.mark.parametrize("half", HALVES)
def test_half_an_answer_is_asked_for_again_and_never_taken(wire, half):
    wire.script = [HALVES[half]] * 2
    assert ask(wire).text == "hello"
    assert len(wire.seen) == 3


def test_a_stream_that_has_told_its_end_is_whole_though_the_connection_breaks(wire):
    wire.script = [stream(piece("all"), piece("", "stop"), end=False)]
    assert ask(wire).text == "all" and len(wire.seen) == 1


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_reply_that_was_cut_is_not_closed(wire, reason):
    wire.script = [stream(piece("<a>x"), piece("", reason), DONE)]
    answer = ask(wire)
    assert (answer.text, answer.meta["finish_reason"]) == ("<a>x", reason)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=8), max_size=6), st.integers(1, 60), st.integers(0, 400))
def test_any_cut_of_a_stream_is_whole_or_refused(texts, size, keep):
    """Fed byte by byte in any chunks, and cut anywhere: the whole text, or an error, and nothing between."""
    import httpx

    from unitymas.agents.remote.completion import Arrival, Unreadable, read_completion

    body = b"".join([*map(piece, texts), piece("", "stop"), USAGE, DONE])
    cut = body[: len(body) - keep] if keep <= len(body) else b""
    chunks = [cut[i : i + size] for i in range(0, len(cut), size)]

    async def read():
        async def source():
            for one in chunks:
                yield one

        return await read_completion(httpx.Response(200, content=source()), Arrival(lambda: None))

    try:
        assert asyncio.run(read()).text == "".join(texts)
    except Unreadable:
        assert cut.count(b'"stop"') == 0 or cut.count(b"\n\n") < body.count(b"\n\n")


def test_giant_bodies_are_given_up_as_they_come(wire):
    sent = []

    def flood(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(4 * LARGEST_ANSWER >> 16):
            connection.sendall(b"x" * 65536)
            sent.append(1)

    wire.script = [flood]
    with pytest.raises(RemoteError, match="more than 16 MB"):
        ask(wire)
    assert len(sent) << 16 < 3 * LARGEST_ANSWER
    wire.script = [HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")]
    with pytest.raises(RemoteError, match="compressed"):
        ask(wire)
    wire.script = [status(400, b"y" * 10_000_000)]
    with pytest.raises(RemoteError, match="HTTP 400 y{500}$"):
        ask(wire)


def drip(data, pause):
    def send(connection):
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(pause)

    return send


def test_slow_drips_meet_the_deadline_and_silence_is_asked_again(wire, monkeypatch):
    wire.script = [drip(b"HTTP/1.1 200 OK\r\n" + b"X" * 500, 0.05)] * 9
    with pytest.raises(RemoteUnavailable, match=r"within 0\.6\d* s.*no whole answer in time"):
        ask(wire, deadline=0.6)
    wire.script = [lambda c: (c.sendall(HEAD + chunk(piece("<a>half"))), time.sleep(20))]
    monkeypatch.setattr(Connection, "idle", 0.2)
    began = time.monotonic()
    assert ask(wire).text == "hello" and time.monotonic() - began < 15
    wire.script = [lambda c: (c.sendall(b"HTTP/1.1 401 X\r\nContent-Length: 9\r\n\r\n{"), time.sleep(20))]
    monkeypatch.setattr("unitymas.agents.remote.connection.WORDS_SECONDS", 0.2)
    with pytest.raises(RemoteRefused, match="HTTP 401"):
        ask(wire)


def test_the_key_is_in_no_error_and_no_reply(wire, capsys):
    wire.script = [
        status(401, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()),
        whole(f"your key is {KEY}"),
        *[status(500, KEY.encode())] * 30,
    ]
    with pytest.raises(RemoteRefused, match=r"bad key \[key\]"):
        ask(wire)
    assert ask(wire).text == "your key is [key]"
    with pytest.raises(RemoteUnavailable) as error:
        ask(wire, deadline=0.3)
    assert KEY not in str(error.value) and "[key]" in str(error.value)
    assert KEY not in repr(OpenAIPolicy("m", wire.url, api_key=KEY).identity())
    for bad in ("sk-a b", "sk-a\nb", "schlüssel"):
        with pytest.raises(ValueError) as error:
            OpenAIPolicy("m", wire.url, api_key=bad)
        assert bad not in str(error.value)
    assert "sk-" not in "".join(capsys.readouterr())


def test_errors_are_one_line_of_plain_text(wire):
    wire.script = [status(400, json.dumps({"error": "a\x1b[2Jb\r\nc\u202ed" + "e" * 9000}).encode())]
    with pytest.raises(RemoteError, match=r"HTTP 400") as error:
        ask(wire)
    assert str(error.value).isprintable() and len(str(error.value)) < 700


def test_keys_come_from_the_environment_by_host(wire, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "general")
    asyncio.run(OpenAIPolicy("m", wire.url).act(HI))
    monkeypatch.setenv("OPENAI_API_KEY_127_0_0_1", " own\n")
    asyncio.run(OpenAIPolicy("m", wire.url).act(HI))
    keys = [head.lower().partition("authorization: ")[2].partition("\r\n")[0] for head, _ in wire.seen]
    assert keys == ["bearer general", "bearer own"]


@pytest.mark.parametrize("url", ["http://me:pw@h/v1", "http://h/v1?api_key=x", "http://tok@h/v1"])
def test_urls_that_hold_a_secret_are_refused_without_telling_it(url):
    with pytest.raises(ValueError, match="OPENAI_API_KEY_H or OPENAI_API_KEY") as error:
        OpenAIPolicy.of(f"openai:m@{url}")
    assert not any(secret in str(error.value) for secret in ("pw", "=x", "tok"))


def test_a_query_stays_at_the_end(wire):
    asyncio.run(OpenAIPolicy("m", f"{wire.url}?api-version=3").act(HI))
    assert wire.seen[0][0].startswith("POST /v1/chat/completions?api-version=3 ")


def test_retry_after_is_honoured_by_all_calls(wire):
    times = []
    wire.script = [status(429, b"{}", Retry_After="0.6")]
    policy = OpenAIPolicy("m", wire.url, concurrency=2)

    async def one():
        text = (await policy.act(HI)).text
        times.append(time.monotonic())
        return text

    async def go():
        first = asyncio.create_task(one())
        while not policy._connection._quiet[0]:
            await asyncio.sleep(0.01)
        return await asyncio.gather(first, one(), one())

    assert asyncio.run(go()) == ["hello"] * 3
    assert min(times) >= policy._connection._quiet[0]  # those that had not failed have waited, too
    assert len(wire.seen) == 4


def test_retry_after_may_be_a_date_milliseconds_or_nonsense(wire):
    soon = format_datetime(datetime.now(timezone.utc) - timedelta(seconds=5), usegmt=True)
    for headers in (
        {"Retry_After": soon}, {"Retry_After_Ms": "20"}, {"Retry_After": "nan"}, {"Retry_After": "soon"},
        {"Retry_After": "-3"}, {"Retry_After": ""},
    ):  # fmt: skip
        wire.script = [status(429, b"{}", **headers)]
        assert ask(wire).text == "hello"
    for never in ("3600", "inf", "1e300", "Fri, 31 Dec 9999 23:59:59 GMT"):
        wire.script = [status(429, b'{"error": "come later"}', Retry_After=never)]
        began = time.monotonic()
        with pytest.raises(RemoteUnavailable, match="HTTP 429 come later"):
            ask(wire, deadline=30)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("asked", ["0", "Mon, 01 Jan 2001 00:00:00 GMT"])
def test_a_server_that_asks_for_no_pause_is_not_hammered(wire, asked):
    wire.script = [status(429, b"{}", Retry_After=asked)] * 2000
    with pytest.raises(RemoteUnavailable, match="HTTP 429"):
        ask(wire, deadline=0.5)
    assert len(wire.seen) < 10


def test_a_storm_of_429_passes_and_an_empty_account_does_not(wire):
    wire.script = [status(429)] * 12
    policy = OpenAIPolicy("m", wire.url, concurrency=4)

    async def go():
        return await asyncio.gather(*(policy.act(HI) for _ in range(8)))

    assert [answer.text for answer in asyncio.run(go())] == ["hello"] * 8
    body = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}
    wire.script = [status(429, json.dumps(body).encode())]
    with pytest.raises(RemoteRefused, match="You exceeded your quota"):
        ask(wire)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(wire, code):
    other = Wire()
    wire.script = [status(code, b"", Location=f"{other.url}/chat/completions")]
    with pytest.raises(RemoteError, match=f"HTTP {code}"):
        ask(wire)
    assert not other.seen
    other.socket.close()


def test_what_a_server_does_not_know_is_left_out(wire):
    wire.script = [
        status(422, b'{"detail": "extra fields not permitted: stream_options"}'),
        status(400, b'{"error": "logprobs is not supported"}'),
        status(400, b'{"error": "stream must be false"}'),
        status(200, b'{"choices": [{"message": {"content": "plain"}}]}'),
    ]
    policy = OpenAIPolicy("m", wire.url)
    policy.keep_tokens()
    assert asyncio.run(policy.act(HI)).text == "plain"
    assert not {"stream", "stream_options", "logprobs"} & set(wire.seen[-1][1])
    asyncio.run(policy.act(HI))
    assert "stream" not in wire.seen[-1][1] and len(wire.seen) == 5


def test_a_server_of_reasoning_models_gets_the_length_by_its_new_name(wire):
    told = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    wire.script = [status(400, json.dumps({"error": {"message": told}}).encode())]
    policy = OpenAIPolicy("m", wire.url)
    call = Call("s", "s", [{"role": "user", "content": "hi"}], max_tokens=7)
    assert [asyncio.run(policy.act(call)).text for _ in range(2)] == ["hello"] * 2
    assert [(b.get("max_tokens"), b.get("max_completion_tokens")) for _, b in wire.seen] == [
        (7, None),
        (None, 7),
        (None, 7),
    ]


def test_a_server_without_seed_and_stop_plays_and_its_reply_is_cut_here(wire):
    wire.script = [
        status(422, b'{"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]}'),
        status(400, b'{"error": "Unsupported parameter: \'stop\' is not supported with this model."}'),
        whole("<a>x</a> and more"),
    ]
    assert ask(wire).text == "<a>x</a>"
    assert not {"seed", "stop"} & set(wire.seen[-1][1])
    wire.script = [status(400, b'{"error": "the unstoppable seeds stopped"}')]
    with pytest.raises(RemoteError, match="unstoppable"):
        ask(wire)


def test_log_probs_are_kept_where_they_are_given(wire):
    tokens = [{"token": "he", "logprob": -0.25}, {"token": "llo", "logprob": -1}, {"token": 3, "logprob": 0}]
    choice = {
        "index": 0,
        "delta": {"content": "hello"},
        "logprobs": {"content": tokens},
        "finish_reason": "stop",
    }
    wire.script = [stream(event(choices=[choice]), DONE)]
    call = Call("s", "s", [{"role": "user", "content": "hi"}], keep_tokens="text")
    assert ask(wire, call).meta["tokens"] == {"text": ["he", "llo"], "logprob": [-0.25, -1.0]}
    assert wire.seen[0][1]["logprobs"] is True


def test_a_cancelled_call_ends_its_request(wire):
    gone = threading.Event()

    def hold(connection):
        connection.sendall(HEAD)
        connection.settimeout(20)
        if not connection.recv(10):
            gone.set()

    wire.script = [hold]

    async def go():
        task = asyncio.create_task(OpenAIPolicy("m", wire.url).act(HI))
        while not wire.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert gone.wait(10)


def test_no_more_requests_at_once_than_agreed(wire):
    now, most, lock = [0], [0], threading.Lock()

    def slow(connection):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        connection.sendall(whole("hello"))

    wire.script = [slow] * 12
    policy = OpenAIPolicy("m", wire.url, concurrency=3)

    async def go():
        await asyncio.gather(*(policy.act(HI) for _ in range(12)))

    asyncio.run(go())
    assert most[0] <= 3


# limits and budgets ---------------------------------------------------------------------------------------


def test_the_pace_is_kept(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("unitymas.agents.remote.connection.time.monotonic", lambda: clock[0])
    pace = Pace(60)
    assert [pace.take(1) for _ in range(3)] == [0, 1, 2]
    clock[0] += 10
    assert pace.take(5) == 0 and pace.take(1) == 5
    pace.correct(-4)
    assert pace.take(1) == 2
    assert Pace(None).take(1e9) == 0 == Pace(None).take(1)


def test_requests_begin_no_faster_than_agreed(wire):
    """Ten a second: the sixth begins half a second after the first."""
    policy = OpenAIPolicy("m", wire.url, requests_per_minute=600, deadline=20)

    async def go():
        await asyncio.gather(*(policy.act(HI) for _ in range(6)))

    began = time.monotonic()
    asyncio.run(go())
    assert time.monotonic() - began >= 0.5 and len(wire.seen) == 6


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=40), st.integers(50, 900)
)
def test_a_budget_is_never_passed_where_guesses_are_bounds(calls, budget):
    """Calls side by side, each with a bound on its tokens and what it really takes."""

    async def go():
        spending = Spending(tokens=budget)
        refused = []

        async def one(real, slack):
            guess = Bill(1, real + slack, 0)
            try:
                await spending.hold(guess)
            except BudgetSpent:
                refused.append(guess)
                return
            await asyncio.sleep(0)
            spending.book("r", guess, Bill(1, real, 0))

        await asyncio.gather(*(one(*call) for call in calls))
        return spending.total, refused

    total, refused = asyncio.run(go())
    assert total.tokens_in <= budget
    assert bool(refused) == (total.requests < len(calls))
    assert not refused or total.tokens_in + refused[0].tokens_in > budget


def test_half_streams_are_on_the_bill(wire):
    spending = Spending()
    wire.script = [stream(piece("a"), piece("b"), end=False)]
    answer = ask(wire, spending=spending, price=(1.0, 2.0))
    bill = spending.roles["solver"]
    assert (bill.requests, bill.estimated) == (2, 1) and bill.tokens_out == 2 + 3 and bill.tokens_in > 11
    assert answer.meta["cost"] == pytest.approx(bill.dollars) and bill.dollars > (11 + 2 * 3) / 1e6


def test_a_budget_stops_a_rollout_with_a_sentence(wire):
    team = Team({"*": f"openai:m@{wire.url}"}, budget_dollars=0.5, price={"*": (100.0, 1000.0)}, max_tokens=3)
    with pytest.raises(BudgetSpent, match=r"the budget of \$0.5 is spent: \$0..* Raise budget_dollars"):
        unitymas.rollout("mask-hotpotqa", team, data="mini", tasks=40)
    assert 0 < team.spending.total.dollars <= 0.5


def test_budgets_need_prices_and_prices_need_models():
    with pytest.raises(ValueError, match="the price of 'm' is not known"):
        Team("openai:m@http://h/v1", budget_dollars=1).bind({"a": unitymas.Role("a")})
    with pytest.raises(TeamError, match="price of 'n': .* it has m|did you mean"):
        Team("openai:m@http://h/v1", price={"n": (1, 1)})
