"""The simulated star: its engines keep time by their model, and the real collector feeds them."""

import asyncio
import time

import pytest

from unitymas.agents.policies import Call
from unitymas.benchmarks.speed.simulate.__main__ import regime, started
from unitymas.benchmarks.speed.simulate.paced import EngineSpeed, Lengths, PacedGroup
from unitymas.envs.registry import make_arena

FAST = EngineSpeed("fast", 1e-4, 1e-6, 1e-7, "made up")


def test_a_paced_engine_is_as_late_as_its_model_says() -> None:
    """Eight equal requests over four slots take two rounds of steps, each as long as four running requests make it."""
    slow = EngineSpeed("slow", 2e-3, 1e-3, 0.0, "made up")

    async def run() -> tuple[float, dict[str, object]]:
        group = PacedGroup(slow, 4, Lengths(fresh=0))
        group.lengths.draw = lambda seed: 10  # type: ignore[method-assign]
        began = time.perf_counter()
        calls = (
            Call(agent="a", role="updater", messages=(), episode=str(i), node="0", seed=i) for i in range(8)
        )
        await asyncio.gather(*(group.generate("p", call) for call in calls))
        return time.perf_counter() - began, await group.report()

    seconds, told = asyncio.run(run())
    assert seconds >= 2 * 10 * (2e-3 + 4e-3) * 0.99  # later on a busy machine, never earlier
    assert told["calls"] == 8 and told["tokens"] == 80 and told["running"] == told["waiting"] == 0


def test_a_regime_is_measured() -> None:
    """An episode is sealed once, in the one group that sampled it, while others are played: only the last seals come after all."""
    arena = make_arena("mask-hotpotqa", data="mini", prompts="short", split="train", max_turns=1)
    groups = started(2, "local", FAST, 4, Lengths(reply=5))
    calls_then: list[int] = []

    def noted(group: object) -> None:
        seal = group.seal  # type: ignore[attr-defined]

        async def note(episode: str, keep: list[str]) -> object:
            calls_then.append(sum(g.calls for g in groups.values()))  # type: ignore[attr-defined]
            return await seal(episode, keep)

        group.seal = note  # type: ignore[attr-defined]

    for group in groups.values():
        noted(group)
    figures = asyncio.run(regime(arena, groups, None, 16, 4, 3.0))
    assert figures.episodes == 48 and figures.groups == 2 and 0 < figures.utilisation <= 1.0001
    assert sum(group.seals for group in groups.values()) == 48  # type: ignore[attr-defined]
    assert sum(then == sum(g.calls for g in groups.values()) for then in calls_then) <= 16  # type: ignore[attr-defined]
    assert figures.bytes_per_call > 500 and figures.controller > 0


@pytest.mark.parametrize("reply", [1, 200])
def test_replies_are_drawn_by_the_seed_about_their_mean(reply: int) -> None:
    lengths = Lengths(reply=reply)
    drawn = [lengths.draw(seed) for seed in range(400)]
    assert drawn == [lengths.draw(seed) for seed in range(400)]
    assert 0.8 * reply <= sum(drawn) / len(drawn) <= 1.2 * reply + 0.5
