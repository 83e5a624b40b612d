"""The same groups in process and as Ray actors: the same losses and weights, bit for bit, for one and for four."""

import asyncio
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unitymas.agents.policies import Call
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import Adapter, GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.learning.update import UpdateError
from unitymas.trainers.group.model_group import CallCancelled, ModelGroup
from unitymas.trainers.group.runtime import METHODS, start_groups, stop_groups

LEARNING = Learning(lr=1e-2, micro_tokens=100)


def specs(model: str, count: int) -> dict[str, GroupSpec]:
    """One shared group, or one per role; with a critic, and an adapter in some."""
    found = {}
    for i in range(count):
        adapter = Adapter(rank=4) if i % 2 else None
        policies = {
            f"p{i}": PolicySpec(
                learning=LEARNING, adapter=adapter, reference=True, sampling=Sampling(max_tokens=6)
            ),
            f"p{i}-critic": PolicySpec(learning=LEARNING, critic=True, adapter=adapter),
        }
        found[f"g{i}"] = GroupSpec(
            name=f"g{i}", model=model, policies=policies, slots=8, deterministic=True, threads=1
        )
    return found


def call(episode: str, node: str) -> Call:
    words = " ".join(f"w{sum(map(ord, episode)) * 3 % 40 + i}" for i in range(9))
    messages = ({"role": "user", "content": words},)
    return Call(
        agent="a", role="r", messages=messages, episode=episode, node=node, seed=sum(map(ord, node + episode))
    )


async def step(name: str, group: Any, number: int) -> dict[str, float]:
    """One PPO step of one group: collect, values, two updates, publish, retire."""
    policy = name.replace("g", "p")
    algorithm = make_algorithm("ppo", kl_reward=0.05)
    calls = [call(f"s{number}e{e}", node) for e in range(5) for node in ("0", "1")]
    await asyncio.gather(*(group.generate(policy, c) for c in calls))
    ids = [id for e in range(5) for id in await group.seal(f"s{number}e{e}", ("0", "1"))]
    values = await group.values(policy, ids, algorithm.needs, f"{policy}-critic")
    tails = [Signal(id, None, tail=(-1.0) ** i - values[id].first) for i, id in enumerate(ids)]
    cut = [ids[:4], ids[4:]]
    metrics = await group.update(policy, algorithm, tails, cut)
    judged = await group.update(f"{policy}-critic", algorithm, tails, cut)
    await group.publish()
    await group.retire([f"s{number}e{e}" for e in range(5)])
    both = {**metrics, **{f"critic/{k}": v for k, v in judged.items()}}
    return {k: v for k, v in both.items() if "time/" not in k}


async def play(model: str, count: int, runtime: Any, folder: Path) -> tuple[Any, Any]:
    """Two steps of all groups side by side; their metrics, and every tensor of their checkpoints."""
    groups = await start_groups(specs(model, count), runtime)
    metrics = [
        await asyncio.gather(*(step(name, group, number) for name, group in groups.items()))
        for number in range(2)
    ]
    with checkpoint.writing(folder / "step-000002") as draft:
        await asyncio.gather(*(group.save(draft / name) for name, group in groups.items()))
    await stop_groups(groups)
    newest = checkpoint.latest(folder)
    assert newest is not None
    return metrics, {name: (newest / name / "policies.pt").read_bytes() for name in groups}


@pytest.mark.ray
@pytest.mark.parametrize("count", [1, 4])
def test_local_and_ray_agree_bit_for_bit(
    count: int, tiny_llama: str, tmp_path: Path, cluster: object
) -> None:
    local = asyncio.run(play(tiny_llama, count, "local", tmp_path / "local"))
    ray = asyncio.run(play(tiny_llama, count, "ray", tmp_path / "ray"))
    assert local[0] == ray[0]
    assert local[1] == ray[1]


@pytest.mark.ray
def test_errors_and_cancelling_cross(tiny_llama: str, tmp_path: Path, cluster: object) -> None:
    """What goes wrong in an actor is the same exception here; a cancelled wait cancels the request there."""

    async def run() -> None:
        talker = GroupSpec(
            name="g0", model=tiny_llama, policies={"p0": PolicySpec(learning=LEARNING)}, slots=4
        )
        groups = await start_groups({"g0": talker}, "ray")
        group = groups["g0"]
        with pytest.raises(KeyError, match="did you mean 'p0'"):
            await group.generate("p9", call("e1", "0"))
        with pytest.raises(UpdateError, match="needs samples"):
            await group.update("p0", make_algorithm("grpo"), [], [])
        with pytest.raises(AttributeError, match="sael"):
            group.sael("e1", [])  # type: ignore[attr-defined]
        waits = [asyncio.ensure_future(group.generate("p0", call(f"c{i}", "0"))) for i in range(60)]
        await asyncio.sleep(0.2)
        waits[-1].cancel()
        await group.drop("c58", "deadline")
        with pytest.raises(CallCancelled):
            await waits[-2]
        await asyncio.gather(*waits[:-2])
        counts = (await group.report())["samples"]
        assert counts["held/open"] == 58
        await stop_groups(groups)

    asyncio.run(run())
    greedy = GroupSpec(name="g", model=tiny_llama, policies={"p": PolicySpec()}, gpus=10_000)
    with pytest.raises(ValueError, match=r"ask for 10000 GPUs \(groups.\*.gpus\), and Ray has"):
        asyncio.run(start_groups({"g": greedy}, "ray"))


