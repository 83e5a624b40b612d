"""A run's live page: it follows the run, keeps what the reader has open, and says how the run ends."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from unitymas.benchmarks.pages import live
from unitymas.cli.pages import view_main

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "traces").mkdir(parents=True)
    say(folder, kind="begin", step=0, env_id="mask-hotpotqa-v0", headline="f1", config={"steps": 8})
    return folder


def say(folder: Path, **row: Any) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"time": 1000.0, **row}) + "\n")


def validated(folder: Path, step: int, episodes: list[dict[str, Any]]) -> None:
    say(folder, kind="validation", step=step, f1=step / 10)
    lines = (zstandard.compress((json.dumps(e) + "\n").encode()) for e in episodes)
    (folder / "traces" / f"validation-{step:06d}.jsonl.zst").write_bytes(b"".join(lines))


def get(server: live.LiveServer, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2])
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode("utf-8", "replace")


def test_it_answers_this_machine_only_and_only_reads(run: Path) -> None:
    with live.watching(run, linger=0) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert get(server, "/")[0] == get(server, "/state.json")[0] == get(server, "/episodes.html")[0] == 200
        assert get(server, "/", host="evil.example:80")[0] == 403, (
            "a name that was pointed here (DNS rebinding)"
        )
        assert get(server, "/metrics.jsonl")[0] == get(server, "/../run/metrics.jsonl")[0] == 404
        assert get(server, "/", method="POST")[0] == 501
        assert "connect-src 'self'" in get(server, "/")[1] and "unsafe" not in get(server, "/")[1]


def test_the_state_says_how_the_run_is_doing(run: Path, tmp_path: Path) -> None:
    shown = live.LiveRun(run)
    assert shown.status() == {"going": True, "words": "step 0 of 8"}
    before = shown.stamp()
    say(run, kind="step", step=1)
    assert shown.stamp() != before and shown.status()["words"] == "step 1 of 8"
    assert b"running" in shown.page("report") and b"or killed" not in shown.page("report")
    long_ago = time.time() - 3600
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))
    assert "no news for 60 min: it may have been killed" in shown.status()["words"]
    assert not live.in_progress(run), "a run without news is shown as it stands, without a server"
    say(run, kind="end", ending="failed: ValueError: <b>")
    assert shown.status() == {"going": False, "words": "the run has ended: failed: ValueError: <b>"}
    assert not live.in_progress(run) and not live.in_progress(tmp_path / "gone")
    empty = live.LiveRun(tmp_path / "gone")
    assert empty.status()["words"].startswith("waiting for ") and b"Nothing is here yet" in empty.page(
        "report"
    )


def test_pages_are_made_when_something_changed(run: Path) -> None:
    shown = live.LiveRun(run)
    once = shown.page("report")
    assert shown.page("report") is once
    say(run, kind="step", step=1)
    assert shown.page("report") is not once


def test_a_torn_trace_file_is_shown_up_to_the_tear(run: Path, episode: Make) -> None:
    validated(run, 0, [episode(i) for i in range(3)])
    file = run / "traces/validation-000000.jsonl.zst"
    file.write_bytes(file.read_bytes()[:-5])
    assert b'id="block0"' in live.LiveRun(run).page("episodes")


@pytest.mark.parametrize("extra", [["beside"], ["-o", "x.html"]])
def test_live_is_of_one_directory(run: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        view_main([str(run), "--live", *extra])
    assert "--live shows one run's directory" in capsys.readouterr().err


@pytest.mark.browser
def test_open_pages_follow_the_run_and_keep_what_is_open(run: Path, episode: Make, browser: Any) -> None:
    validated(run, 4, [episode(i) for i in range(4)])
    with live.watching(run, linger=0) as server:
        report, episodes = browser.new_page(), browser.new_page()
        errors: list[str] = []
        for page_ in (report, episodes):
            page_.on("pageerror", lambda error: errors.append(str(error)))
        report.goto(server.address)
        episodes.goto(server.address + "episodes.html#a=2&node=3")
        report.get_by_text("step 0 of 8").wait_for()
        episodes.wait_for_selector(".episode[data-i='2']")
        report.click("summary")
        episodes.click(".episode summary >> nth=0")
        validated(run, 0, [episode(i, good=False) for i in range(6)])  # it stands before what is open
        for step in (1, 2):
            say(run, kind="step", step=step, **{"train/f1": step / 10, "acts": step})
        say(run, kind="end", ending="done")
        report.get_by_text("the run has ended: done").wait_for(timeout=20_000)
        episodes.wait_for_selector(".episode[data-i='8']", timeout=20_000)
        assert (
            report.eval_on_selector("#head details", "d => d.open") and report.locator("#drift svg").count()
        )
        assert episodes.eval_on_selector(".episode details", "d => d.open") and "node=3" in episodes.url
        assert episodes.inner_text("#counts").startswith("10 of 10")
        assert not errors
    report.get_by_text("The server has gone").wait_for(timeout=20_000)
    for page_ in (report, episodes):
        page_.close()
