"""A group that dies in mid-step: the run goes on by itself, and ends with the weights of an undisturbed one."""

import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unitymas
from unitymas.agents.basics.failures import GroupLost
from unitymas.benchmarks.faults.forked_runs import family
from unitymas.benchmarks.faults.work import ID, register_pair
from unitymas.trainers.config.group_settings import GroupSpec, PolicySpec
from unitymas.trainers.config.schema import ConfigError, RayConfig
from unitymas.trainers.controller import run as run_module
from unitymas.trainers.controller.run import train
from unitymas.trainers.group import actor, runtime
from unitymas.trainers.group import cluster as cluster_module
from unitymas.trainers.group.runtime import start_groups, stop_groups


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    register_pair()
    yield
    unitymas.envs.registry.unregister(ID)


def settings(model: str, **more: Any) -> dict[str, Any]:
    """Small steps that agree bit for bit."""
    policy = {
        "algorithm": {"name": "grpo"}, "learning": {"lr": 1e-2}, "sampling": {"temperature": 5.0, "max_tokens": 2},
    }  # fmt: skip
    common = {
        "steps": 3, "tasks_per_step": 2, "k": 4, "minibatches": 1, "starved": False, "deterministic": True,
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


@pytest.fixture(scope="module")
def whole(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Weights of the undisturbed run."""
    where = tmp_path_factory.mktemp("whole") / "run"
    train(ID, directory=where, **settings(tiny_llama))
    return weights(where)


def test_a_group_that_dies_at_any_moment_changes_nothing(
    tiny_llama: str, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, chance = settings(tiny_llama), random.Random(0)
    with monkeypatch.context() as patch:
        for number, deaths in enumerate((1, 2, 3)):
            lives = [chance.randrange(3, 80) for _ in range(deaths)]
            where = tmp_path / str(number)
            begun = dying(patch, list(lives))
            train(ID, directory=where, **more)
            patch.undo()
            assert weights(where) == whole, f"groups that lived for {lives} calls"
            rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3]
            losses = [row for row in rows if row["kind"] == "loss"]
            assert len(losses) == len(begun) - 1
            assert all(row["cause"] == "group 'main' is gone: the actor died" for row in losses)


def test_a_group_that_dies_while_it_starts_is_started_again(
    tiny_llama: str, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, and again when the run goes on after a death."""
    start, starts = runtime.start_groups, itertools.count(1)

    async def started(*arguments: Any) -> dict[str, Any]:
        number = next(starts)
        if number in (1, 3):
            raise GroupLost("group 'main' is gone while it starts")
        groups = await start(*arguments)
        return {name: Fragile(group, 30 if number == 2 else 10**9) for name, group in groups.items()}

    monkeypatch.setattr(runtime, "start_groups", started)
    monkeypatch.setattr(run_module.time, "sleep", lambda seconds: None)
    train(ID, directory=tmp_path / "run", **settings(tiny_llama))
    assert next(starts) == 5 and weights(tmp_path / "run") == whole


def test_a_group_that_never_stands_ends_the_run(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = [0] * 9
    dying(monkeypatch, lives)
    with pytest.raises(GroupLost, match="is gone"):
        train(ID, directory=tmp_path / "run", **settings(tiny_llama, restarts=2))
    assert len(lives) == 6  # the first, and two more
    assert "attempt 2 of 2" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_an_address_without_a_ray_is_told_at_once(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens, something else does, or somebody listens and never answers."""
    monkeypatch.setattr(cluster_module, "ANSWER", 0.3)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests' Ray is no reason to be content
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if answer is None:
            server.close()
        elif answer:
            threading.Thread(target=greet, args=(server, answer), daemon=True).start()
        with pytest.raises(ConnectionError, match=rf"no cluster answers at 127.0.0.1:{port} .*ray.address"):
            cluster_module.connect(RayConfig(address=f"127.0.0.1:{port}"))


def test_what_an_actor_raises_in_its_beginning_is_told_and_not_tried_again() -> None:
    """An import that fails on a node, for example: a lost group would be started again, and fail alike."""
    from ray.exceptions import ActorDiedError, RayTaskError

    trace = "ray::GroupActor.__init__()\n  File \"x.py\", line 1\nImportError: cannot import name 'called'"
    died = ActorDiedError(RayTaskError("GroupActor.__init__", trace, ImportError("x"), actor_id="ab"))

    async def raises() -> None:
        raise died

    actor_of = SimpleNamespace(begin=SimpleNamespace(remote=raises))
    with pytest.raises(
        RuntimeError, match=r"^group 'a' cannot start on its node: ImportError: .* 'called'; all"
    ):
        asyncio.run(actor.ActorCaller("group 'a'", actor_of).begin())


@pytest.mark.parametrize("address", ["10.0.0.1", "head:port", " ", "http://10.0.0.1:8265"])
@pytest.mark.parametrize("key", ["ray.address", "RAY_ADDRESS"])
def test_what_is_no_address_is_refused_by_its_key(
    address: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address if key == "RAY_ADDRESS" else "127.0.0.1:1")
    with pytest.raises(ConfigError, match=f"^{key}: '{address}' is no address of a cluster; write HOST:PORT"):
        cluster_module.connect(RayConfig(address="" if key == "RAY_ADDRESS" else address))


def test_options_that_ray_does_not_have_are_refused_by_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"^ray\.options: .*num_cpuz"):
        cluster_module.connect(RayConfig(address="local", options={"num_cpuz": 1}))


def test_a_value_that_ray_refuses_is_told_by_its_key() -> None:
    """In a process of its own: Ray checks this value only after it has started a part of itself, which would stay."""
    code = (
        "from unitymas.trainers.group import cluster\n"
        "from unitymas.trainers.config.schema import RayConfig\n"
        "cluster.connect(RayConfig(address='local', options={'object_store_memory': 7}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert re.search(r"^\S*ConfigError: ray\.options: .*bytes", done.stderr, re.MULTILINE), done.stderr


def greet(server: socket.socket, answer: bytes) -> None:
    """Answer whoever comes."""
    link, _ = server.accept()
    with link:
        link.recv(100)
        link.sendall(answer)


def test_a_ray_that_was_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves its address in a file, which is believed only where a Ray answers there."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not cluster_module.runs_here()
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as here:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{here.getsockname()[1]}\n")
        settings_frame = bytes([0, 0, 0, cluster_module.SETTINGS, 0, 0, 0, 0, 0])
        threading.Thread(target=greet, args=(here, settings_frame), daemon=True).start()
        assert cluster_module.runs_here()
    assert not cluster_module.runs_here()


def spec(model: str, name: str, **more: Any) -> GroupSpec:
    return GroupSpec(name=name, model=model, policies={"p": PolicySpec()}, slots=2, threads=1, **more)


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_two_nodes_one_leaves_and_one_comes(tiny_llama: str, cluster: Any) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    spread = RayConfig(strategy="strict_spread", wait=60)

    async def run() -> None:
        groups = await start_groups({n: spec(tiny_llama, n, cpus=1) for n in "ab"}, "ray", spread)
        assert [(await group.report())["versions"]["p"] for group in groups.values()] == [0, 0]
        (placed,) = ray.util.placement_group_table().values()
        assert len(set(placed["bundles_to_node_id"].values())) == 2
        for refused, words in (
            ({"a": spec("", "a", cpus=3)}, r"ask for 3 CPUs \(groups.\*.cpus\), and Ray has 2"),
            ({"a": spec("", "a", gpus=1)}, r"ask for 1 GPUs \(groups.\*.gpus\), and Ray has 0"),
            ({n: spec("", n) for n in "cde"}, r"3 groups cannot be placed by 'strict_spread' \(waited 0.5 s"),
        ):
            with pytest.raises(ConfigError, match=words):
                await start_groups(refused, "ray", RayConfig(strategy="strict_spread", wait=0.5))
        for refused, words in (  # without a strategy
            (
                {n: spec("", n, cpus=0.6) for n in "cde"},
                "do not fit on the nodes together: c 0.6 CPUs, 0 GPUs; d",
            ),
            (
                {"c": spec("", "c", cpus=1)},
                r"no room \(waited 0.5 s, ray.wait\); they ask for c 1 CPUs, .* \(free: 0 CPU",
            ),
        ):
            with pytest.raises(ConfigError, match=words):
                await asyncio.wait_for(start_groups(refused, "ray", RayConfig(wait=0.5)), 60)
        cluster.remove_node(second)  # in the middle of a call
        answers = await asyncio.wait_for(
            asyncio.gather(*(group.report() for group in groups.values()), return_exceptions=True), 120
        )
        (lost,) = (
            name for name, answer in zip(groups, answers, strict=True) if isinstance(answer, GroupLost)
        )
        third = cluster.add_node(num_cpus=2, object_store_memory=10**8)  # one takes the bundle that was lost
        again = await start_groups({lost: spec(tiny_llama, lost, cpus=1)}, "ray")  # the first node is full
        await stop_groups({**groups, **again})
        cluster.remove_node(third)

    import ray

    asyncio.run(run())


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_an_actor_that_is_killed_changes_no_weight(
    tiny_llama: str, whole: bytes, tmp_path: Path, cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL, in the middle of a run. `python -m unitymas.benchmarks.faults` kills a hundred times."""
    where, killed = tmp_path / "run", []

    def kill() -> None:
        book = where / "metrics.jsonl"
        while not (book.exists() and '"kind": "step"' in book.read_text()):
            time.sleep(0.01)
        (pid,) = (pid for pid, words in family(os.getpid()).items() if "ray::GroupActor" in words)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    threading.Thread(target=kill, daemon=True).start()
    train(ID, directory=where, runtime="ray", **settings(tiny_llama, restart_pause=0.0))
    losses = [line for line in (where / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(killed) == len(losses) == 1 and weights(where) == whole


@pytest.mark.ray
def test_an_actor_that_is_killed_while_it_starts_is_a_lost_group(
    cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no actor is left behind."""

    class Killed:
        """A group that is killed while it loads."""

        def __init__(self, spec: GroupSpec) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    kinds = {"a": light(), "b": Killed}
    monkeypatch.setattr(runtime, "group_class", lambda spec: kinds[spec.name])
    with pytest.raises(GroupLost, match="group 'b' is gone while it starts"):
        asyncio.run(start_groups({name: spec("", name) for name in kinds}, "ray"))
    assert gone("ray::GroupActor")


def light() -> type:
    """Return a group that loads nothing. Its class travels by value, so nothing is imported there."""

    class Light:
        def __init__(self, spec: GroupSpec) -> None:
            pass

    return Light


@pytest.mark.ray
def test_a_node_with_other_versions_is_refused(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of this process are said to be others, as those of another node would be."""
    real = actor.versions()
    monkeypatch.setattr(runtime, "group_class", lambda spec: light())
    monkeypatch.setattr(actor, "versions", lambda: real | {"torch": "2.0.1", "unitymas": "0.0.7"})
    words = f"group 'a': its node has unitymas {real['unitymas']} instead of 0.0.7, torch {real['torch']} instead of 2.0.1"
    with pytest.raises(ValueError, match=re.escape(f"{words}; install the same versions on all nodes")):
        asyncio.run(start_groups({"a": spec("", "a")}, "ray"))
    assert gone("ray::GroupActor")
    assert {"python", "ray", "torch", "unitymas"} <= real.keys()


def gone(words: str) -> bool:
    """Tell whether soon no process of ours is called so."""
    until = time.monotonic() + 60
    while any(words in title for title in family(os.getpid()).values()) and time.monotonic() < until:
        time.sleep(0.05)
    return time.monotonic() < until


OTHER_RAY = """
import ray, sys
from unitymas.trainers.config.schema import RayConfig
from unitymas.trainers.group.cluster import connect
ray.__version__ = "2.1.0"
try:
    connect(RayConfig(address=sys.argv[1]))
except ValueError as error:
    print(ray.is_initialized(), error)
"""


@pytest.mark.ray
def test_a_cluster_of_another_ray_is_refused(cluster: Any) -> None:
    """A driver that says to be of another version: Ray itself compares, and we say what to do."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", OTHER_RAY, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.startswith(
        "False runtime=ray: Version mismatch: The cluster was started with: Ray: "
    ), done.stderr
    assert "Ray: 2.1.0" in done.stdout and "install the same Python and Ray on all nodes" in done.stdout
