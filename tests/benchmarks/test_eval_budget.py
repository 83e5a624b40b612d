"""Endpoints in an evaluation: tokens and dollars by role, and a budget that stops it with what was played saved."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import unitymas
from unitymas.benchmarks.evaluation.evaluate import saved_results
from unitymas.cli import main

ENV = "mask-hotpotqa"


@pytest.fixture
def endpoint():
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        asked = 0
        usage = {"usage": {"prompt_tokens": 70, "completion_tokens": 30}}

        def do_POST(self):
            Handler.asked += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            reply = {"message": {"content": "<end>"}, "finish_reason": "stop"}
            body = json.dumps({"choices": [reply], **Handler.usage}).encode()
            self.send_response(200)
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


def evaluate(endpoint, out, *words):
    team = f"planner={endpoint.name},*=scripted"
    plain = f"eval {ENV} --data mini --tasks 6 -k 1 -q --concurrency 1 --max-tokens 30 --out {out}"
    return main([*plain.split(), "--team", team, *words])


def test_tokens_and_dollars_are_told_by_role(endpoint, tmp_path, capsys):
    assert evaluate(endpoint, tmp_path / "e", "--price", "m=1000,10000") == 0
    told = capsys.readouterr()
    calls = endpoint.asked
    assert (
        f"endpoints: ${0.37 * calls:.4g} for {calls} requests, {70 * calls} tokens in and {30 * calls}"
        in told.err
    )
    assert "$ / 1,000 episodes" in told.out and f"{370 * calls / 6:.4g}" in told.out
    figures = saved_results(tmp_path / "e")["figures"]
    assert figures["roles"]["planner"]["cost"] == pytest.approx(0.37 * calls / 6)
    assert "cost" not in figures["roles"]["answerer"]
    assert figures["per_episode"]["cost"] == pytest.approx(0.37 * calls / 6)


def test_a_budget_stops_an_evaluation_and_keeps_what_was_played(endpoint, tmp_path, capsys):
    price = ("--price", "1000,10000")
    assert evaluate(endpoint, tmp_path / "e", *price, "--budget-dollars", "1.2") == 1
    told = capsys.readouterr()
    assert "the budget of $1.2 is spent: $" in told.err and "keeps what was played" in told.err
    results, asked = saved_results(tmp_path / "e"), endpoint.asked
    assert not results["complete"] and 0 < results["figures"]["episodes"] < 6 and 0.37 * asked <= 1.2
    assert results["figures"]["endings"].keys() == {"terminal"}  # who was stopped has no episode
    assert ENV in told.out
    assert evaluate(endpoint, tmp_path / "e", *price, "--budget-dollars", "1.2") == 1
    assert endpoint.asked == asked  # the budget is of all that is kept there
    assert evaluate(endpoint, tmp_path / "e", *price) == 0
    assert saved_results(tmp_path / "e")["complete"]


def test_a_budget_in_tokens_and_one_without_a_price(endpoint, tmp_path, capsys):
    assert evaluate(endpoint, tmp_path / "e", "--budget-tokens", "350") == 1
    assert "the budget of 350 tokens is spent: " in capsys.readouterr().err and endpoint.asked <= 3
    assert evaluate(endpoint, tmp_path / "f", "--budget-dollars", "1") == 1
    assert "the price of 'm' is not known; give it" in capsys.readouterr().err
    assert evaluate(endpoint, tmp_path / "g", "--price", "n=1,1") == 1
    assert "price of 'n': no endpoint of the team has this model" in capsys.readouterr().err


def test_calls_of_episodes_that_never_ended_count_for_the_next_command(endpoint, tmp_path, capsys):
    """The planner and the answerer ask, and the budget ends in the middle of several episodes."""
    words = f"eval {ENV} --data mini --tasks 6 -k 1 -q --concurrency 6 --max-tokens 30 --out {tmp_path / 'e'}"
    team = f"planner={endpoint.name},answerer={endpoint.name},*=scripted"
    command = [*words.split(), "--team", team, "--budget-tokens", "1000"]
    assert main(command) == 1
    asked = endpoint.asked
    bills = json.loads((tmp_path / "e" / "spending.json").read_text())
    assert sum(bill["requests"] for bill in bills.values()) == asked > 0
    assert sum(bill["tokens_in"] + bill["tokens_out"] for bill in bills.values()) == 100 * asked
    assert main(command) == 1 and endpoint.asked == asked
    assert f"{asked} requests" in capsys.readouterr().err


def test_tokens_that_the_server_never_counted_stay_on_the_bill(endpoint, tmp_path, capsys):
    endpoint.usage = {}
    assert evaluate(endpoint, tmp_path / "e", "--budget-tokens", "2000") == 1
    asked = endpoint.asked
    assert asked > 0 and evaluate(endpoint, tmp_path / "e", "--budget-tokens", "2000") == 1
    assert endpoint.asked == asked
    (tmp_path / "e" / "spending.json").write_text('{"planner": 3}')
    assert evaluate(endpoint, tmp_path / "e", "--budget-tokens", "2000") == 1
    assert "spending.json is damaged" in capsys.readouterr().err and endpoint.asked == asked


def test_one_team_counts_a_folder_once(endpoint, tmp_path):
    team = unitymas.Team({"planner": endpoint.name, "*": "scripted"}, max_tokens=30)
    for _ in range(2):
        unitymas.evaluate(ENV, team, data="mini", tasks=2, out=tmp_path / "e")
    assert team.spending.total.requests == endpoint.asked
    again = unitymas.Team({"planner": endpoint.name, "*": "scripted"}, max_tokens=30)
    unitymas.evaluate(ENV, again, data="mini", tasks=2, out=tmp_path / "e")
    assert again.spending.total.requests == endpoint.asked


def test_a_budget_needs_a_longest_reply(endpoint, tmp_path, capsys):
    words = f"eval {ENV} --data mini --tasks 6 -q --budget-tokens 9000 --out {tmp_path / 'e'} --team"
    assert main([*words.split(), f"planner={endpoint.name},*=scripted"]) == 1
    told = capsys.readouterr().err
    assert "planner: a reply of 'm' may have any length" in told and "max_tokens" in told
    assert not endpoint.asked
