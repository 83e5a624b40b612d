"""The demo as it is typed: mistakes before the wait, and what it prints and leaves."""

import json

import pytest

from unitymas.benchmarks import demo


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


def test_a_small_demo_tells_before_after_and_gain(tmp_path, capsys):
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
