"""A group that dies in mid-step: the run goes on by itself, and ends with the weights of an undisturbed one."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.agents.basics.failures import GroupLost
from unitymas.trainers.config.schema import RayConfig
from unitymas.trainers.controller import run as run_module
from unitymas.trainers.controller.run import train
from unitymas.trainers.group import cluster, runtime

ID = "pair-of-lost"
PATH = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent.parent)])
WORDS = ("w1", "w2", "w3", "w4")


class Pair(Workflow):
    """Two say a word each; the second one's is the answer."""

    roles = (Role("first", reply=Choice(*WORDS)), Role("second", reply=Choice(*WORDS)))

    async def run(self, ep: Any) -> Outcome:
        one = await ep.act("first", f"w9 {ep.task.question}")
        two = await ep.act("second", f"w8 {ep.task.question} {one.text}")
        return Outcome(answer=two.value)


def right(trace: Any, task: Any) -> float:
    """Reward the answer."""
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


def register() -> None:
    """Register the environment of these tests."""
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(8)]
    unitymas.register(ID, workflow=Pair, reward=right, tasks=rows)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    register()
    yield
    unitymas.envs.registry.unregister(ID)


def settings(model: str, **more: Any) -> dict[str, Any]:
    """Small steps that agree bit for bit."""
    policy = {
        "algorithm": {"name": "grpo"}, "learning": {"lr": 1e-2}, "sampling": {"temperature": 5.0, "max_tokens": 2},
    }  # fmt: skip
    common = {
        "steps": 4, "tasks_per_step": 2, "k": 4, "minibatches": 1, "starved": False, "deterministic": True,
        "checkpoint_every": 1, "eval": {"every": 0, "tasks": 1}, "log": {"console": "off", "traces_every": 0},
        "policies": {"team": policy}, "groups": {"main": {"model": model, "slots": 4, "threads": 1}},
    }  # fmt: skip
    return {**common, **more}


