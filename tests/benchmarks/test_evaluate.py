"""Evaluations: right figures, nothing generated twice, nothing lost to a kill, nothing obeyed from a
reply.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unitymas.agents import TINY
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.llm import LLMPolicy
from unitymas.agents.model.weights import load_model, load_tokenizer
from unitymas.agents.policies import Answer, Call
from unitymas.agents.roles import Choice, Role
from unitymas.benchmarks.evaluation import episode_files as store
from unitymas.benchmarks.evaluation import evaluate as ev
from unitymas.benchmarks.evaluation import result_tables, suites
from unitymas.benchmarks.evaluation.terminal import Board
from unitymas.cli import evaluation as evalcli
from unitymas.cli import main
from unitymas.envs import registry
from unitymas.envs.core.ledger import Credit
from unitymas.envs.core.trace import read_dicts
from unitymas.envs.core.workflow import Episode, Outcome, Workflow

SCRIPT = Path(__file__).with_name("killed_evaluation.py")
TASKS = [
    {"id": f"t{i}", "question": f"Is {i} even?", "answers": ["yes" if i % 2 == 0 else "no"]}
    for i in range(12)
]


class TwoMinds(Workflow):
    """One says, the other may veto: `yes` and `no` are the only words."""

    roles = (
        Role("speaker", reply=Choice("yes", "no", otherwise="")),
        Role("vetoer", reply=Choice("pass", "veto", otherwise="veto")),
    )

    async def run(self, ep: Episode) -> Outcome:
        said = await ep.act("speaker", str(ep.task["question"]))
        verdict = await ep.act("vetoer", f"{ep.task['question']} {said.value}")
        return Outcome(answer=said.value if verdict.value == "pass" else "")


class Right:
    name = "right"

    def on_end(self, trace: Any, task: Any) -> Iterator[Credit]:
        good = float(trace.outcome is not None and trace.outcome["answer"] in task.reference["answers"])
        for node in trace.acts():
            yield Credit(node.id, "right", good)

    def metrics(self, trace: Any, task: Any) -> dict[str, float]:
        return {
            "accuracy": float(
                trace.outcome is not None and trace.outcome["answer"] in task.reference["answers"]
            )
        }


class Knower:
    """Right on a share of the samples, malformed or failing on others; counts what it is asked."""

    def __init__(self, wrong: int = 0, fails: int = 0) -> None:
        self.wrong, self.fails, self.asked = wrong, fails, 0

    def identity(self) -> dict[str, Any]:
        return {"model": "knower", "wrong": self.wrong, "fails": self.fails}

    def act(self, call: Call) -> Answer:
        self.asked += 1
        if call.role == "vetoer":
            return Answer("pass", {"tokens_in": 7, "tokens_out": 1})
        number = int(call.messages[-1]["content"].split()[1])
        sample = int(call.episode.split("#")[1])
        if sample < self.fails and number == 0:
            raise ConnectionError("the endpoint \x1b[2J is down")
        truth = "yes" if number % 2 == 0 else "no"
        text = "perhaps" if sample < self.wrong and number < 6 else truth
        return Answer(text, {"tokens_in": 10, "tokens_out": 2, "finish_reason": "stop"})


@pytest.fixture(autouse=True)
def two_minds() -> Iterator[None]:
    registry.register("two-minds", TwoMinds, reward=(Right,), tasks=TASKS, headline="accuracy")
    yield
    registry.unregister("two-minds")


def test_figures_are_those_of_the_definition() -> None:
    result = ev.evaluate("two-minds", Knower(wrong=1), k=4)
    figures = result.figures
    assert result.score.value == pytest.approx(np.mean([0.75] * 6 + [1.0] * 6))
    assert result.pass_at(1).value == pytest.approx(result.score.value)
    assert result.pass_at(4).value == 1.0 and result.pass_hat(4).value == 0.5
    assert figures["success"] == "accuracy >= 1" and figures["tasks"] == 12 and figures["episodes"] == 48
    assert result.roles["speaker"]["format_validity"] == pytest.approx(1 - 6 / 48)
    assert result.roles["vetoer"]["tokens_in"] == 7
    assert figures["per_episode"]["tokens_out"] == 3
    assert result.plain["complete"] and result.plain["provenance"]["roles"]["speaker"]["model"] == "knower"


def test_failures_count_zero_in_the_headline_and_are_shown_apart() -> None:
    result = ev.evaluate("two-minds", Knower(fails=2), k=4)
    assert result.score.value == pytest.approx((11 + 0.5) / 12)
    assert result.figures["score_without_errors"]["value"] == 1.0
    assert result.figures["endings"] == {"error": 2, "terminal": 46}
    assert result.figures["failures"] == {"model: ConnectionError": 2}
    assert "\x1b" not in result.markdown()


def test_a_second_run_plays_only_what_is_owed(tmp_path: Path) -> None:
    ev.evaluate("two-minds", Knower(), k=2, out=tmp_path)
    again = Knower()
    result = ev.evaluate("two-minds", again, k=2, out=tmp_path)
    assert again.asked == 0 and result.figures["episodes"] == 24
    more = Knower()
    assert ev.Evaluation("two-minds", more, k=3, out=tmp_path).plan()["owed"] == 12
    ev.evaluate("two-minds", more, k=3, out=tmp_path)
    assert more.asked == 24, "the third sample of 12 tasks, two roles each"
    other = Knower(fails=1)
    ev.evaluate("two-minds", other, k=1, tasks=2, out=tmp_path)
    assert other.asked == 3, "another team has other keys; one role was not asked after a failure"
    owed = ev.Evaluation("two-minds", Knower(fails=1), k=1, tasks=2, out=tmp_path)
    assert [sample for _, sample in owed.owed.values()] == [0], "what an outage ended is owed again"


def test_two_runs_give_the_same_result_apart_from_dates_and_timings(tmp_path: Path) -> None:
    for name in "ab":
        ev.evaluate(
            "two-minds",
            Knower(wrong=1, fails=1),
            k=3,
            out=tmp_path / name,
            concurrency=3 if name == "a" else 64,
        )
    plain = [ev.saved_results(tmp_path / name) for name in "ab"]
    for one in plain:
        del one["run"], one["figures"]["timing"], one["provenance"]["git"]  # somebody may commit meanwhile
    assert json.dumps(plain[0]) == json.dumps(plain[1])


def test_deterministic_runs_of_a_model_agree_to_the_last_bit(tmp_path: Path) -> None:
    """Whatever is played at the same time: scores, replies, and the log-prob of every token."""
    model, tokenizer = load_model(TINY), load_tokenizer(TINY)
    found = []
    for name, concurrency in (("a", 2), ("b", 64)):
        player = LLMPolicy(TorchEngine(model, tokenizer, slots=8, context=256), tokenizer, source=TINY)
        how: dict[str, Any] = {
            "data": "mini",
            "top_k": 1,
            "k": 2,
            "tasks": 2,
            "tokens": True,
            "deterministic": True,
        }
        ev.evaluate("mask-nq", player, out=tmp_path / name, concurrency=concurrency, **how)
        plain = ev.saved_results(tmp_path / name)
        del plain["run"], plain["figures"]["timing"], plain["provenance"]["git"]
        said = {
            trace["tags"]["key"]: [
                (node["reply"], node["meta"]["tokens"]) for node in trace["nodes"] if node["kind"] == "act"
            ]
            for trace in ev.Store(tmp_path / name).episodes()
        }
        found.append((json.dumps(plain), said))
    assert found[0] == found[1]
    assert len(found[0][1]) == 4 and all(len(acts) > 2 for acts in found[0][1].values())
    assert '"deterministic": true' in found[0][0]


def test_a_remote_model_is_not_deterministic() -> None:
    with pytest.raises(ValueError, match=r"'http://x/v1'.*does not promise the same reply twice"):
        ev.Evaluation("two-minds", "openai:m@http://x/v1", deterministic=True)


def test_rescore_applies_new_rules_to_saved_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ev.evaluate("two-minds", Knower(wrong=1), k=2, out=tmp_path)
    monkeypatch.setattr(Right, "metrics", lambda self, trace, task: {"accuracy": 0.5})
    silent = Knower(wrong=1)
    result = ev.evaluate("two-minds", silent, k=2, out=tmp_path, rescore=True)
    assert silent.asked == 0 and result.score.value == 0.5 and result.figures["episodes"] == 24
    with pytest.raises(ValueError, match="no episode of this team"):
        ev.evaluate("two-minds", Knower(wrong=2), k=2, out=tmp_path, rescore=True)


def test_ablation_and_swap_find_the_role_that_carries() -> None:
    def vetoes(agent: str, messages: Any) -> str:
        return "veto"

    lost = {e.role: e.difference for e in ev.ablate("two-minds", Knower(), vetoes, k=2)}
    assert lost["vetoer"].value == -1.0 and lost["speaker"].value == -1.0
    assert lost["vetoer"].p < 0.001 and lost["vetoer"].tasks == 12
    won = {
        e.role: e.difference.value
        for e in ev.swap("two-minds", Knower(), {"speaker": Knower(), "vetoer": vetoes}, k=2)
    }
    assert won == {"speaker": 0.0, "vetoer": 1.0}
    assert "| vetoer " in result_tables.effects_markdown(
        "role", ev.ablate("two-minds", Knower(), vetoes, k=1, tasks=3)
    )


def test_own_rows_and_ready_environments() -> None:
    rows = [{"id": "mine", "question": "Is 3 even?", "answers": ["no"]}]
    assert ev.evaluate("two-minds", Knower(), k=1, tasks=rows).score.value == 1.0
    assert ev.evaluate(registry.make("two-minds"), Knower(), k=1, tasks=["t3"]).figures["tasks"] == 1
    with pytest.raises(TypeError, match="already made"):
        ev.evaluate(registry.make("two-minds"), Knower(), k=1, max_turns=3)


class Halves:
    """A rule with metrics of its own, none of which is the headline."""

    name = "halves"

    def on_end(self, trace: Any, task: Any) -> list[Any]:
        return []

    def metrics(self, trace: Any, task: Any) -> dict[str, float]:
        return {"half": 0.5}


def test_different_data_is_not_compared() -> None:
    ours = ev.evaluate("two-minds", Knower(), k=1)
    theirs = ev.evaluate("two-minds", Knower(), k=1, tasks=TASKS[:2])
    with pytest.raises(ValueError, match="different data"):
        ours.minus(theirs)


def test_without_any_reward_nothing_is_measured() -> None:
    with pytest.raises(
        ValueError, match="headline metric 'accuracy': two-minds-v0 was made without a reward"
    ):
        ev.evaluate("two-minds", Knower(), k=1, reward=None)


@pytest.mark.parametrize("own", [lambda trace, task: 0.5, Halves()])
def test_an_own_reward_ranks_by_its_score(own: Any, tmp_path: Any) -> None:
    result = ev.evaluate("two-minds", Knower(), k=1, reward=own, out=tmp_path)
    assert result.score.value == 0.5 and result.figures["headline"] == "score"
    assert result.figures["success"] == "score >= 1" and result.rows[0].score == 0.5
    assert ev.evaluate("two-minds", Knower(), k=1, reward=own, out=tmp_path, rescore=True).score.value == 0.5


def test_keys_change_with_all_that_an_episode_depends_on() -> None:
    def keys(**how: Any) -> set[str]:
        return set(ev.Evaluation("two-minds", **{"team": Knower(), "k": 1, **how}).wanted)

    base = keys()
    assert base == keys()
    changed = [keys(team=Knower(wrong=1)), keys(seed=1), keys(budget={"requests": 3}),
               keys(tasks=[{**row, "question": row["question"] + " "} for row in TASKS])]  # fmt: skip
    assert not any(base & other for other in changed)


def test_functions_are_told_apart_by_their_source_and_what_they_caught() -> None:
    def says(word: str) -> Callable[[str, Any], str]:
        return lambda agent, messages: word

    players = [lambda agent, messages: "yes", lambda agent, messages: "no", says("yes"), says("no")]
    keys = [frozenset(ev.Evaluation("two-minds", player, k=1).wanted) for player in players]
    assert len(set(keys)) == 4
    assert keys[3] == frozenset(ev.Evaluation("two-minds", says("no"), k=1).wanted)


def test_store_cuts_a_torn_tail_at_any_byte_and_goes_on(tmp_path: Path) -> None:
    ev.evaluate("two-minds", Knower(), k=1, out=tmp_path / "whole")
    whole = (tmp_path / "whole" / store.FILE).read_bytes()
    assert store.whole_frames(tmp_path / "whole" / store.FILE) == len(whole)
    for cut in random.Random(0).sample(range(1, len(whole)), 25):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / store.FILE).write_bytes(whole[:cut])
        kept = len(list(read_dicts(folder / store.FILE)))
        again = Knower()
        result = ev.evaluate("two-minds", again, k=1, out=folder)
        assert again.asked == 2 * (12 - kept) and result.score.value == 1.0
        assert len(list(read_dicts(folder / store.FILE))) == 12


def test_killed_ten_times_at_random_it_ends_in_the_same_table(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / name)], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    assert start("calm").wait(60) == 0
    calls, finished = tmp_path / "wild.calls", tmp_path / "wild" / store.FILE
    rng = random.Random(0)
    for _ in range(10):
        before = len(calls.read_text().split()) if calls.exists() else 0
        done = {f"{t['task_id']}#{t['sample']}" for t in read_dicts(finished)} if finished.exists() else set()
        process = start("wild")
        until = before + rng.randint(1, 30)
        while process.poll() is None and (not calls.exists() or len(calls.read_text().split()) < until):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not done & set(calls.read_text().split()[before:]), "a finished episode was generated again"
    assert start("wild").wait(60) == 0
    calm, wild = (ev.saved_results(tmp_path / name) for name in ("calm", "wild"))
    for plain in (calm, wild):
        del plain["run"], plain["figures"]["timing"], plain["provenance"]["git"]
    assert calm == wild
    keys = [trace["tags"]["key"] for trace in read_dicts(finished)]
    assert len(keys) == len(set(keys)) == 120


def test_the_board_shows_hostile_causes_harmlessly() -> None:
    stream = io.StringIO()
    with Board("two\x1b[2Jminds", 8, stream=stream) as board:
        ev.evaluate("two-minds", Knower(fails=1), k=4, tasks=2, on_episode=board.episode)
        from rich.console import Console

        painted = io.StringIO()
        Console(file=painted, width=120).print(board._table())
    assert "8/8 episodes" in stream.getvalue() and "score 0.875" in stream.getvalue()
    assert "1 × model: ConnectionError" in painted.getvalue()
    assert "\x1b" not in stream.getvalue() + painted.getvalue()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = [
        "mask-hotpotqa",
        "--data",
        "mini",
        "--team",
        "scripted",
        "--tasks",
        "4",
        "-k",
        "2",
        "--out",
        str(tmp_path),
        "-q",
    ]
    assert evalcli.eval_main([*how, "--dry-run"]) == 0
    assert "4 tasks × 2 = 8 episodes, 0 finished, 8 to play" in capsys.readouterr().out
    assert evalcli.eval_main([*how, "--baseline", "fool", "--ablate", "--format", "latex"]) == 0
    printed = capsys.readouterr().out
    assert r"\begin{tabular}" in printed and "scripted minus fool: +1.000" in printed and "by fool" in printed
    with pytest.raises(SystemExit):
        evalcli.eval_main([*how, "--swap"])
    with pytest.raises(SystemExit):
        evalcli.eval_main([*how, "--nonsense"])


def test_teams_from_the_command_line() -> None:
    assert evalcli.parse_team("hf:some/model") == "hf:some/model"
    assert evalcli.parse_team("*=tiny,planner=openai:m@http://h:1/v1?a=b") == {
        "*": "tiny",
        "planner": "openai:m@http://h:1/v1?a=b",
    }
    with pytest.raises(ValueError, match="no seat"):
        evalcli.parse_team("planner=tiny,oops")


def test_a_suite_loads_its_model_once() -> None:
    made = suites.evaluations("suite:mini", "tiny", k=1, tasks=1)
    assert len({id(p) for evaluation in made.values() for p in evaluation.team.policies.values()}) == 1


def test_a_suite_of_real_data_says_how_to_prepare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path))
    assert main(["eval", "suite:packaged", "--team", "scripted", "--dry-run"]) == 1
    assert capsys.readouterr().err.endswith(
        "suite:packaged-v1 is defined on real data, and this machine lacks gsm8k, mbpp, squad; prepare it with: "
        "unitymas data prepare gsm8k && unitymas data prepare mbpp && unitymas data prepare squad\n"
    )
    with pytest.raises(ValueError, match="suite:qa-v1 .* lacks hotpotqa, musique, nq;"):
        suites.evaluations("suite:qa", "scripted", k=1)  # the mini world is no real data
    where = {"data": "mini", "split": "validation"}  # of one's own choice
    made = suites.evaluations("suite:code", "scripted", k=1, tasks=1, out=tmp_path, **where)
    assert {(one.arena.data.name, one.arena.data.split) for one in made.values()} == {("mini", "validation")}


def test_suites_are_versioned_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suites.suite("suite:mini").id == suites.suite("mini-v1").id == "suite:mini-v1"
    with pytest.raises(KeyError, match="did you mean 'suite:mini'"):
        suites.suite("suite:miny")
    with pytest.raises(KeyError, match="not the version of this release"):
        suites.suite("suite:mini-v99")
    chosen = suites.suite("mini")
    monkeypatch.setattr(suites, "pins", lambda: {chosen.id: {"mask-nq": "another"}})
    data = registry.make_arena("mask-nq", split="test", data="mini").data
    with pytest.raises(ValueError, match="is defined on another"):
        suites.check_pin(chosen, "mask-nq", data)


def test_inside_a_running_loop() -> None:
    async def notebook() -> float:
        return float(ev.evaluate("two-minds", Knower(), k=1, tasks=3).score.value)

    assert asyncio.run(notebook()) == 1.0


def test_the_pins_are_those_of_this_release() -> None:
    """When environments or test data changed on purpose: raise the suite's version, then print the pins anew:
    `python -m unitymas.benchmarks.evaluation.suites > suites.json`, and put that into `benchmarks/pages/assets`.
    """
    registry.unregister("two-minds")
    try:
        assert suites.pins() == suites.compose()
    finally:
        registry.register("two-minds", TwoMinds)
