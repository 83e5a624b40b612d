"""A model that answers nobody stops the work with the server's own sentence; failures that happen do not."""

import asyncio
import socket
import threading
import time

import pytest
from aiohttp import web

import unitymas
from unitymas.agents.basics.failures import Failures, ModelFailure, Outage
from unitymas.agents.policies import Call
from unitymas.agents.remote import OpenAIPolicy
from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.cli import main
from unitymas.trainers.controller.run import train

ENV = "mask-hotpotqa"


class Server:
    """An OpenAI-compatible server in a thread: `answer(number of the request)` gives a status and a body."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0
        self.loop = asyncio.new_event_loop()
        started = threading.Event()

        async def completions(request):
            self.asked += 1
            status, body = self.answer(self.asked)
            return web.json_response(body, status=status)

        async def begin():
            app = web.Application()
            app.router.add_post("/v1/chat/completions", completions)
            # a request that nobody waits for any more keeps no test waiting
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
            started.set()

        def work():
            self.loop.run_until_complete(begin())
            self.loop.run_forever()

        threading.Thread(target=work, daemon=True).start()
        started.wait(10)

    def close(self):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def serve():
    running = []

    def make(answer):
        running.append(Server(answer))
        return running[-1]

    yield make
    for server in running:
        server.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(OpenAIPolicy, "first_answer", 0.5)


def said(text="<end>"):
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {}}


def refusing(status, sentence):
    return lambda n: (status, {"error": {"message": f"{sentence} (request req_{n})"}})


def dead():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(401, "Incorrect API key provided"), (403, "Your plan does not allow this"), (404, "The model `m` does not exist")],
)  # fmt: skip
def test_a_wrong_key_or_model_stops_an_evaluation_at_once(serve, status, sentence, tmp_path, capsys):
    server = serve(refusing(status, sentence))
    words = [
        "eval",
        ENV,
        "--data",
        "mini",
        "--team",
        f"openai:m@{server.url}",
        "--tasks",
        "20",
        "-k",
        "2",
        "-q",
    ]
    assert main([*words, "--concurrency", "4", "--out", str(tmp_path / "e")]) == 1
    told = capsys.readouterr().err
    assert f"HTTP {status} {sentence}" in told and "{" not in told
    assert server.asked <= 8  # those on their way


def test_rollout_and_train_stop_too(serve, tmp_path):
    server = serve(refusing(401, "Incorrect API key provided"))
    team = f"openai:m@{server.url}"
    with pytest.raises(Outage, match="Incorrect API key"):
        unitymas.rollout(ENV, team, data="mini", tasks=20)
    tree = {"map": {"planner": team}, "steps": 2, "tasks_per_step": 4, "k": 2, "log": {"console": "off"}}
    with pytest.raises(Exception, match="Incorrect API key"):
        train(ENV, preset="shared", directory=tmp_path / "run", env={"data": "mini"}, **tree)
    assert server.asked < 200


def test_nobody_there_is_tried_again_and_then_stops(tmp_path, capsys):
    began = time.monotonic()
    words = ["eval", ENV, "--data", "mini", "--team", f"openai:m@{dead()}", "--tasks", "20", "-q"]
    assert main([*words, "--out", str(tmp_path / "e")]) == 1
    told = capsys.readouterr().err
    assert "3 calls in a row failed alike" in told and "refused" in told
    assert "try:" in told or "tries:" in told
    assert time.monotonic() - began < 30


def test_a_later_call_names_the_whole_time_in_which_nobody_was_answered(serve):
    server = serve(lambda n: (500, {"error": "out of memory"}))

    async def two_calls():
        policy = OpenAIPolicy("m", server.url)
        call = Call("a", "a", ({"role": "user", "content": "hi"},))
        return await asyncio.gather(*(policy.act(call) for _ in range(2)), return_exceptions=True), [
            await asyncio.gather(policy.act(call), return_exceptions=True)
        ]

    first, [later] = asyncio.run(two_calls())
    assert all("gave no answer for 'm' within 0.5 s" in str(error) for error in [*first, *later]), [
        *first,
        *later,
    ]
    assert "within 0.5 s; the only try: HTTP 500" in str(later[0])


def test_errors_of_a_server_that_never_answered_stop(serve):
    server = serve(lambda n: (500, {"error": f"out of memory {n}"}))
    with pytest.raises(Outage, match="HTTP 500 out of memory"):
        unitymas.rollout(ENV, f"openai:m@{server.url}", data="mini", tasks=20)


def test_requests_that_are_all_refused_alike_stop(serve):
    server = serve(refusing(400, "seed is not a parameter"))
    with pytest.raises(Outage, match="3 calls in a row failed alike.*HTTP 400 seed is not a parameter"):
        unitymas.rollout(ENV, f"openai:m@{server.url}", data="mini", tasks=20)


def test_failures_now_and_then_are_counted_and_the_rest_goes_on(serve, tmp_path):
    server = serve(
        lambda n: (400, {"error": {"message": "this prompt is too long"}}) if n % 3 == 0 else said()
    )
    result = evaluate(ENV, f"openai:m@{server.url}", data="mini", tasks=12, k=2, concurrency=4, out=tmp_path)
    errors = [row for row in result.rows if row.ended == "error"]
    assert 0 < len(errors) < len(result.rows) == 24
    passing = serve(lambda n: (503, {"error": "busy"}) if n in (3, 7) else said())
    traces = unitymas.rollout(ENV, f"openai:m@{passing.url}", data="mini", tasks=6)
    assert not any(trace.error for trace in traces) and passing.asked > 6


def test_an_endpoint_that_dies_in_the_middle_stops_the_rest(serve, monkeypatch):
    monkeypatch.setattr(Failures, "later", 6)
    server = serve(lambda n: said() if n < 10 else (401, {"error": {"message": "key revoked"}}))
    with pytest.raises(Outage, match="6 calls in a row failed alike.*key revoked"):
        unitymas.rollout(ENV, f"openai:m@{server.url}", data="mini", tasks=40, concurrency=2)


def test_only_rows_of_failures_alike_of_one_policy_are_an_outage():
    failures = Failures()
    for n in range(50):  # different causes
        failures.failed("a", ModelFailure("timeout" if n % 2 else "too long"))
    for _ in range(2):
        failures.failed("b", ModelFailure("no"))
    failures.answered("b")
    for _ in range(31):
        failures.failed("b", ModelFailure("no"))
    failures.answered("b")
    for _ in range(100):
        failures.failed("c", ValueError("somebody's own code"))
    with pytest.raises(Outage, match="3 calls"):
        for n in range(3):
            failures.failed("d", MemoryError(f"{n} GiB"))
