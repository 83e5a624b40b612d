"""1, 2 and 4 ranks, in process and on Ray, one group and four: the same losses and weights; a rank of Ray that dies."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unitymas.agents.basics.failures import GroupLost
from unitymas.agents.policies import Call
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.runtime import start_groups, stop_groups


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


def spec(model: str, name: str, ranks: int) -> GroupSpec:
    own = Learning(lr=1e-3, micro_tokens=50, checkpointing=name == "g1")
    policies = {"team": PolicySpec(learning=own, sampling=Sampling(max_tokens=6))}
    return GroupSpec(
        name=name, model=model, policies=policies, slots=8, threads=1, deterministic=True, ranks=ranks
    )


async def step(group: Any, number: int) -> dict[str, float]:
    """Play, update over uneven micro-batches with clipping, publish."""
    episodes = [f"{number}-{i}" for i in range(5)]

    def call(episode: str, i: int) -> Call:
        text = " ".join(f"w{(7 * i + k) % 50}" for k in range(5 + 3 * i))
        message = {"role": "user", "content": text}
        return Call(agent="a", role="r", messages=(message,), episode=episode, node="0", seed=i)

    await asyncio.gather(*(group.generate("team", call(e, i)) for i, e in enumerate(episodes)))
    ids = [id for e in episodes for id in await group.seal(e, ["0"])]
    signals = [Signal(id, float(i % 3 - 1)) for i, id in enumerate(ids)]
    metrics = await group.update("team", make_algorithm("grpo"), signals, [ids[:3], ids[3:]])
    await group.publish()
    await group.retire(episodes)
    return {name: metrics[name] for name in ("loss", "grad_norm", "entropy", "approx_kl")}


async def weights(group: Any, folder: Path) -> torch.Tensor:
    await group.export("team", folder)
    return torch.cat([t.flatten() for _, t in sorted(load_file(folder / "model.safetensors").items())])


Outcome = dict[str, tuple[dict[str, float], torch.Tensor]]


async def play(model: str, ranks: int, count: int, runtime: Any, folder: Path) -> Outcome:
    """One step of all groups side by side; their metrics and weights."""
    groups = await start_groups({f"g{i}": spec(model, f"g{i}", ranks) for i in range(count)}, runtime)
    try:
        metrics = await asyncio.gather(*(step(group, 0) for group in groups.values()))
        learned = [await weights(group, folder / name) for name, group in groups.items()]
    finally:
        await stop_groups(groups)
    return dict(zip(groups, zip(metrics, learned, strict=True), strict=True))


@pytest.fixture(scope="module")
def alone(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What four groups of one process learn."""
    return asyncio.run(play(tiny_llama, 1, 4, "local", tmp_path_factory.mktemp("alone")))


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "count", "runtime"),
    [
        (4, 1, "local"),
        (2, 4, "local"),
        pytest.param(4, 1, "ray", marks=pytest.mark.ray),
    ],
)
def test_ranks_runtimes_and_groups_agree(
    ranks: int, count: int, runtime: str, alone: Outcome, tiny_llama: str, tmp_path: Path, cluster: None
) -> None:
    """Ranks of one on Ray, with one group and four, are in test_runtime_ray.py: equal bits."""
    many = asyncio.run(play(tiny_llama, ranks, count, runtime, tmp_path))
    assert len(many) == count
    for name, (metrics, learned) in many.items():
        for key, value in alone[name][0].items():
            assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, key)
        assert far(learned, alone[name][1]) < 1e-5


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_ranks_on_ray_have_the_bits_of_processes_and_one_may_die(
    tiny_llama: str, tmp_path: Path, cluster: None
) -> None:
    async def two_steps(runtime: Any, name: str) -> tuple[Any, torch.Tensor, Any]:
        groups = await start_groups({"g": spec(tiny_llama, "g", 2)}, runtime)
        await step(groups["g"], 0)
        await groups["g"].save(tmp_path / f"{name}-checkpoint")
        metrics = await step(groups["g"], 1)
        return metrics, await weights(groups["g"], tmp_path / name), groups

    async def run() -> None:
        metrics, learned, local = await two_steps("local", "local")
        here, there, remote = await two_steps("ray", "ray")
        assert here == metrics and torch.equal(there, learned)
        dead = (await remote["g"].report())["ranks"][1]["process"]
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(GroupLost, match="group 'g': rank 1 failed in .*; all its ranks are ended"):
            await step(remote["g"], 2)
        with pytest.raises(GroupLost, match="rank 1 failed"):
            await remote["g"].report()
        await stop_groups(remote)
        await local["g"].load(tmp_path / "ray-checkpoint")  # any group goes on from there
        assert await step(local["g"], 1) == metrics
        assert torch.equal(await weights(local["g"], tmp_path / "again"), learned)
        await stop_groups(local)

    asyncio.run(run())
