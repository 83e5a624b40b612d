"""A part of an entry played again: what it finds, and what it does not open."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.policies import Answer, Call
from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.benchmarks.leaderboard import board as leaderboard
from unitymas.benchmarks.leaderboard import submission
from unitymas.benchmarks.leaderboard.rerun import rerun

ENV = "chain-deepscaler"


class Model:
    """A model as it looks from outside; `knows` is what it should not: the answers."""

    sees_reference = True

    def __init__(self, temperature: float = 1.0, knows: bool = False) -> None:
        self.temperature, self.knows = temperature, knows

    def act(self, call: Call) -> Answer:
        answer = call.task.reference["answer"] if self.knows else call.seed % 7
        said = f"{call.seed if self.temperature else 'So'}: \\boxed{{{answer}}}"
        meta = {
            "policy": "hf:a/model",
            "version": 0,
            "tokens_in": 9,
            "tokens_out": 12,
            "finish_reason": "stop",
        }
        return Answer(said, meta)

    def identity(self) -> dict[str, Any]:
        return {
            "model": "hf:a/model", "weights": "0" * 64, "template_sha": "1" * 16, "adapter": None,
            "sampling": asdict(SamplingParams(self.temperature, max_tokens=64)),
        }  # fmt: skip

    def __repr__(self) -> str:
        return "hf:a/model"


def entry(folder: Path, team: Any) -> Path:
    evaluate(ENV, team, k=2, tasks=12, data="mini", out=folder / "run")
    return submission.pack(folder / "run", folder / "entry", name="x")


def test_a_scripted_team_says_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = entry(tmp_path, "scripted")
    assert leaderboard.leaderboard_main(["rerun", str(folder), "--share", "0.25", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert (
        "3 tasks, 6 episodes played again" in printed and "6 of 6 episodes have the same replies" in printed
    )


def test_a_greedy_model_is_compared_letter_by_letter(tmp_path: Path) -> None:
    folder = entry(tmp_path, Model(temperature=0.0))
    assert rerun(folder, Model(temperature=0.0), share=0.5, seed=1).agrees
    found = rerun(folder, Model(temperature=0.0, knows=True), share=0.5, seed=1)
    assert found.exact and not found.agrees and len(found.unlike) > 1


def test_a_sampled_team_is_compared_by_its_scores(tmp_path: Path) -> None:
    fair = rerun(entry(tmp_path / "fair", Model()), Model(), share=1, seed=1)
    assert fair.agrees and not fair.exact and "only scores are compared" in str(fair)
    cheated = rerun(entry(tmp_path / "cheated", Model(knows=True)), Model(), share=1, seed=1)
    assert not cheated.agrees and cheated.difference.p < 0.01 and cheated.difference.value > 0.3


def test_another_player_than_the_entry_names_is_said(tmp_path: Path) -> None:
    found = rerun(entry(tmp_path, "fool"), "random", share=0.1, seed=1)
    assert not found.agrees and any("was 'fool'" in line for line in found.strangers)


def test_what_an_entry_names_is_not_opened(tmp_path: Path) -> None:
    folder = entry(tmp_path, Model())
    with pytest.raises(ValueError, match=re.escape("are not opened, so say who plays: --team")):
        rerun(folder)
    (folder / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="is not verified"):
        rerun(folder, Model())
