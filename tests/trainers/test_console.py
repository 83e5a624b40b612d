"""What a terminal shows of a run: all that moves where somebody watches, few lines where nobody does."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console as Rich

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.envs.registry import unregister
from unitymas.trainers.config.schema import RunConfig
from unitymas.trainers.controller.reporting import progress
from unitymas.trainers.controller.reporting.console import Console
from unitymas.trainers.controller.reporting.progress import Progress, Speed
from unitymas.trainers.controller.run import train


class One(Workflow):
    roles = (Role("only", reply=Choice("w1", "w2")),)

    async def run(self, ep):
        said = await ep.act("only", ep.task.question)
        return Outcome(answer=said.value)


def right(trace, task):
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


@pytest.fixture(scope="module", autouse=True)
def environment():
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": ["w1"]} for i in range(4)]
    unitymas.register("one-of-console", workflow=One, reward=right, tasks=rows)
    yield
    unregister("one-of-console")


def config(model, **more):
    policy = {"algorithm": {"name": "grpo"}, "sampling": {"max_tokens": 2}}
    common = {
        "steps": 2, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "deterministic": True,
        "eval": {"every": 0, "tasks": 2}, "policies": {"team": policy}, "checkpoint_every": 1,
        "groups": {"main": {"model": model, "slots": 4, "threads": 1}},
    }  # fmt: skip
    return {**common, **more}


def test_a_pace_counts_the_time_in_which_anything_runs_once(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pace = Speed()
    with pace.running():  # at 0
        pace.tokens += 5
        with pace.running():  # at 10; both end at 20 and 30
            pace.tokens += 7
    assert pace.taken() == 12 / 30
    assert pace.taken() == 0.0  # nothing ran
    with pace.running():
        pace.tokens += 3
        assert pace.taken() == 3 / 10  # still running
        pace.tokens += 4
    assert pace.taken() == 4 / 10


def test_with_overlap_the_speed_is_that_of_all_draws_together(tiny_llama, tmp_path, monkeypatch):
    """Draws run side by side: the sum of their times says nothing of the speed."""
    monkeypatch.setattr(Speed, "taken", lambda self: 1000.0 + self.tokens)
    run = train("one-of-console", directory=tmp_path / "run", **config(tiny_llama, overlap="wait"))
    rates = [row["time/rollout_tokens_per_second"] for row in run.history if row["kind"] == "step"]
    assert len(rates) == 2 and 1000 < rates[0] < rates[1] <= 1000 + 2 * 2 * 2 * 2


def test_a_run_says_where_it_is_and_what_it_trains(tiny_llama, tmp_path, capsys):
    where = tmp_path / "run"
    train("one-of-console", directory=where, **config(tiny_llama))
    said = capsys.readouterr().out
    flat = said.replace("\n", "")
    assert str(where) in flat and tiny_llama in flat and "4 tasks of" in said and "team 0.0M" in said
    assert "steps  2 of 2 tasks × 2 samples" in said
    assert "step    1/2" in said and "step    2/2" in said and said.count("validation") == 2
    assert "\x1b" not in said and "━" not in said  # nobody watches: lines, and none within so short a step
    assert len(said.splitlines()) < 16
    train(directory=where, resume=True, overrides=["steps=3"])
    again = capsys.readouterr().out
    assert "step    3/3" in again and "step    1/3" not in again


def test_who_watches_sees_the_step_go_on(tiny_llama, tmp_path, monkeypatch):
    """The live page has a bar for the episodes, the update and the validation."""
    seen = []
    real = Console.progressed

    def progressed(self, progress):
        self.shown = 0.0  # no pause between two pictures
        real(self, progress)
        paper = io.StringIO()
        Rich(file=paper, width=150).print(self._page(len(self.train)))
        seen.append(paper.getvalue())

    monkeypatch.setattr(Console, "progressed", progressed)
    train("one-of-console", directory=tmp_path / "run", **config(tiny_llama, log={"console": "live"}))
    text = "".join(seen)
    for part in (
        "validating  0/2",
        "validating  2/2",
        "playing  1/4",
        "playing  4/4",
        "updating team",
        "writing step-000001",
        "tok/s",
        "━",
    ):
        assert part in text, part
    assert "validation" in seen[-1] and "only" in seen[-1]


def test_a_long_step_says_a_line_now_and_then(capsys):
    console = Console(RunConfig(), "score", live=False, every=0.0)
    progress = Progress()
    progress.show = console.progressed
    progress.begin("playing", 8)
    for _ in range(3):
        progress.ended(tokens=50)
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-1].startswith("step    1/60  playing  3/8") and "tok/s" in lines[-1] and "s left" in lines[-1]
    )
    quiet = Console(RunConfig(), "score", live=False)
    progress.show = quiet.progressed
    progress.ended(tokens=50)
    assert not capsys.readouterr().out
