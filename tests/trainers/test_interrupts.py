"""Ctrl-C at every moment of a run, from the command line, from Python, from a notebook: what is kept, and what is said."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.cli import main
from unitymas.envs.registry import unregister
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.all_groups import HostedGroups
from unitymas.trainers.controller.run import Run, train
from unitymas.trainers.controller.step import Default
from unitymas.trainers.recipes import register_recipe

ID = "one-of-interrupts"


class One(Workflow):
    roles = (Role("speaker", reply=Choice("w1", "w2")),)

    async def run(self, ep):
        return Outcome(answer=(await ep.act("speaker", ep.task.question)).value)


class Pressed(Default):
    """Plays nothing, and presses Ctrl-C in the middle of its second step, `times` times."""

    times = 1

    def __init__(self):
        self.taken = 0

    async def step(self, run):
        self.taken += 1
        for count in range(self.times if self.taken == 2 else 0):
            press()
            while run.interrupts.count == count:  # until it is heard of, in whatever thread
                await asyncio.sleep(0.005)
        return {"usable": 1.0}


class PressedTwice(Pressed):
    """The same, twice; it goes on only when somebody ends it."""

    times = 2

    async def step(self, run):
        figures = await super().step(run)
        if self.taken == 2:
            await asyncio.sleep(600)
        return figures


def press():
    """Ctrl-C, as a terminal sends it to this process."""
    os.kill(os.getpid(), signal.SIGINT)


register_recipe("pressed-of-interrupts", Pressed)
register_recipe("pressed-twice-of-interrupts", PressedTwice)


@pytest.fixture(scope="module", autouse=True)
def environment():
    register()
    yield
    unregister(ID)


def register():
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": ["w1"]} for i in range(4)]
    unitymas.register(ID, workflow=One, reward=lambda trace, task: 1.0, tasks=rows, expert=lambda call: "w1")


def small(model, recipe="pressed-of-interrupts", **more):
    return {
        "steps": 4, "tasks_per_step": 2, "k": 2, "starved": False, "checkpoint_every": 1, "recipe": recipe,
        "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0},
        "groups": {"main": {"model": model, "slots": 4, "threads": 1}},
        "policies": {"team": {"algorithm": {"name": "grpo"}, "sampling": {"max_tokens": 2}}},
        **more,
    }  # fmt: skip


def ending(where):
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return rows[-1]["ending"]


@pytest.mark.parametrize("resume", [False, True])
def test_before_the_run_begins_nothing_is_left_behind(resume, tiny_llama, tmp_path, monkeypatch):
    """While models are loaded: a new run leaves no directory, one that goes on is as it was."""
    where = tmp_path / "run"
    if resume:
        train(ID, directory=where, **small(tiny_llama, "default", steps=1))
        before = {f: f.stat().st_mtime_ns for f in where.rglob("*")}

    async def start(self, specs):
        press()
        await asyncio.sleep(600)

    monkeypatch.setattr(HostedGroups, "start", start)
    how = {"resume": True, "steps": 3} if resume else small(tiny_llama)
    with pytest.raises(KeyboardInterrupt) as stop:
        train(None if resume else ID, directory=where, **how)
    if resume:
        assert str(stop.value) == f"{where} stands at step 1; go on with: unitymas train --resume {where}"
        assert before == {f: f.stat().st_mtime_ns for f in where.rglob("*")}
    else:
        assert (
            str(stop.value) == "nothing had begun and nothing is left behind; the same command begins the run"
        )
        assert not where.exists()


def test_in_the_first_validation_a_checkpoint_is_written_after_it(tiny_llama, tmp_path, monkeypatch):
    where, validate = tmp_path / "run", Run.validate

    async def pressed(self):
        press()
        return await validate(self)

    monkeypatch.setattr(Run, "validate", pressed)
    with pytest.raises(KeyboardInterrupt, match="stands at step 0; go on with: unitymas train --resume"):
        train(ID, directory=where, **small(tiny_llama))
    monkeypatch.undo()
    assert train(directory=where, resume=True, recipe_args={}, steps=1).step == 1


def test_killed_before_its_first_checkpoint_it_says_how_to_begin_again(tiny_llama, tmp_path, monkeypatch):
    async def pressed(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "validate", pressed)
    where = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=f"no checkpoint yet; .* --resume {where} --anew"):
        train(ID, directory=where, **small(tiny_llama))


def from_a_notebook(work):
    """Run `work` as a cell: beside a running loop, in a main thread that a Ctrl-C reaches as `KeyboardInterrupt`."""

    async def cell():
        kept = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            work()
        finally:
            signal.signal(signal.SIGINT, kept)

    asyncio.run(cell())


@pytest.mark.parametrize("times", [1, 2])
def test_in_a_notebook_the_same_is_kept_and_said(times, tiny_llama, tmp_path, capsys):
    where, recipe = tmp_path / "run", ("pressed-of-interrupts", "pressed-twice-of-interrupts")[times - 1]
    step = 3 - times  # the second stops within step 2
    with pytest.raises(
        KeyboardInterrupt, match=f"stands at step {step}; go on with: unitymas train --resume"
    ):
        from_a_notebook(lambda: train(ID, directory=where, **small(tiny_llama, recipe)))
    assert capsys.readouterr().err.count("Ctrl-C again stops at once") == 1
    assert ending(where) == ("interrupted after step 2", "interrupted")[times - 1]
    assert [f.name for f in checkpoint.finished(where / "checkpoints")][-1] == f"step-00000{step}"


def test_a_second_one_breaks_off_what_loads(tiny_llama, tmp_path, monkeypatch):
    async def start(self, specs):
        press()
        time.sleep(0.05)  # the first is not heeded while a model is read
        press()
        time.sleep(600)

    monkeypatch.setattr(HostedGroups, "start", start)
    with pytest.raises(KeyboardInterrupt, match="nothing had begun"):
        train(ID, directory=tmp_path / "run", **small(tiny_llama))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_a_notebook_the_start_is_stopped_too(tiny_llama, tmp_path, monkeypatch):
    where = tmp_path / "run"

    async def start(self, specs):
        press()
        await asyncio.sleep(600)

    monkeypatch.setattr(HostedGroups, "start", start)
    with pytest.raises(KeyboardInterrupt, match="nothing had begun"):
        from_a_notebook(lambda: train(ID, directory=where, **small(tiny_llama)))
    assert not where.exists()


RAY = """
import sys
sys.path[:0] = {path!r}
from tests_interrupts import *
register()
for recipe, where in zip(("pressed-of-interrupts", "pressed-twice-of-interrupts"), {where!r}):
    try:
        train(ID, directory=where, **small({model!r}, recipe, runtime="ray"))
    except KeyboardInterrupt as stop:
        print(stop)
