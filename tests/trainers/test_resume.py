"""What a resumed run goes on with: everything that has state, the changes that can take effect, and no step twice."""

import asyncio
import dataclasses
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from unitymas.agents.basics.manifest import Damaged
from unitymas.cli.training import train_main
from unitymas.envs.core.arena import Arena
from unitymas.envs.core.trace import Trace
from unitymas.envs.registry import unregister
from unitymas.rewards.monitors import Watch
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.reporting.loggers import Logbook
from unitymas.trainers.controller.resume import NothingToResume, read_config, resumed
from unitymas.trainers.controller.run import Run, train
from unitymas.trainers.controller.step import Default
from unitymas.trainers.recipes import register_recipe

from .pairs import register_pair

ID, OTHER = "pair-of-resume", "pair-beside-it"


class Idle(Default):
    """A step that plays nothing, and counts: for tests of what is written, and when."""

    def __init__(self):
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]

    async def step(self, run):
        self.taken += 1
        return {"usable": 1.0, "taken": float(self.taken)}


class Pressed(Idle):
    """Presses Ctrl-C in the middle of its second step, once or twice."""

    times = 1

    async def step(self, run):
        figures = await super().step(run)
        if self.taken == 2:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
        return figures


register_recipe("idle-of-resume", Idle)
register_recipe("pressed-of-resume", Pressed)


@pytest.fixture(scope="module", autouse=True)
def environment():
    for id in (ID, OTHER):
        register_pair(id)
    yield
    for id in (ID, OTHER):
        unregister(id)


def tree(model, **more):
    """A config of small steps that says little."""
    policy = {
        "algorithm": {"name": "grpo"},
        "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 2},
    }
    common = {
        "steps": 4, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "deterministic": True,
        "checkpoint_every": 1, "checkpoints": 9, "eval": {"every": 1, "tasks": 1},
        "log": {"console": "off", "traces_every": 0}, "policies": {"team": policy},
        "groups": {"main": {"model": model, "slots": 4, "threads": 1}},
    }  # fmt: skip
    return {**common, **more}


def idle(model, **more):
    return tree(model, recipe="idle-of-resume", eval={"every": 0, "tasks": 1}, **more)


