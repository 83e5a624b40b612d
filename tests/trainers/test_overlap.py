"""Episodes played beside updates: what a step trains on, what is recorded of it, and its replay to the bit."""

import asyncio
import json
import random
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import unitymas
from unitymas import Outcome, Raw, Role, Workflow
from unitymas.agents.basics.manifest import Damaged
from unitymas.agents.engines.drawn_versions import ReplayFailed
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.benchmarks.speed.overlap.node import played, simulated
from unitymas.cli.training import train_main
from unitymas.envs.registry import unregister
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.overlap import log
from unitymas.trainers.controller.overlap.stream import Stream
from unitymas.trainers.controller.replayed_run import replay
from unitymas.trainers.controller.run import Run, supervised, train
from unitymas.trainers.controller.step import Default
from unitymas.trainers.group.model_group import ModelGroup

ID = "talk-of-overlap"
ROWS = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": ["w1"]} for i in range(12)]


class Talk(Workflow):
    """Two speak in turn, one to three times, and look something up in between."""

    roles = (Role("first", reply=Raw()), Role("second", reply=Raw()))
    tools = ("look",)

    async def run(self, ep):
        words = ep.task.question
        for _ in range(ep.rng.randint(1, 3)):
            one = await ep.act("first", f"w9 {words}")
            found = await ep.use("look", text=one.text[-20:])
            two = await ep.act("second", f"w8 {found} {one.text[-20:]}")
            words = two.text[-20:]
        return Outcome(answer=words)


def share(trace, task):
    """How often the second says an even word."""
    said = " ".join(n.text for n in trace.acts() if n.role == "second").split()
    return sum(word in ("w2", "w4", "w6", "w8") for word in said) / max(1, len(said))


clock = random.Random(0)


async def look(text):
    await asyncio.sleep(clock.random() * 0.02)
    return "w10" if "w1" in text else "w11"


class Own(Default):
    """A recipe that does not say that it overlaps."""


@pytest.fixture(scope="module", autouse=True)
def environment():
    unitymas.register(
        ID, workflow=Talk, reward=share, tasks=ROWS, tools={"look": look}, expert=lambda call: "w2"
    )
    yield
    unregister(ID)


@pytest.fixture
def restless(monkeypatch):
    """Steps of the engine take as long as they like, few come during an update, and weights come where replies are begun."""
    step, update, publish = TorchEngine.step, ModelGroup.update, ModelGroup.publish
    left = [10**9]

    def slow(self):
        time.sleep(clock.random() * 0.003)
        if left[0] > 0:
            left[0] -= 1
            step(self)

    async def held(self, *args):
        left[0] = 5
        return await update(self, *args)

    async def between(self, policy=None):
        left[0] = 10**9
        (engine,) = {hosted.engine for hosted in self.hosted.values() if hosted.engine}
        while engine.busy and not any(request.ids for request in engine.running):
            await asyncio.sleep(0)
        return await publish(self, policy)

    monkeypatch.setattr(TorchEngine, "step", slow)
    monkeypatch.setattr(ModelGroup, "update", held)
    monkeypatch.setattr(ModelGroup, "publish", between)
    clock.seed(time.time_ns())


def tree(model, **more):
    policy = {
        "algorithm": {"name": "grpo"},
        "learning": {"lr": 3e-3},
        "sampling": {"temperature": 2.0, "max_tokens": 12},
    }
    common = {
        "steps": 4, "tasks_per_step": 2, "k": 2, "minibatches": 1, "starved": False, "deterministic": True,
        "overlap": "wait", "staleness": 2, "checkpoint_every": 0, "eval": {"every": 0, "tasks": 1},
        "log": {"console": "off", "traces_every": 1, "timeline": False}, "policies": {"team": policy},
        "groups": {"main": {"model": model, "slots": 3, "threads": 1, "context": 96}},
    }  # fmt: skip
    return {**common, **more}


def lines(directory, kind):
    return [line for line in log.records(Path(directory) / log.NAME) if line["kind"] == kind]


def figures(directory):
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k.startswith(("policy/", "train/")) and "time/" not in k}
        for row in rows
        if row["kind"] == "step"
    ]


def weights(directory, policy="team"):
    from safetensors.torch import load_file

    return load_file(Path(directory) / "policies" / policy / "model.safetensors")


def same(a, b):
    assert figures(a) == figures(b)
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def partial(directory):
    """Replies that more than one version drew."""
    return [
        parts
        for line in lines(directory, "arrive")
        for episode in line["episodes"].values()
        for parts in episode["versions"].values()
        if len(parts) > 1
    ]


# one step after the other ------------------------------------------------------------------------------------------


def test_without_staleness_waiting_is_the_synchronous_run(tiny_llama, tmp_path):
    train(ID, directory=tmp_path / "off", **tree(tiny_llama, steps=2, overlap="off", staleness=0))
    train(ID, directory=tmp_path / "wait", **tree(tiny_llama, steps=2, staleness=0))
    same(tmp_path / "off", tmp_path / "wait")
    assert not (tmp_path / "off" / log.NAME).exists()