class Fragile:
    """A group that is gone from its n-th call on."""

    def __init__(self, group: Any, calls: int) -> None:
        self.group, self.left = group, calls

    def abandon(self) -> None:
        self.group.abandon()

    async def close(self) -> None:
        await self.group.close()

    def __getattr__(self, method: str) -> Any:
        async def ask(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise GroupLost("group 'main' is gone: the actor died")
            answer = await getattr(self.group, method)(*arguments)
            if self.left == 0:  # it did the work, and died before it could say so
                self.left = -1
                raise GroupLost("group 'main' is gone: the actor died")
            return answer

        return ask


def dying(monkeypatch: pytest.MonkeyPatch, lives: list[int]) -> list[int]:
    """The groups of the next runs die after so many calls. -> the lives that began"""
    start = runtime.start_groups
    begun: list[int] = []

    async def started(*arguments: Any) -> dict[str, Any]:
        groups = await start(*arguments)
        calls = lives.pop(0) if lives else 10**9
        begun.append(calls)
        return {name: Fragile(group, calls) for name, group in groups.items()}

    monkeypatch.setattr(runtime, "start_groups", started)
    monkeypatch.setattr(run_module.time, "sleep", lambda seconds: None)
    return begun


def weights(folder: Path) -> bytes:
    return (folder / "policies" / "team" / "model.safetensors").read_bytes()


def test_a_group_that_dies_at_any_moment_changes_nothing(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = settings(tiny_llama)
    train(ID, directory=tmp_path / "whole", **more)
    chance = random.Random(0)
    with monkeypatch.context() as patch:
        for number in range(6):
            lives = [chance.randrange(3, 110) for _ in range(chance.randrange(1, 4))]
            where = tmp_path / str(number)
            begun = dying(patch, list(lives))
            train(ID, directory=where, **more)
            patch.undo()
            assert weights(where) == weights(tmp_path / "whole"), f"groups that lived for {lives} calls"
            rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4]
            losses = [row for row in rows if row["kind"] == "loss"]
            assert len(losses) == len(begun) - 1
            assert all(row["cause"] == "group 'main' is gone: the actor died" for row in losses)


def test_a_group_that_never_stands_ends_the_run(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = [0] * 9
    dying(monkeypatch, lives)
    with pytest.raises(GroupLost, match="is gone"):
        train(ID, directory=tmp_path / "run", **settings(tiny_llama, restarts=2))
    assert len(lives) == 6  # the first, and two more
    assert "attempt 2 of 2" in capsys.readouterr().err


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"no cluster answers at 127.0.0.1:{port} .*ray.address"):
        cluster.connect(RayConfig(address=f"127.0.0.1:{port}"))


def test_a_ray_that_was_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves its address in a file, which is believed only where somebody listens there."""
    import socket

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not cluster.runs_here()
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as here:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{here.getsockname()[1]}\n")
        assert cluster.runs_here()
    assert not cluster.runs_here()


CHILD = """
import asyncio, sys
import ray
from ray.cluster_utils import Cluster
from unitymas.trainers.config.group_settings import GroupSpec, PolicySpec
from unitymas.trainers.config.schema import ConfigError, RayConfig
from unitymas.trainers.group.runtime import start_groups, stop_groups

def spec(name, **more):
    return GroupSpec(name=name, model=sys.argv[1], policies={"p": PolicySpec()}, slots=2, threads=1, **more)
"""


def ray_driver(code: str, *arguments: str) -> str:
    """Run code against a Ray of its own, in a process of its own. Return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": PATH,
    }
    limit = 400 * int(os.environ.get("UNITYMAS_KILLS", "1"))
    command = [sys.executable, "-c", CHILD + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


NODES = """
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8})
second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
settings = RayConfig(address=cluster.address, strategy="strict_spread", wait=60)

async def run():
    groups = await start_groups({"a": spec("a"), "b": spec("b", cpus=1)}, "ray", settings)
    print("versions", [(await g.report())["versions"]["p"] for g in groups.values()])
    table = list(ray.util.placement_group_table().values())
    print("nodes", len(set(table[0]["bundles_to_node_id"].values())))
    for refused in ({"a": spec("a", cpus=3)}, {"a": spec("a", gpus=1)}, {"a": spec("a", cpus=0.7), "b": spec("b", cpus=0.7), "c": spec("c")}):
        try:
            await start_groups(refused, "ray", RayConfig(strategy="strict_spread", wait=2))
        except ConfigError as error:
            print("refused:", error)
    cluster.remove_node(second)  # in the middle of a call
    lost = 0
    for name, group in groups.items():
        try:
            await asyncio.wait_for(group.report(), 120)
        except Exception as error:
            lost += 1
            print(type(error).__name__, str(error)[:40])
    print("lost", lost)
    await stop_groups(groups)
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    groups = await start_groups({"a": spec("a"), "b": spec("b", cpus=1)}, "ray", settings)
    print("again", len(groups))
    await stop_groups(groups)

asyncio.run(run())
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_two_nodes_one_leaves_and_one_comes(tiny_llama: str) -> None:
    said = ray_driver(NODES, tiny_llama)
    assert "versions [0, 0]" in said and "nodes 2" in said
    assert "the groups ask for 3 CPUs (groups.*.cpus), and Ray has 2" in said
    assert "the groups ask for 1 GPUs (groups.*.gpus), and Ray has 0" in said
    assert "3 groups cannot be placed by 'strict_spread' (waited 2 s" in said
    assert "GroupLost group '" in said and "lost 1" in said
    assert "again 2" in said


KILLS = """
import os, pathlib, random, signal, threading, time
os.environ["UNITYMAS_MARK"] = mark = f"mark-{os.getpid()}"  # Ray's workers inherit it
import json
import unitymas.trainers.controller.run as controller
import importlib.util
found = importlib.util.spec_from_file_location('here', sys.argv[4])
here = importlib.util.module_from_spec(found)
found.loader.exec_module(here)

here.register()
kills, place = int(sys.argv[2]), pathlib.Path(sys.argv[3])
whole = place / "whole"
controller.train(here.ID, directory=whole, **here.settings(sys.argv[1], steps=6))
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
done, chance = [], random.Random(1)

def actors():
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if b"ray::GroupActor" in (entry / "cmdline").read_bytes() and mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name)
        except (OSError, ValueError):
            pass

def kill():
    while len(done) < kills:
        time.sleep(chance.uniform(0.05, 1.0))
        for pid in actors():
            rows = (where / "metrics.jsonl").read_text() if (where / "metrics.jsonl").exists() else ""
            if '"kind": "begin"' in rows:  # in the middle of the run
                os.kill(pid, signal.SIGKILL)
                done.append(pid)
                time.sleep(chance.uniform(0.5, 4.0))
                break

where = place / "killed"
threading.Thread(target=kill, daemon=True).start()
controller.time.sleep = lambda seconds: None
controller.train(here.ID, directory=where, runtime="ray", **here.settings(sys.argv[1], steps=6, restarts=99))
losses = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
print("killed", len(done), "losses", len(losses), "equal", here.weights(where) == here.weights(whole))
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_an_actor_that_is_killed_changes_no_weight(tiny_llama: str, tmp_path: Path) -> None:
    """SIGKILL, once here. UNITYMAS_KILLS=100 kills as often as that, at random moments."""
    kills = os.environ.get("UNITYMAS_KILLS", "1")
    said = ray_driver(KILLS, tiny_llama, kills, str(tmp_path), __file__)
    assert f"killed {kills} losses" in said and "losses 0" not in said and "equal True" in said, said
