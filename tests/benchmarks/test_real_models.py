"""The comparison of evaluations before and after training, over seeds."""

import json

import numpy as np
import pytest

from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.benchmarks.real_models import Played, compared, interval, main, played


def state(scores, sound=None):
    tasks = {str(i): score for i, score in enumerate(scores)}
    return Played(scores=tasks, legal={}, sound=sorted(tasks if sound is None else sound))


def test_a_gain_is_paired_by_question_and_seed():
    before = {0: state([0, 1, 0, 1]), 1: state([1, 0, 1, 0])}
    after = {seed: state([x + 0.25 for x in run["scores"].values()]) for seed, run in before.items()}
    assert compared(after, before) == pytest.approx((0.25, 0.25, 0.25))


def test_only_questions_that_were_legal_on_both_sides_count_where_asked():
    before, after = {0: state([0.0, 0.0], sound=["0"])}, {0: state([0.5, 1.0])}
    assert compared(after, before)[0] == 0.75
    assert compared(after, before, both_sound=True)[0] == 0.5


def test_seeds_that_disagree_widen_the_interval():
    chance = np.random.default_rng(1)
    alike = [chance.normal(0.1, 0.1, 50) for _ in range(3)]
    apart = [row + shift for row, shift in zip(alike, (-0.3, 0.0, 0.3), strict=True)]
    (mean, low, high), (other, wide_low, wide_high) = interval(alike, 500), interval(apart, 500)
    assert mean == pytest.approx(other) and wide_high - wide_low > 3 * (high - low)


def test_folders_of_evaluations_are_read(tmp_path, capsys):
    for name, team in (("warm0-t0", "random"), ("rl0-t0", "scripted")):
        evaluate("rag-nq", team, k=1, tasks=4, data="mini", out=tmp_path / name)
    assert main([str(tmp_path), "--out", str(tmp_path / "all.json"), "--about", '{"machine": "m"}']) == 0
    record = json.loads((tmp_path / "all.json").read_text())
    greedy = record["temperature 0"]
    assert record["machine"] == "m" and len(greedy["rl"]["0"]["questions"]) == 4
    assert greedy["rl"]["0"]["f1"] == 1.0 and greedy["rl - warm"]["all"][0] > 0
    assert "t0 rl - warm, all: +" in capsys.readouterr().out
    assert main([str(tmp_path), "--figures", "--out", str(tmp_path / "all.json")]) == 0
    figures = json.loads((tmp_path / "all.json").read_text())["rl0-t0"]
    assert figures["f1"][0] == 1.0 and figures["tasks"] == 4 and figures["roles"]["answerer"]["legal"] == 1.0
    with pytest.raises(SystemExit, match="holds no folder"):
        main([str(tmp_path / "warm0-t0")])


def test_all_samples_of_a_question_count(tmp_path):
    told = evaluate("rag-nq", "tiny", k=3, tasks=4, data="mini", out=tmp_path / "warm0-t1", prompts="short")
    scores = played(tmp_path / "warm0-t1")["scores"]
    assert len(scores) == 4 and any(0 < score < 1 for score in scores.values())
    assert np.mean(list(scores.values())) == pytest.approx(told.score.value)