@pytest.mark.parametrize("overlap", ["wait", "drop"])
def test_a_replay_has_the_same_bits(overlap, tiny_llama, tmp_path, restless, monkeypatch):
    """Whoever arrived first in the original, and wherever new weights came into a reply."""
    play = Stream.play

    async def late(self, number, *more):
        harvest = await play(self, number, *more)
        while number == 0 and overlap == "drop" and self.run.step < 2:
            await asyncio.sleep(0.001)
        return harvest

    monkeypatch.setattr(Stream, "play", late)
    run = train(ID, directory=tmp_path / "run", **tree(tiny_llama, overlap=overlap, steps=5, staleness=1))
    assert partial(tmp_path / "run"), "no reply went on under new weights"
    arrived = [line["draw"] for line in lines(tmp_path / "run", "arrive")]
    begun = {line["draw"]: line["step"] for line in lines(tmp_path / "run", "admit")}
    batches = {line["step"]: line["draws"] for line in lines(tmp_path / "run", "batch")}
    assert any(begun[draw] < step for step, draws in batches.items() for draw in draws)
    if overlap == "wait":  # in order, and none older than it may be
        assert batches == {step: [2 * step, 2 * step + 1] for step in range(5)}
        assert all(step - begun[draw] <= 1 for step, draws in batches.items() for draw in draws)
    else:
        gone = [line["draw"] for line in lines(tmp_path / "run", "discard")]
        kept = [draw for draws in batches.values() for draw in draws]
        assert 0 in gone and not set(gone) & set(kept) and set(gone) | set(kept) <= set(arrived)
        assert sum(row["stale"] for row in run.history if row["kind"] == "step") == 2 * len(gone)
    for row in run.history:
        if row["kind"] == "step":
            assert 0 <= row["time/idle/trainer"] <= 1 and 0 <= row["time/idle/rollout"] <= 1
    monkeypatch.undo()
    again = replay(tmp_path / "run", tmp_path / "again")
    assert again.step == 5
    same(tmp_path / "run", tmp_path / "again")


def test_adapters_and_a_critic_are_replayed(tiny_llama, tmp_path, restless, monkeypatch):
    """Two roles, each with an adapter of its own on one engine: new weights of one leave the other's replies alone."""
    one = {
        "algorithm": {"name": "ppo"}, "learning": {"lr": 1e-2}, "adapter": {"rank": 2},
        "sampling": {"temperature": 2.0, "max_tokens": 12},
    }  # fmt: skip
    more = {"policies": {"a": one, "b": one}, "map": {"first": "a", "second": "b"}}
    train(ID, directory=tmp_path / "run", **tree(tiny_llama, **more))
    assert partial(tmp_path / "run")
    monkeypatch.undo()
    replay(tmp_path / "run", tmp_path / "again")
    assert figures(tmp_path / "run") == figures(tmp_path / "again")
    for policy in ("a", "b"):
        first, second = (weights(tmp_path / run, policy) for run in ("run", "again"))
        assert all(torch.equal(first[k], second[k]) for k in first)


def test_a_run_that_was_killed_goes_on_and_is_replayed_as_one(tiny_llama, tmp_path, restless):
    class Killed(BaseException):
        pass

    config = resolve(ID, **tree(tiny_llama, steps=5, checkpoint_every=2))
    run = Run(config, tmp_path / "run")
    stepped = run.stops.stepped

    def kill(metrics):
        stepped(metrics)
        if run.step == 3:
            raise Killed

    run.stops.stepped = kill
    with pytest.raises(Killed):
        asyncio.run(run.train())
    with open(tmp_path / "run" / log.NAME, "a") as file:
        file.write('{"kind":"arri')  # and the kill tore a line
    mark = checkpoint.latest(tmp_path / "run" / "checkpoints")
    waiting = json.loads((mark / "overlap.json").read_text())
    assert waiting["admitted"] == 10 and len(waiting["arrived"]) == 6  # all that there was room for
    run = train(directory=tmp_path / "run", resume=True)
    assert run.step == 5 and [line["step"] for line in lines(run.dir, "publish")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines(run.dir, "resume")] == [2]
    assert sorted(line["draw"] for line in lines(run.dir, "arrive")) == list(range(10))
    replay(tmp_path / "run", tmp_path / "again")
    same(tmp_path / "run", tmp_path / "again")


@pytest.mark.ray
def test_a_run_on_ray_is_replayed_here(tiny_llama, tmp_path, cluster):
    train(ID, directory=tmp_path / "run", **tree(tiny_llama, runtime="ray", staleness=1, steps=3))
    assert sorted(line["draw"] for line in lines(tmp_path / "run", "arrive")) == list(range(6))
    replay(tmp_path / "run", tmp_path / "again")
    same(tmp_path / "run", tmp_path / "again")


# logs that cannot be believed ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tiny_llama, tmp_path_factory, environment):
    where = tmp_path_factory.mktemp("recorded") / "run"
    train(ID, directory=where, **tree(tiny_llama, steps=2, staleness=1))
    return where


