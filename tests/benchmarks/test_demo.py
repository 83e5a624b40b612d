"""The demo as it is typed: mistakes before the wait, and what it prints and leaves."""

import json

import pytest

from unitymas.benchmarks import demo
from unitymas.benchmarks.pages import curve


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--env", "maskhotpot"], "did you mean mask-hotpotqa"),
        (["stepz=3"], "did you mean 'steps'"),
        (["--preset", "shred"], "shred"),
        (["k=0"], "k: must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_comes_at_once(typed, says, tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path / "out"), *typed])
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_small_demo_tells_before_after_and_gain(tmp_path, capsys, monkeypatch):
    small = ["steps=1", "tasks_per_step=2", "k=2", "minibatches=1", "eval.tasks=6", "eval.every=1"]
    assert demo.main(["--env", "rag-nq", "--out", str(tmp_path), *small, "--seeds", "3"]) == 0
    printed = capsys.readouterr().out
    (row,) = json.loads((tmp_path / "rag-nq-shared.json").read_text())
    assert row["seed"] == 3 and row["questions"] == 6
    low, high = row["gain"][1:]
    assert low <= row["after"] - row["before"] <= high
    assert row["curve"][0][1] == pytest.approx(row["before"])
    assert row["curve"][-1][1] == pytest.approx(row["after"])
    assert f"{row['before']:.3f}    {row['after']:.3f}" in printed
    assert (tmp_path / "rag-nq-shared-seed3" / "report.html").exists()

    recorded_under_its_command(tmp_path / "rag-nq-shared-seed3", row, tmp_path / "curves.json", monkeypatch)


def recorded_under_its_command(run, row, records, monkeypatch):
    monkeypatch.setattr(curve, "RECORDS", records)
    curve.records.cache_clear()
    records.write_text('{"curves": [], "not_run": []}')
    assert "was not measured" in curve.training("rag-nq")
    for _ in range(2):  # a second run of a command takes the place of the first
        assert curve.main([str(run), "--record", "unitymas train rag-nq steps=1"]) == 0
    (kept,) = json.loads(records.read_text())["curves"]
    assert kept["curve"] == [[step, round(score, 4)] for step, score in row["curve"]]
    assert (kept["env"], kept["seed"], kept["questions"]) == ("rag-nq", 3, 6)
    assert f"{row['before']:.3f} before and {row['after']:.3f} after 1 step" in curve.training("rag-nq")
    assert "| `rag-nq steps=1` | f1 |" in curve.curves_page()
    curve.records.cache_clear()
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if '"kind": "end"' not in line))
    with pytest.raises(SystemExit):
        curve.main([str(run), "--record", "unitymas train rag-nq"])


def test_a_run_that_stopped_is_told_as_such(tmp_path, monkeypatch):
    entry = {
        "command": "unitymas train rag-nq k=2", "env": "rag-nq", "headline": "f1", "seed": 0, "date": "2026-01-01",
        "questions": 9, "curve": [[0, 0.5]], "minutes": 1, "stopped": [3, "learns <nothing>"],
    }  # fmt: skip
    (tmp_path / "curves.json").write_text(json.dumps({"curves": [entry], "not_run": []}))
    monkeypatch.setattr(curve, "RECORDS", tmp_path / "curves.json")
    curve.records.cache_clear()
    assert "does not train it: the run stops by itself after 3 steps, held-out f1 0.500" in curve.training(
        "rag-nq"
    )
    assert "Stopped by itself after 3 steps: learns &lt;nothing&gt;." in curve.curves_page()
    curve.records.cache_clear()
