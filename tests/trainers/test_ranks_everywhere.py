"""1, 2 and 4 ranks, in process and on Ray, one group and four: the same losses and weights; a rank of Ray that dies."""

import asyncio
import os
import signal
from collections.abc import Mapping
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


Groups = dict[str, Any]
RANKS = {"g0": 4, "g1": 2, "g2": 1, "g3": 1}
"""Ranks of each of four groups."""


async def start(model: str, ranks: Mapping[str, int], runtime: Any) -> Groups:
    return await start_groups({name: spec(model, name, count) for name, count in ranks.items()}, runtime)


async def play(groups: Groups, folder: Path) -> Outcome:
    """One step of all groups side by side; their metrics and weights."""
    metrics = await asyncio.gather(*(step(group, 0) for group in groups.values()))
    learned = [await weights(group, folder / name) for name, group in groups.items()]
    return dict(zip(groups, zip(metrics, learned, strict=True), strict=True))


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def agree(many: Outcome, alone: Outcome) -> None:
    """Losses and weights are those of groups of one process, up to the order of sums."""
    assert list(many) == list(alone)
    for name, (metrics, learned) in many.items():
        for key, value in alone[name][0].items():
            assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, key)
        assert far(learned, alone[name][1]) < 1e-5


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_ranks_runtimes_and_groups_agree(tiny_llama: str, tmp_path: Path, cluster: object) -> None:
    """Four groups of 4, 2, 1 and 1 ranks, in processes and as Ray actors, against four groups of one process each. Then a
    rank of Ray dies. Groups of one rank on Ray are in test_runtime_ray.py too.
    """

    async def run() -> None:
        plain = await start(tiny_llama, dict.fromkeys(RANKS, 1), "local")
        alone = await play(plain, tmp_path / "alone")
        local = await start(tiny_llama, RANKS, "local")
        here = await play(local, tmp_path / "local")
        agree(here, alone)
        remote = await start(tiny_llama, RANKS, "ray")
        there = await play(remote, tmp_path / "ray")
        agree(there, alone)
        for name, (metrics, learned) in here.items():  # as many ranks: the very bits
            assert there[name][0] == metrics and torch.equal(there[name][1], learned)
        await remote["g1"].save(tmp_path / "checkpoint")
        await one_dies(remote["g1"], local["g1"])
        await stop_groups({name: group for name, group in remote.items() if name != "g1"})
        await stop_groups(local)

    async def one_dies(remote: Any, local: Any) -> None:
        metrics = await step(remote, 1)
        learned = await weights(remote, tmp_path / "second")
        os.kill((await remote.report())["ranks"][1]["process"], signal.SIGKILL)
        with pytest.raises(GroupLost, match="group 'g1': rank 1 failed in .*; all its ranks are ended"):
            await step(remote, 2)
        with pytest.raises(GroupLost, match="rank 1 failed"):
            await remote.report()
        await stop_groups({"g1": remote})
        await local.load(tmp_path / "checkpoint")  # any group goes on from there
        assert await step(local, 1) == metrics
        assert torch.equal(await weights(local, tmp_path / "again"), learned)

    asyncio.run(run())