def forged(path, change):
    """The log with other lines, whose checksums are right."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    writer = log.Log(path)
    for row in change([{k: v for k, v in row.items() if k != "chain"} for row in rows]):
        writer.write(**row)


def other_versions(rows):
    for row in rows:
        if row["kind"] == "arrive":
            episode = next(iter(row["episodes"].values()))
            episode["checksum"] = "0" * 16
            return rows
    raise AssertionError


def other_loss(rows):
    last = [row for row in rows if row["kind"] == "publish"][-1]
    last["figures"]["policy/team/loss"] += 1e-12
    return rows


def other_task(rows):
    admitted = [row for row in rows if row["kind"] == "admit"]
    admitted[0]["task"], admitted[1]["task"] = admitted[1]["task"], admitted[0]["task"]
    return rows


def touched(path):
    path.write_text(path.read_text().replace('"attempt":0', '"attempt":1', 1))


def without_a_line(path):
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:3] + text[4:]))


def without_its_end(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def without_a_step(path):
    text = path.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(text) if '"publish"' in line)
    path.write_text("".join(text[:last]))


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (touched, Damaged, "it was changed"),
        (without_a_line, Damaged, "line 4: it was changed, or a line before it was added or left out"),
        (without_its_end, Damaged, "is cut: the run is done"),
        (without_a_step, Damaged, "is cut: it holds 1 steps, and metrics.jsonl has 2"),
        (lambda path: path.unlink(), Damaged, "is missing"),
        (lambda path: path.write_text(""), Damaged, "is cut"),
        (lambda path: forged(path, other_versions), ReplayFailed, "its words or rewards are others"),
        (lambda path: forged(path, other_loss), ReplayFailed, "step 2: policy/team/loss"),
        (lambda path: forged(path, other_task), ReplayFailed, "draw 0 was of task"),
        (lambda path: forged(path, lambda rows: [r for r in rows if r["kind"] != "batch"]), Damaged, "is cut"),
        (lambda path: forged(path, lambda rows: [{"kind": "arrive", **{}}] + rows), Damaged, "how the run began"),
        (lambda path: forged(path, lambda rows: [rows[0], {"kind": "admit"}]), Damaged, "line 2: it is not of this kind"),
    ],
    ids=range(12),
)  # fmt: skip
def test_logs_that_were_touched_are_refused(damage, error, words, recorded, tmp_path):
    import shutil

    where = Path(shutil.copytree(recorded, tmp_path / "run"))
    damage(where / log.NAME)
    with pytest.raises(error, match=words):
        replay(where, tmp_path / "again")


def test_the_command_replays(recorded, tmp_path, capsys):
    assert train_main(["--replay", str(recorded), "--dir", str(tmp_path / "again")]) == 0
    assert "2 steps" in capsys.readouterr().out
    same(recorded, tmp_path / "again")


# what does not fit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"overlap": "drops"}, "overlap: 'drops' is none of off, wait, drop"),
        ({"recipe": "malt"}, "recipe 'malt'"),
        ({"recipe": f"{__name__}:Own"}, "may change who plays or learns"),
        ({"policies": {"team": {"algorithm": "at_grpo"}}}, "trees"),
        ({"policies": {"team": {"algorithm": "dapo"}}}, "algorithm.resample=0"),
        ({"counterfactual": {"first": {}}}, "counterfactual"),
        ({"staleness": -1}, "staleness: must not be negative"),
    ],
)
def test_what_cannot_overlap_is_said_before_anything_starts(more, words, tiny_llama, tmp_path):
    with pytest.raises(ConfigError, match=words):
        Run(resolve(ID, **tree(tiny_llama, **more)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_replayed_is_said(tiny_llama, tmp_path, recorded):
    train(ID, directory=tmp_path / "off", **tree(tiny_llama, steps=1, overlap="off"))
    with pytest.raises(ConfigError, match="synchronous"):
        replay(tmp_path / "off")
    with pytest.raises(ConfigError, match="already holds a run"):
        replay(recorded, recorded)


def test_an_error_in_flight_ends_the_run(tiny_llama, tmp_path, monkeypatch):
    async def broken(*_, **__):
        raise LookupError("the collector is broken")

    run = Run(resolve(ID, **tree(tiny_llama, steps=2)), tmp_path / "run")
    monkeypatch.setattr("unitymas.trainers.controller.collect.Collector._episode", broken)
    monkeypatch.setattr(Run, "validate", lambda self: asyncio.sleep(0, {}))
    with pytest.raises(LookupError, match="collector is broken"):
        supervised(run)


# a node that is simulated -------------------------------------------------------------------------------------------


def test_the_simulated_node():
    """The real admission on a clock that jumps: no older than it may be, and faster than the same GPUs in turn."""
    args = Namespace(steps=5, tasks=4, k=4, staleness=1, seed=0)
    sync, wait, drop = (simulated(played(args, mode, 2, 2)) for mode in ("off", "wait", "drop"))
    assert simulated(played(args, "wait", 2, 2)) == wait
    assert (sync.age, sync.stale, wait.stale) == (0.0, 0, 0) and 0 < wait.age <= 1 and 0 <= drop.age <= 1
    assert wait.tokens == sync.tokens and wait.seconds < sync.seconds
    assert wait.waited < sync.waited and drop.waited <= wait.waited