def steps_of(directory):
    """How often each event stands in the book: (kind, step)."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return Counter((row["kind"], row["step"]) for row in rows if row["kind"] in ("step", "validation"))


# everything that has state -----------------------------------------------------------------------------------------

PASSING = {
    "arena", "validation", "collector", "evaluator", "specs", "config", "dir", "changes", "book", "watchdog", "interrupts",
    "_resume", "on_trace", "hosts", "progress", "timeline", "_saving", "_rested",
}  # fmt: skip
"""What a run makes anew from its config, forgets with each step, or reads from the clock of its own process (`_saving`
and `_rested`: how long the last save took, and when it ended). Groups are looked at by themselves."""
HOSTED = {"speaker", "spec", "name", "parameters", "learner"}


def walk(found, path, thing, skip=frozenset()):
    """Every number, text and tensor that can be reached from an object of the project, by its path."""
    if isinstance(thing, torch.Tensor):
        found[path] = thing.detach().clone()
    elif isinstance(thing, np.ndarray):
        found[path] = torch.from_numpy(thing)
    elif thing is None or isinstance(thing, bool | int | float | str):
        found[path] = thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            walk(found, f"{path}[{key!r}]", value)
    elif isinstance(thing, list | tuple):
        found[f"{path}.length"] = len(thing)
        for number, value in enumerate(thing):
            walk(found, f"{path}[{number}]", value)
    elif isinstance(thing, set | frozenset):
        found[path] = sorted(map(str, thing))
    elif isinstance(thing, Trace):
        walk(
            found, path, thing.to_dict()
        )  # what is kept of an episode; live nodes know their formats besides
    elif isinstance(thing, Arena):
        found[path] = thing.env_id  # made anew from the config; it keeps tasks that it has read
    elif type(thing).__module__.startswith(("unitymas", __name__)):
        names = list(getattr(thing, "__dict__", {})) + [
            n for c in type(thing).__mro__ for n in getattr(c, "__slots__", ())
        ]
        for name in names:
            if name not in skip and hasattr(thing, name):
                walk(found, f"{path}.{name}", getattr(thing, name))


def state_of(run):
    found = {}
    walk(found, "run", run, PASSING)
    walk(found, "versions", run.hosts.versions)
    for name, group in run.groups.items():
        walk(found, f"{name}.store", group.store)
        for policy, hosted in group.hosted.items():
            walk(found, f"{name}.{policy}", hosted, HOSTED)
            walk(found, f"{name}.{policy}.parameters", hosted.parameters.state_dict())
            if hosted.learner is not None:
                walk(found, f"{name}.{policy}.learner", hosted.learner.state_dict())
                walk(found, f"{name}.{policy}.settings", dataclasses.asdict(hosted.learner.settings))
    found["chance"] = torch.get_rng_state()
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"policies": {"team": {"algorithm": {"name": "reinforce_pp"}, "sampling": {"max_tokens": 2}}}},
        {"recipe": "several", "recipe_args": {"beside": [{"id": OTHER}]}},
        {"recipe": "malt", "recipe_args": {"width": 2, "every": 9}},
        {
            "recipe": "cory",
            "recipe_args": {"pioneer": "first", "observer": "second", "every": 1},
            "separate": True,
        },
    ],
    ids=["default", "reinforce_pp", "several", "malt", "cory"],
)
def test_all_that_has_state_is_in_the_checkpoint(more, tiny_llama, tmp_path):
    """Walks a run after two steps and the same run resumed: whatever differs was lost."""
    more = dict(more)
    if more.pop("separate", False):
        one = tree(tiny_llama)["policies"]["team"]
        more |= {"policies": {"a": one, "b": one}, "map": {"first": "a", "second": "b"}}
    config = resolve(ID, **tree(tiny_llama, steps=9, **more))

    async def lived(run):
        await run._start()
        run.book = Logbook(run.dir, run.config, run.arena)
        await run._begin()
        for _ in range(2 - run.step):
            await run._advance()
        return run

    before = state_of(asyncio.run(lived(Run(config, tmp_path / "run"))))
    torch.manual_seed(0)
    after = state_of(asyncio.run(lived(Run(resumed(tmp_path / "run")[0], tmp_path / "run", resume=True))))
    assert before.keys() == after.keys()
    assert not [key for key in after if not same(before[key], after[key])]
    assert sum("watch.history" in key for key in after) > 20 and any("optimiser" in key for key in after)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b or (a != a and b != b)


def test_an_alarm_rings_as_in_the_undisturbed_run(tiny_llama, tmp_path):
    """Watch is fed the same figures in one go, and with its state carried over between any two of them."""
    rows = [
        {"step": i, "acts": 2.0 if i < 7 else 9.0, "train": 0.1 * i, "held_out": 0.5 - 0.1 * (i > 8)}
        for i in range(14)
    ]
    whole = Watch()
    expected = [alarm for row in rows for alarm in whole.see(row)]
    assert {a.monitor for a in expected} == {"length drift", "held-out drop"}
    for cut in range(len(rows)):
        first, rest = Watch(), Watch()
        found = [alarm for row in rows[:cut] for alarm in first.see(row)]
        rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert found + [alarm for row in rows[cut:] for alarm in rest.see(row)] == expected
        assert rest.state_dict() == whole.state_dict()


# what changes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny_llama, tmp_path_factory, environment):
    where = tmp_path_factory.mktemp("finished") / "run"
    train(ID, directory=where, **tree(tiny_llama, steps=2))
    return where


def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_changed_settings_take_effect_and_are_said(finished, tmp_path, capsys):
    where = copied(finished, tmp_path)
    overrides = [
        "steps=3",
        "policies.*.learning.weight_decay=0.5",
        "policies.team.learning.betas=[0.5, 0.6]",
        "k=3",
    ]
    run = train(directory=where, resume=True, overrides=overrides)
    said = capsys.readouterr().err
    for change in (
        "steps 2 → 3",
        "policies.team.learning.weight_decay 0.0 → 0.5",
        "betas [0.9, 0.95] → [0.5, 0.6]",
        "k 2 → 3",
    ):
        assert change in said
    assert "checkpoints/step-000002" in said
    (group,) = run.groups["main"].hosted["team"].learner.optimiser.param_groups
    assert group["weight_decay"] == 0.5 and tuple(group["betas"]) == (0.5, 0.6)
    assert [row for row in run.history if row["kind"] == "step"][-1]["episodes"] == 6  # k=3
    written = read_config(where)
    assert written.steps == 3 and written.policies["team"].learning.weight_decay == 0.5
    assert not resumed(where)[1]  # nothing has changed since


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"overrides": ["seed=7"]}, "seed: a run that goes on cannot change it .0 → 7"),
        ({"overrides": ["groups.*.model=tiny"]}, r"groups\.main\.model"),
        ({"overrides": ["policies.team.algorithm.name=ppo"]}, r"policies\.team\.algorithm\.name"),
        ({"overrides": ["policies.new.group=main"]}, r"policies\.new\.group|no role is mapped"),
        ({"overrides": ["recipe=malt"]}, "recipe: a run that goes on"),
        ({"overrides": ["policies.team.learning.moments=8bit"]}, r"learning\.moments: a run that goes on"),
        ({"overrides": ["k=1"]}, "needs k >= 2"),
        ({"overrides": ["stepz=3"]}, "did you mean 'steps'"),
        ({"overrides": ["minibatches=0"]}, "minibatches: must be at least 1"),
        ({"preset": "separate"}, "preset 'separate': a run that goes on"),
        ({"id": OTHER}, r"env\.id: a run that goes on"),
        ({"k": 1}, "needs k >= 2"),
    ],
)
def test_what_cannot_change_is_refused_before_anything_is_loaded(how, says, finished):
    with pytest.raises(ConfigError, match=says):
        train(directory=finished, resume=True, **how)


@pytest.fixture(scope="module")
def judged(tiny_llama, tmp_path_factory, environment):
    """A run that was interrupted after two of five steps; its policy has a critic."""
    where = tmp_path_factory.mktemp("judged") / "run"
    policy = {**tree(tiny_llama)["policies"]["team"], "algorithm": {"name": "ppo"}, "critic": "auto"}
    pressed = {"recipe": "pressed-of-resume", "eval": {"every": 0, "tasks": 1}}
    with pytest.raises(KeyboardInterrupt):
        train(ID, directory=where, **tree(tiny_llama, steps=5, policies={"team": policy}, **pressed))
    return where


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "policies.team.frozen=true",
            "groups.main: its checkpoint holds team, team-critic, and with policies.team.frozen False → True it would hold "
            "team: a run that goes on keeps its policies and their critics",
        ),
        (
            "overlap=wait",
            "overlap=wait: this run was synchronous so far, and cannot begin to play ahead; leave",
        ),
        ("steps=1", "has done 2 steps, and steps=1 is fewer; give more than 2, or leave it out"),
    ],
)
def test_what_the_checkpoint_does_not_allow_is_refused_before_a_model_is_loaded(
    override, says, judged, monkeypatch
):
    monkeypatch.setattr(Run, "_start", None)  # where models are loaded
    with pytest.raises(ConfigError, match=re.escape(says)):
        train(directory=judged, resume=True, overrides=[override])


def test_other_tasks_are_refused(finished, tmp_path):
    where = copied(finished, tmp_path)
    rows = [{"id": f"x{i}", "question": "w30", "answers": ["w1"]} for i in range(8)]
    unregister(ID)
    try:
        register_pair(ID, rows)
        with pytest.raises(ConfigError, match=r"env\.data: the run's tasks were others"):
            train(directory=where, resume=True, overrides=["steps=3"])
    finally:
        unregister(ID)
        register_pair(ID)


def test_a_falling_rate_follows_the_new_length(tiny_llama, tmp_path):
    policy = {"algorithm": {"name": "grpo"}, "learning": {"schedule": "linear"}}
    train(ID, directory=tmp_path / "run", **idle(tiny_llama, steps=2, policies={"team": policy}))
    config, changes = resumed(tmp_path / "run", overrides=["steps=6"])
    assert config.policies["team"].learning.horizon == 6
    assert "policies.team.learning.horizon 2 → 6" in changes


# interrupted -------------------------------------------------------------------------------------------------------


def test_the_first_interrupt_finishes_the_step_and_writes_a_checkpoint(tiny_llama, tmp_path, capsys):
    where = tmp_path / "run"
    more = idle(tiny_llama, steps=5, checkpoint_every=0) | {"recipe": "pressed-of-resume"}
    with pytest.raises(
        KeyboardInterrupt, match=f"stands at step 2; go on with: unitymas train --resume {where}"
    ):
        train(ID, directory=where, **more)
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert [f.name for f in checkpoint.finished(where / "checkpoints")] == ["step-000002"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run = train(directory=where, resume=True)
    assert run.step == 5 and run.recipe.taken == 5
    assert set(steps_of(where).values()) == {1} and len(steps_of(where)) == 5 + 2


TWICE = """
import sys
sys.path[:0] = {path!r}
from resumed_tests.test_resume import *
Pressed.times = 2
register_pair(ID)
train(ID, directory={where!r}, **(idle({model!r}, steps=5) | {{"recipe": "pressed-of-resume"}}))
"""


def test_the_second_interrupt_stops_at_once(tiny_llama, tmp_path):
    where = tmp_path / "run"
    copies = tmp_path / "resumed_tests"
    copies.mkdir()
    for name in ("test_resume.py", "pairs.py"):
        (copies / name).write_text(Path(__file__).with_name(name).read_text())
    script = TWICE.format(path=[str(tmp_path)], where=str(where), model=tiny_llama)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.endswith(f"run stands at step 1; go on with: unitymas train --resume {where}\n"), (
        ended.stderr
    )
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["ending"] == "stopped at once"
    assert [f.name for f in checkpoint.finished(where / "checkpoints")] == ["step-000001"]


def test_a_resume_without_a_checkpoint_says_so_and_asks(tiny_llama, tmp_path, capsys, monkeypatch):
    where = tmp_path / "run"
    train(ID, directory=where, **idle(tiny_llama, steps=2, checkpoint_every=0))
    shutil.rmtree(where / "checkpoints")  # as if it had been killed before its first
    with pytest.raises(NothingToResume, match="holds no checkpoint: .* --anew"):
        train(directory=where, resume=True)
    with pytest.raises(NothingToResume):  # pytest's stdin is no terminal: nobody can be asked
        train_main(["--resume", str(where)])
    monkeypatch.setattr(sys, "stdin", terminal := io.StringIO("n\n"))
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        train_main(["--resume", str(where)])
    assert "Begin it anew" in capsys.readouterr().out
    assert train_main(["--resume", str(where), "--anew", "steps=3"]) == 0
    assert set(steps_of(where).values()) == {1} and len(steps_of(where)) == 3 + 2


# killed ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def test_killed_before_its_book_begins_it_can_begin(tiny_llama, tmp_path, monkeypatch):
    """A directory with a book has a config as well, so it can be begun again in one way at least at any moment."""
    where, more = tmp_path / "run", idle(tiny_llama, steps=1)

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Logbook, "_line", killed)
        patch.setattr(Logbook, "finish", lambda *_: None)
        train(ID, directory=where, **more)
    assert read_config(where).steps == 1 and not (where / "metrics.jsonl").exists()
    assert train(ID, directory=where, **more).step == 1


def test_on_a_full_disk_it_never_began_and_can_begin_later(tiny_llama, tmp_path):
    where, more = tmp_path / "run", idle(tiny_llama, steps=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # a write ends half way, as on a full disk
    try:
        with pytest.raises(OSError) as error:
            train(ID, directory=where, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(where / "config.yaml") and not list(where.glob("*"))
    assert train(ID, directory=where, **more).step == 1


def test_the_best_checkpoints_stay_beside_the_newest(tiny_llama, tmp_path, monkeypatch):
    """They stay; the run goes on from its newest all the same."""
    scores = iter([0.0, 0.1, 0.5, 0.2, 0.9, 0.3, 0.4])

    async def validate(run):
        return {run.arena.headline: next(scores)}

    monkeypatch.setattr(Run, "validate", validate)
    more = {
        **idle(tiny_llama, steps=5, checkpoints_best=2),
        "checkpoints": 1,
        "eval": {"every": 1, "tasks": 1},
    }
    train(ID, directory=tmp_path / "run", **more)
    standing = [folder.name for folder in checkpoint.finished(tmp_path / "run" / "checkpoints")]
    assert standing == ["step-000002", "step-000004", "step-000005"]
    run = train(directory=tmp_path / "run", resume=True, overrides=["steps=6"])
    assert [row["step"] for row in run.history if row["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    standing = [folder.name for folder in checkpoint.finished(tmp_path / "run" / "checkpoints")]
    assert standing == ["step-000002", "step-000004", "step-000006"]


def test_deaths_stay_counted_when_steps_come_again(tiny_llama, tmp_path):
    """One before the checkpoint, one after it that a resume cuts off, one of the process that resumes, told twice."""
    run = Run(resolve(ID, **idle(tiny_llama)), tmp_path / "run")
    first, second, third = ({"cause": "gone", "lost_at": float(i)} for i in range(3))
    book = Logbook(run.dir, run.config, run.arena)
    book.begin()
    book.lost(1, [first])
    mark = book.mark()
    book.lost(2, [second])
    for _ in range(2):
        again = Logbook(run.dir, run.config, run.arena)
        again.begin(1, mark)
        again.lost(1, [third])
    assert [row["lost_at"] for row in run.history if row["kind"] == "loss"] == [0.0, 1.0, 2.0]
    again.begin()  # anew
    assert [row["lost_at"] for row in run.history if row["kind"] == "loss"] == [0.0, 1.0, 2.0]


class Clock:
    """Lets so many writes happen; from then on every one fails, so that nothing can be tidied up, as after a kill."""

    def __init__(self, monkeypatch, moment):
        self.left, self.count = moment, 0
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (os, "truncate"),
            (os, "unlink"),
            (Path, "rename"),
            (Path, "mkdir"),
        ):
            self.patch(monkeypatch, owner, name)
        real = open

        def opened(file, mode="r", *arguments, **options):
            if set(mode) & set("wa+"):
                self.tick()
            return real(file, mode, *arguments, **options)

        monkeypatch.setattr("builtins.open", opened)
        self.patch(monkeypatch, shutil, "rmtree")

    def patch(self, monkeypatch, owner, name):
        real = getattr(owner, name)

        def call(*arguments, **options):
            self.tick()
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    def tick(self):
        self.count += 1
        self.left -= 1
        if self.left < 0:
            raise Killed


def test_killed_at_any_write_no_step_is_doubled_or_missing(tiny_llama, tmp_path, monkeypatch):
    """Steps, validations and the recipe's state are those of the undisturbed run, wherever it was killed."""
    more = idle(tiny_llama, steps=3, checkpoints=1)
    with monkeypatch.context() as patch:
        clock = Clock(patch, 10**9)
        train(ID, directory=tmp_path / "whole", **more)
    whole, total = steps_of(tmp_path / "whole"), clock.count
    assert total > 60 and set(whole.values()) == {1}
    every = int(os.environ.get("UNITYMAS_EVERY_WRITE", "13"))  # 1: the long way
    for moment in range(0, total, every):
        where = tmp_path / f"at-{moment}"
        with monkeypatch.context() as patch, pytest.raises((Killed, checkpoint.CheckpointError)):
            Clock(patch, moment)
            train(ID, directory=where, **more)
        begun = (where / "config.yaml").exists()
        if not begun:  # nothing to resume, and a new run may take the place
            train(ID, directory=where / "new", **more)
            continue
        saved = bool(checkpoint.finished(where / "checkpoints"))
        run = train(directory=where, resume=True, anew=not saved)
        assert run.recipe.taken == 3
        assert steps_of(where) == whole, f"killed at write {moment}"
        assert [f.name for f in checkpoint.finished(where / "checkpoints")] == ["step-000003"]


def test_a_cut_or_changed_config_is_refused(finished, tmp_path):
    text = (finished / "config.yaml").read_text()
    for number, cut in enumerate(range(0, len(text) - 1, 97)):
        where = copied(finished, tmp_path / str(number))
        (where / "config.yaml").write_text(text[:cut])
        with pytest.raises(Damaged, match="config.yaml"):
            train(directory=where, resume=True, overrides=["steps=3"])
        (where / "config.yaml").write_text(text[cut + 1 :])
        with pytest.raises(Damaged, match="config.yaml"):
            train(directory=where, resume=True, overrides=["steps=3"])
    lines = text.splitlines(keepends=True)
    (where / "config.yaml").write_text(
        "".join(lines[1:-1]).replace("steps: 2", "steps: 3")
    )  # vouched for by hand
    assert read_config(where).steps == 3