"""


@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_with_ray_the_same(tiny_llama, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    (tmp_path / "tests_interrupts.py").write_text(Path(__file__).read_text())
    script = RAY.format(path=[str(tmp_path)], where=[str(once), str(twice)], model=tiny_llama)
    patient = {
        **os.environ,
        "RAY_raylet_start_wait_time_s": "600",
    }  # Ray's own 30 s are too few for a busy machine
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=patient, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 130, ended.stderr
    assert f"{once} stands at step 2; go on with: unitymas train --resume {once}" in ended.stdout
    assert (ending(once), ending(twice)) == ("interrupted after step 2", "stopped at once")
    assert [f.name for f in checkpoint.finished(twice / "checkpoints")] == ["step-000001"]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_run_that_fails_says_its_sentence_once(error, tiny_llama, tmp_path, monkeypatch, capsys):
    async def fails(self):
        raise error("the cellar is full of water")

    monkeypatch.setattr(Run, "validate", fails)
    where, model = tmp_path / "run", f"groups.*.model={tiny_llama}"
    assert main(["train", ID, "--dir", str(where), "steps=1", "log.console=plain", model]) == 1
    said = capsys.readouterr()
    assert (said.out + said.err).count("cellar") == 1 and "run failed" in said.out
    assert "cellar" in ending(where)