def test_an_engine_is_given_gpus_if_the_cluster_has_any(tiny_llama: str, cluster: Any) -> None:
    import ray

    spec = GroupSpec(name="g", model=tiny_llama, policies={"p": PolicySpec()}, gpus_if_any=2)

    async def free_gpus() -> float:
        groups = await start_groups({"g": spec}, "ray")
        await asyncio.sleep(1)  # the numbers of the nodes arrive
        free = ray.available_resources().get("GPU", 0.0)
        await stop_groups(groups)
        return free

    assert asyncio.run(free_gpus()) == 0
    node = cluster.add_node(num_cpus=1, num_gpus=3, object_store_memory=10**8)
    try:
        assert asyncio.run(free_gpus()) == 1
    finally:
        cluster.remove_node(node)


JOIN = """
import asyncio, os, sys
import ray
from unitymas.trainers.group.runtime import start_groups, stop_groups
from unitymas.trainers.config.group_settings import GroupSpec, PolicySpec

async def run():
    specs = {n: GroupSpec(name=n, model=sys.argv[1], policies={"p": PolicySpec()}, slots=2, threads=1) for n in "a"}
    groups = await start_groups(specs, "ray")
    reports = [await group.report() for group in groups.values()]
    print(how, ray.cluster_resources().get("mark"), [r["versions"] for r in reports], flush=True)
    await stop_groups(groups)

for how in ("by address", "by itself"):
    asyncio.run(run())
    ray.shutdown()
    os.environ.pop("RAY_ADDRESS", None)
"""


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    """A head node of its own, as `ray start --head` makes one; what its drivers need to find it by themselves."""
    folder = tempfile.mkdtemp(prefix="rh", dir="/tmp")  # a short path: sockets lie under it
    own = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
    own["RAY_raylet_start_wait_time_s"] = "600"  # Ray's own 30 s are too few for a busy machine
    own.pop("RAY_ADDRESS", None)
    command = [  # port 0: Ray takes a free one, and no other test can take it before
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--num-cpus=1",
        "--include-dashboard=false", "--object-store-memory=100000000", "--resources={\"mark\": 7}",
    ]  # fmt: skip
    log, address = Path(folder, "log"), Path(folder, "ray", "ray_current_cluster")
    with log.open("w") as out:
        process = subprocess.Popen(command, env=own, stdout=out, stderr=out, start_new_session=True)
    try:
        limit = time.monotonic() + 600
        while not ("Ray runtime started" in log.read_text() and address.exists()):
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-3000:]
            time.sleep(0.1)
        yield {**own, "RAY_ADDRESS": address.read_text().strip()}
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_running_cluster_is_joined(head: dict[str, str], tiny_llama: str) -> None:
    """A real second head: by its address, and because it was started on this machine."""
    command = [sys.executable, "-c", JOIN, tiny_llama]
    joined = subprocess.run(command, env=head, capture_output=True, text=True, timeout=900)
    assert joined.returncode == 0, joined.stderr[-3000:]
    assert joined.stdout.splitlines() == ["by address 7.0 [{'p': 0}]", "by itself 7.0 [{'p': 0}]"]


def test_a_group_is_asked_the_same_wherever_it_runs() -> None:
    public = {
        n for n, f in inspect.getmembers(ModelGroup, inspect.iscoroutinefunction) if not n.startswith("_")
    }
    assert public == {*METHODS, "close"}


def test_groups_in_one_process_share_its_threads(tiny_llama: str) -> None:
    both = {
        n: GroupSpec(name=n, model=tiny_llama, policies={"p": PolicySpec()}, threads=t)
        for n, t in (("a", 1), ("b", 2))
    }
    with pytest.raises(ValueError, match="share its threads"):
        asyncio.run(start_groups(both))
    with pytest.raises(ValueError, match="local or ray"):
        asyncio.run(start_groups(both, "remote"))  # type: ignore[arg-type]
