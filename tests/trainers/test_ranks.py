"""Groups of many ranks: the same losses and weights as one process, checkpoints for any number, and ends that leave nothing."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from unitymas.agents.basics.failures import GroupLost
from unitymas.agents.policies import Call
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import (
    Adapter,
    GroupSpec,
    Learning,
    PolicySpec,
    Sampling,
    sharded,
)
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.learning.dealing import deal
from unitymas.trainers.group.learning.packing import micro_batches
from unitymas.trainers.group.learning.update import UpdateError
from unitymas.trainers.group.model_group import ModelGroup
from unitymas.trainers.group.ranks.forked import RankError
from unitymas.trainers.group.ranks.group import RankedGroup
from unitymas.trainers.group.runtime import start_groups, stop_groups
from unitymas.trainers.group.sample_store import Sample

LEARNING = Learning(lr=1e-4, micro_tokens=60)


def spec(model: str, ranks: int, **options: Any) -> GroupSpec:
    short = Sampling(max_tokens=6)
    policies = {
        "team": PolicySpec(learning=replace(LEARNING, checkpointing=True), sampling=short, reference=True),
        "critic": PolicySpec(learning=LEARNING, critic=True),
        "side": PolicySpec(learning=LEARNING, adapter=Adapter(rank=4), sampling=short),
        "fixed": PolicySpec(sampling=short),
    }
    how = {"slots": 8, "threads": 1, "deterministic": True, "ranks": ranks} | options
    return GroupSpec(name="main", model=model, policies=policies, **how)


def call(episode: str, words: int) -> Call:
    text = " ".join(f"w{(7 * words + i) % 50}" for i in range(5 + words))
    message = {"role": "user", "content": text}
    return Call(agent="a", role="solver", messages=(message,), episode=episode, node="0", seed=words)


async def step(group: Any, number: int) -> dict[str, float]:
    """Play, value, update twice (two mini-batches, an uneven one, two epochs), publish."""
    figures: dict[str, float] = {}
    for policy in ("team", "side"):
        episodes = [f"{policy}-{number}-{i}" for i in range(5)]
        answers = await asyncio.gather(*(group.generate(policy, call(e, i)) for i, e in enumerate(episodes)))
        ids = [id for e in episodes for id in await group.seal(e, ["0"])]
        algorithm = (
            make_algorithm("ppo", kl_loss=0.01) if policy == "team" else make_algorithm("ppo", whiten="none")
        )
        await group.values(policy, ids, algorithm.needs, "critic")
        signals = [Signal(id, None, tail=float(i % 3 - 1)) for i, id in enumerate(ids)]
        batches = [ids[:4], ids[4:], ids[1:]]
        metrics = await group.update(policy, algorithm, signals, batches)
        judged = await group.update("critic", algorithm, signals, batches[:2])
        figures |= {
            f"{policy}/{name}": metrics[name] for name in ("loss", "grad_norm", "max_log_ratio", "entropy")
        }
        figures |= {f"{policy}/critic/{name}": judged[name] for name in ("loss", "explained_variance")}
        figures[f"{policy}/words"] = float(sum(map(ord, "".join(answer.text for answer in answers))))
        await group.publish()
        await group.retire(episodes)
    return figures


async def weights(group: Any, folder: Path) -> torch.Tensor:
    """All that was learned, as it is exported, in one vector."""
    parts = []
    for policy in ("team", "side"):
        await group.export(policy, folder / policy)
        tensors = load_file(folder / policy / "model.safetensors")
        parts += [tensors[name].flatten() for name in sorted(tensors)]
    return torch.cat(parts)


def alike(got: dict[str, float], want: dict[str, float]) -> bool:
    return all(abs(got[name] - want[name]) <= 2e-5 * max(1.0, abs(want[name])) for name in want)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def family(group: RankedGroup) -> list[int]:
    """Process ids of the supervisor and its ranks."""
    top = group.ranks.supervisor.pid  # type: ignore[attr-defined]
    return [top, *map(int, Path(f"/proc/{top}/task/{top}/children").read_text().split())]


def gone(pids: list[int], within: float = 60.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until and any(map(alive, pids)):
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.timeout(900)
def test_ranks_learn_what_one_process_learns(tiny_llama: str, tmp_path: Path) -> None:
    """1, 2 and 4 ranks (4 of them two by two, which share every row); then each goes on from the checkpoint of another number."""

    async def run() -> None:
        one: Any = ModelGroup(spec(tiny_llama, 1))
        specs = {"two": spec(tiny_llama, 2), "four": spec(tiny_llama, 4, context_ranks=2)}
        many = await start_groups(specs)
        two, four = many["two"], many["four"]
        try:
            first = {n: await step(g, 0) for n, g in (("1", one), ("2", two), ("4", four))}
            assert alike(first["2"], first["1"]) and alike(first["4"], first["1"])
            learned = {n: await weights(g, tmp_path / n) for n, g in (("1", one), ("2", two), ("4", four))}
            assert distance(learned["2"], learned["1"]) < 1e-5
            assert distance(learned["4"], learned["1"]) < 1e-5
            for name, group in (("1", one), ("2", two), ("4", four)):
                await group.save(tmp_path / f"checkpoint-{name}")
            undisturbed = await step(two, 1)  # the other two go on from its checkpoint
            end = await weights(two, tmp_path / "end")
            for group, other in ((one, "2"), (four, "2"), (two, "4"), (two, "1")):
                assert await group.load(tmp_path / f"checkpoint-{other}") == {
                    "team": 1,
                    "critic": 2,
                    "side": 1,
                    "fixed": 0,
                }
                if (group, other) != (two, "1"):
                    assert alike(await step(group, 1), undisturbed)
                    assert distance(await weights(group, tmp_path / "again"), end) < 1e-5
            await two.load(tmp_path / "checkpoint-2")  # the same ranks: the same bits
            assert await step(two, 1) == undisturbed
            assert torch.equal(await weights(two, tmp_path / "again"), end)
            await two.adopt("team", tmp_path / "1" / "team")
            assert torch.equal(
                (await weights(two, tmp_path / "adopted"))[: len(end) // 2], learned["1"][: len(end) // 2]
            )
            report = await four.report()
            check_memory(report["ranks"], one)
            await check_failures(two)
        finally:
            await stop_groups(many)

    asyncio.run(run())


def check_memory(ranks: list[dict[str, int]], one: ModelGroup) -> None:
    """Parameters and optimizer divide by the ranks; nothing is left on one of them."""
    whole = sum(p.nbytes for h in one.hosted.values() if h.learner for p in h.parameters.named().values())
    assert sum(rank["parameters"] for rank in ranks) == whole
    assert all(rank["parameters"] < 0.3 * whole for rank in ranks)
    assert sum(rank["optimizer"] for rank in ranks) >= 2 * whole - 8
    assert all(rank["optimizer"] < 0.3 * 2.1 * whole for rank in ranks)


class Greedy(type(make_algorithm("grpo"))):  # type: ignore[misc]
    """An algorithm that asks for more memory than there is."""

    def loss(self, batch: Any, denominators: Any) -> Any:
        return torch.empty(1 << 55).sum(), {}


async def check_failures(group: Any) -> None:
    """A loss that is no number is an error, and the group goes on; memory that is not there ends all ranks, and says so."""
    pids = family(group)
    assert len(pids) == 3 and all(map(alive, pids))
    episodes = [f"bad-{i}" for i in range(4)]
    await asyncio.gather(*(group.generate("team", call(e, i)) for i, e in enumerate(episodes)))
    ids = [id for e in episodes for id in await group.seal(e, ["0"])]
    poisoned = [Signal(id, float("nan") if i == 2 else 1.0) for i, id in enumerate(ids)]
    before = await group.report()
    with pytest.raises(UpdateError, match="loss is nan.*as before this update"):
        await group.update("team", make_algorithm("grpo"), poisoned, [ids])
    with pytest.raises(KeyError, match="no signal"):
        await group.update("team", make_algorithm("grpo"), poisoned[:2], [ids])
    fine = [Signal(id, 1.0) for id in ids]
    await group.update("team", make_algorithm("grpo"), fine, [ids])
    assert (await group.report())["ranks"] == before["ranks"] or before["ranks"]
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 ran out of memory in update.*micro_tokens"):
        await group.update("team", Greedy(), fine, [ids])
    assert time.monotonic() - began < 60 and gone(pids)
    with pytest.raises(RankError, match="ran out of memory"):
        await group.publish()


@pytest.mark.timeout(600)
def test_a_rank_that_dies_ends_its_group_and_leaves_no_process(tiny_llama: str) -> None:
    async def run() -> None:
        (group,) = (await start_groups({"main": spec(tiny_llama, 2, folder="")})).values()
        assert isinstance(group, RankedGroup)
        pids = family(group)
        try:
            os.kill(pids[2], signal.SIGSTOP)  # the others wait for it …
            waiting = asyncio.create_task(step(group, 0))
            await asyncio.sleep(0.5)
            os.kill(pids[2], signal.SIGKILL)  # … and it dies
            with pytest.raises(GroupLost, match="rank [01] of 2 ended in .*, killed by signal 9.*newest"):
                await asyncio.wait_for(waiting, 120)
            assert gone(pids)
            with pytest.raises(GroupLost):  # which a run goes on after, and which may be met more than once
                group.ranks.call("steps")
        finally:
            await group.close()

    asyncio.run(run())


def test_a_group_that_cannot_start_leaves_no_process(tiny_llama: str) -> None:
    before = set(Path("/proc").glob("[0-9]*"))
    with pytest.raises((RankError, FileNotFoundError)):
        asyncio.run(start_groups({"main": spec(str(Path(tiny_llama) / "nowhere"), 2)}))
    new = [int(p.name) for p in set(Path("/proc").glob("[0-9]*")) - before]
    assert gone([pid for pid in new if _is_rank(pid)])


def _is_rank(pid: int) -> bool:
    try:
        return b"ranks.forked" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_ranks_are_for_learners_alone(tiny_llama: str) -> None:
    assert not sharded(spec(tiny_llama, 1)) and sharded(spec(tiny_llama, 2))
    assert not sharded(replace(spec(tiny_llama, 2), policies={"fixed": PolicySpec()}))
    assert sharded(
        replace(spec(tiny_llama, 1), policies={"team": PolicySpec(learning=Learning(offload=True))})
    )
    with pytest.raises(ValueError, match=r"groups.main.context_ranks: 3 does not divide groups.main.ranks=4"):
        spec(tiny_llama, 4, context_ranks=3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(10, 200),
)
def test_micro_batches_are_dealt_by_tokens(lengths: list[tuple[int, int]], ranks: int, budget: int) -> None:
    import numpy as np

    def sample(i: int, prompt: int, reply: int) -> Sample:
        ids, more = np.full(prompt, i), np.full(reply, i)
        return Sample("e", str(i), "team", 0, ids, more, np.zeros(reply, np.float32))

    samples = [sample(i, *sizes) for i, sizes in enumerate(lengths)]
    rounds = deal(samples, budget, ranks)
    assert sorted(i for parts in rounds for micro in parts for i in micro) == list(range(len(samples)))
    assert all(len(parts) == ranks for parts in rounds)
    assert rounds == deal(samples, budget, ranks)
    cost = [[sum(sum(lengths[i]) for i in micro) for micro in parts] for parts in rounds]
    for parts, micros in zip(cost, rounds, strict=True):
        assert parts == sorted(parts, reverse=True)  # whoever has none left is last
        assert all(n <= budget or len(micro) == 1 for n, micro in zip(parts, micros, strict=True))
    if ranks == 1:
        assert [parts[0] for parts in rounds] == micro_batches(samples, budget)
    busy = min(ranks, len(samples))
    assert sum(bool(micro) for micro in rounds[0]) >= min(busy, max(1, busy // 2))
