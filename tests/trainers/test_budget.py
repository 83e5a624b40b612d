"""Endpoints in training: one policy for the whole run, their bills by role, and a budget that stops the run."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unitymas.agents.basics.failures import Failures, Outage
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.checkpoint import latest
from unitymas.trainers.controller.run import Stopped, train

TOKENS = {"prompt_tokens": 70, "completion_tokens": 30}


@pytest.fixture
def endpoint():
    class Handler(BaseHTTPRequestHandler):
        asked = 0
        status = 200
        look = staticmethod(lambda: None)

        def do_POST(self):
            Handler.asked += 1
            Handler.look()
            self.rfile.read(int(self.headers["Content-Length"]))
            reply = {"message": {"content": "<end>"}, "finish_reason": "stop"}
            body = json.dumps({"choices": [reply], "usage": TOKENS}).encode()
            self.send_response(Handler.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    Handler.name = f"openai:m@http://127.0.0.1:{http.server_port}/v1"
    yield Handler
    http.shutdown()
    http.server_close()


def run(endpoint, directory, budget, **how):
    return train(
        None if how.get("resume") else "mask-hotpotqa", preset=None if how.get("resume") else "shared",
        directory=directory, env={"data": "mini"}, map={"planner": endpoint.name}, tasks_per_step=2, k=1, minibatches=1,
        policies={"*": {"sampling": {"max_tokens": 8}}}, eval={"every": 0, "tasks": 2}, log={"console": "off"}, starved=False,
        players={"price": {"m": [1000, 10_000]}, "budget_dollars": budget, "max_tokens": 30}, **{"checkpoint_every": 0, **how},
    )  # fmt: skip


def steps_of(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"], rows[-1]


def test_a_budget_stops_a_run_and_loses_no_step(endpoint, tmp_path):
    """A call costs $0.37; a step asks the endpoint twice. The last step that fits is in a checkpoint."""
    where = tmp_path / "run"
    with pytest.raises(Stopped, match=r"the budget of \$2.5 is spent: \$.*players\.\*.*--resume"):
        run(endpoint, where, 2.5, steps=9)
    steps, end = steps_of(where)
    assert steps and end["ending"].startswith("stopped: the budget of $2.5 is spent")
    spent = json.loads((where / "spending.json").read_text())["planner"]
    assert spent["dollars"] <= 2.5 and spent["requests"] == endpoint.asked
    assert spent["tokens_in"] == 70 * endpoint.asked and steps[-1]["spent/planner/tokens_out"] % 30 == 0
    assert steps[-1]["spent/dollars"] == pytest.approx(0.37 * steps[-1]["spent/requests"])
    assert latest(where / "checkpoints").name == f"step-{len(steps):06d}"
    assert (where / "policies" / "team" / "model.safetensors").is_file()
    asked = endpoint.asked
    with pytest.raises(Stopped, match="the budget of"):  # what was spent stays spent
        run(endpoint, where, 2.5, resume=True)
    assert endpoint.asked == asked
    run(endpoint, where, 60, resume=True, steps=len(steps) + 1)
    assert len(steps_of(where)[0]) == len(steps) + 1
    assert json.loads((where / "spending.json").read_text())["planner"]["requests"] == endpoint.asked


def test_players_settings_are_checked_before_anything_starts(endpoint, tmp_path):
    for players, says in (
        ({"budget_dollars": 1}, "players: .*price of 'm' is not known"),
        ({"budget_tokens": 0}, "players: budget_tokens=0, but it must be 1 or more"),
        ({"price": {"m": [1]}}, "players.price.m: expected 2 values"),
        ({"requests_per_min": 1}, "did you mean 'requests_per_minute'"),
    ):
        with pytest.raises(ConfigError, match=says):
            train(
                "mask-hotpotqa",
                preset="shared",
                directory=tmp_path / "run",
                map={"planner": endpoint.name},
                players=players,
            )
    with pytest.raises(ConfigError, match="players: budget_tokens was given, but nobody"):
        train("mask-hotpotqa", preset="shared", directory=tmp_path / "run", players={"budget_tokens": 10})
    assert not endpoint.asked


def test_a_kill_forgets_no_call(endpoint, tmp_path):
    """The file holds every call that has ended, at any moment of the first step."""
    where, kept, open_now = tmp_path / "run", [], []

    def look():
        path = where / "spending.json"
        kept.append(json.loads(path.read_text())["planner"]["requests"] if path.is_file() else 0)
        open_now.append(endpoint.asked)

    endpoint.look = look
    run(endpoint, where, 60, steps=1, concurrency=1)
    assert len(kept) > 2 and kept == [asked - 1 for asked in open_now]


def test_an_endpoint_that_fails_for_good_loses_no_step_that_took_long(endpoint, tmp_path, monkeypatch):
    """It fails in the third step, long before the first regular checkpoint. Steps as short as saving may be lost."""
    monkeypatch.setattr(Failures, "later", 2)
    where = tmp_path / "run"

    def look():
        path = where / "metrics.jsonl"
        done = path.read_text().count('"kind": "step"') if path.is_file() else 0
        endpoint.status = 200 if done < 2 else 401

    endpoint.look = look
    with pytest.raises(Outage, match="HTTP 401"):
        run(endpoint, where, 60, steps=4, checkpoint_every=20)
    assert len(steps_of(where)[0]) == 2
    assert latest(where / "checkpoints").name in ("step-000001", "step-000002")
    endpoint.look, endpoint.status = (lambda: None), 200
    run(endpoint, where, 60, resume=True)
    assert [row["step"] for row in steps_of(where)[0]] == [1, 2, 3, 4]
