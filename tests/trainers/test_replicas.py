"""Several replicas of an engine: prefixes stay together, loads stay even, bits stay equal, and a death costs time alone."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.agents.basics.failures import GroupLost, ReplicaLost
from unitymas.agents.engines.engine import ENGINES, EngineOrder
from unitymas.agents.policies import Call
from unitymas.benchmarks.speed.controller.routing import compared
from unitymas.envs.registry import unregister
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import Adapter, GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.config.plan import check_gpus
from unitymas.trainers.config.reader import ConfigError
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.controller.run import train
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.model_group import ModelGroup
from unitymas.trainers.group.replicas.router import Router
from unitymas.trainers.group.runtime import start_groups, stop_groups

from .pairs import register_pair

LEARNING = Learning(lr=1e-2)
POLICIES = {
    "team": PolicySpec(learning=LEARNING, sampling=Sampling(max_tokens=6)),
    "lora": PolicySpec(learning=LEARNING, adapter=Adapter(rank=4), sampling=Sampling(max_tokens=6)),
}


def spec(model: str, replicas: int, **more: Any) -> GroupSpec:
    return GroupSpec(
        name="main", model=model, policies=POLICIES, slots=4, deterministic=True, threads=1, replicas=replicas, **more
    )  # fmt: skip


def call(episode: str, node: str) -> Call:
    words = " ".join(f"w{(7 * len(episode) + i) % 50}" for i in range(20))
    messages = ({"role": "user", "content": f"{words} w{node}"},)
    return Call(
        agent="a", role="r", messages=messages, episode=episode, node=node, seed=sum(map(ord, episode + node))
    )


async def played(group: Any, tag: str) -> list[str]:
    """Replies of both policies, twelve at once."""
    calls = [(policy, call(f"{tag}{policy}{e}", str(e))) for policy in POLICIES for e in range(6)]
    answers = await asyncio.gather(*(group.generate(policy, c) for policy, c in calls))
    assert len({a.meta["version"] for a in answers}) == 1
    return [answer.text for answer in answers]


async def step(group: Any) -> list[Any]:
    """Replies, one update of both policies, and replies under the new weights."""
    before = await played(group, "a")
    for policy in POLICIES:
        ids = [id for e in range(6) for id in await group.seal(f"a{policy}{e}", [str(e)])]
        signals = [Signal(id, (-1.0) ** i) for i, id in enumerate(ids)]
        await group.update(policy, make_algorithm("grpo"), signals, [ids])
    versions = await group.publish()
    return [before, versions, await played(group, "b")]


# the router


@settings(max_examples=60)
@given(
    st.integers(1, 5), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.booleans()), max_size=60)
)
def test_no_replica_gets_more_than_its_share(replicas: int, work: list[tuple[int, int, bool]]) -> None:
    """Whatever is asked and whatever ends: a replica above 1.25 times the mean gets nothing."""
    router, open_requests = Router(replicas), []
    for family, length, end in work:
        before = dict(router.open)
        chosen = router.choose([family] * length)
        assert before[chosen] <= 1.25 * sum(before.values()) / replicas
        open_requests.append(chosen)
        if end:
            router.finished(open_requests.pop(0))
    assert sum(router.open.values()) == len(open_requests)


def test_a_common_prefix_stays_with_the_replica_that_holds_it() -> None:
    router = Router(4)
    families = [[family] * 64 for family in range(4)]
    homes = [router.choose(prompt) for prompt in families]
    assert sorted(homes) == [0, 1, 2, 3]  # all at once, nothing held: each takes an idle one
    for chance, (family, home) in enumerate(zip(families, homes, strict=True)):
        router.finished(home)
        assert router.choose([*family, chance]) == home
    assert router.counts["routed_tokens_held"] == 4 * 64
    router.clear()
    for home in homes:
        router.finished(home)
    assert router.choose([*families[3], 9]) == 0  # the weights have changed: nothing is held
    assert Router(2).choose(families[0], "adapter") == 0


def test_what_a_replica_has_dropped_is_forgotten() -> None:
    router = Router(1, room=64)
    for family in range(3):
        router.choose([family] * 32)
        router.finished(0)
    held = router.counts["routed_tokens_held"]
    router.choose([0] * 32)
    assert router.counts["routed_tokens_held"] == held  # of three families, the oldest had to go
    router.choose([2] * 32)
    assert router.counts["routed_tokens_held"] == held + 32


def test_more_is_held_than_by_round_robin_at_loads_as_even() -> None:
    """A team of episodes with a role's prompt, a task's and their own beginnings, over simulated replicas."""
    episodes = [
        [
            ([role] * 40 + [10 + task] * 60 + [100 + task * 4 + k] * 20 * turn, 20)
            for turn in range(3)
            for role in (1, 2)
        ]
        for task in range(16)
        for k in range(4)
    ]
    figures = compared(episodes, 4, flight=32, room=4000)
    assert figures["router"].held > figures["round robin"].held + 0.1
    assert figures["router"].share < 1.5
    assert 1.0 <= figures["router"].load < 1.6


# engines


def test_one_and_several_replicas_give_the_same_bits(tiny_llama: str) -> None:
    async def run(replicas: int) -> tuple[list[Any], list[torch.Tensor], dict[str, Any]]:
        group = ModelGroup(spec(tiny_llama, replicas))
        outcome = await step(group)
        weights = [p.detach().clone() for p in group.hosted["team"].parameters.named().values()]
        return outcome, weights, (await group.report())["engines"]["team"]

    one, several = asyncio.run(run(1)), asyncio.run(run(3))
    assert one[0] == several[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], several[1], strict=True))
    assert several[2]["replicas"] == 3 and several[2]["replicas_lost"] == 0
    assert several[2]["prompts"] == one[2]["prompts"] == 12


def test_the_requests_of_a_dead_replica_go_to_the_others(
    tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        whole, group = ModelGroup(spec(tiny_llama, 1)), ModelGroup(spec(tiny_llama, 3))
        engine = group.hosted["team"].engine
        asked = []

        async def dead(*_: Any) -> Any:
            asked.append(1)
            await asyncio.sleep(0)
            raise ReplicaLost("its node is gone")

        engine.members[1].agenerate = dead
        assert await step(group) == await step(whole)
        counts = (await group.report())["engines"]["team"]
        assert (counts["replicas"], counts["replicas_lost"], counts["requests_moved"]) == (2, 1, len(asked))
        assert asked
        engine.members[0].agenerate = engine.members[2].agenerate = dead
        with pytest.raises(GroupLost, match="group 'main': all its 3 replicas are gone"):
            await group.generate("team", call("late", "0"))

    asyncio.run(run())
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "unitymas: group 'main': replica 1 of 3 is gone (its node is gone); its requests go to the 2 that are left"
    )
    assert len(told) == 3


def test_versions_must_agree(tiny_llama: str) -> None:
    group = ModelGroup(spec(tiny_llama, 2))
    engine = group.hosted["team"].engine
    engine.members[1].publish = lambda *_: None
    with pytest.raises(
        RuntimeError, match=r"group 'main': its replicas have versions \{0: 1, 1: 0\}, not all 1"
    ):
        engine.publish(group.hosted["team"].parameters.model, 1)


def test_an_engine_that_cannot_have_replicas_is_refused(tiny_llama: str) -> None:
    def single(order: EngineOrder) -> Any:
        engine = ENGINES.find("torch")(order)
        engine.cannot = {"replicas": "keeps one file on this machine"}  # type: ignore[misc]
        return engine

    ENGINES.register("single", single)
    try:
        with pytest.raises(ValueError, match=r"groups.main.replicas: single keeps one file on this machine"):
            ModelGroup(spec(tiny_llama, 2, engine="single"))
    finally:
        ENGINES.unregister("single")
    vllm = ["env.data=mini", "groups.main.engine=vllm", "groups.main.replicas=2"]
    with pytest.raises(ConfigError, match=r"groups.main.replicas: in one process .* runtime=ray"):
        resolve("mask-hotpotqa", preset_name="shared", overrides=vllm)
    with pytest.raises(ConfigError, match=r"groups.main.replicas"):
        resolve("mask-hotpotqa", preset_name="shared", overrides=["groups.main.replicas=0"])


def test_replicas_need_gpus_of_their_own() -> None:
    one = GroupSpec(name="one", model="tiny", device="cuda:0", replicas=3)
    check_gpus({"one": one}, 3)
    with pytest.raises(
        ConfigError,
        match=r"groups.one.replicas: 3 replicas from cuda:0 on need GPUs 0 to 2, and torch sees 2",
    ):
        check_gpus({"one": one}, 2)
    with pytest.raises(ConfigError, match=r"groups.two.device: it would share GPU 2 with group 'one'"):
        check_gpus({"one": one, "two": replace(one, name="two", device="cuda:2", replicas=1)}, 3)
    with pytest.raises(ConfigError, match=r"groups.one.replicas"):
        check_gpus({"one": one}, 1)


# Ray


@pytest.mark.ray
def test_replicas_in_actors_give_the_same_bits(tiny_llama: str, cluster: object) -> None:
    """A group in an actor, its second replica in another one."""

    async def run() -> None:
        expected = await step(ModelGroup(spec(tiny_llama, 1)))
        groups = await start_groups({"main": spec(tiny_llama, 2)}, "ray")
        assert await step(groups["main"]) == expected
        counts = (await groups["main"].report())["engines"]["team"]
        assert counts["replicas"] == 2 and counts["replicas_lost"] == 0 and counts["prompts"] == 12
        await stop_groups(groups)

    asyncio.run(run())


@pytest.mark.ray
def test_a_replica_is_killed_while_it_answers(tiny_llama: str, cluster: object) -> None:
    import ray

    async def run() -> None:
        expected = await step(ModelGroup(spec(tiny_llama, 1)))
        group = ModelGroup(spec(tiny_llama, 2, rank_actors=True))
        engine = group.hosted["team"].engine
        asked = asyncio.ensure_future(step(group))
        while not engine.router.open[1]:
            await asyncio.sleep(0)
        ray.kill(engine.members[1].actor)
        assert await asyncio.wait_for(asked, 120) == expected
        counts = (await group.report())["engines"]["team"]
        assert counts["replicas"] == 1 and counts["replicas_lost"] == 1 and counts["requests_moved"] > 0
        await group.close()

    asyncio.run(run())


def test_a_run_tells_what_its_replicas_do(tiny_llama: str, tmp_path: Path) -> None:
    register_pair("two-of-replicas")
    policy = {"algorithm": {"name": "grpo"}, "sampling": {"temperature": 5.0, "max_tokens": 2}}
    try:
        run = train(
            "two-of-replicas", directory=tmp_path / "run", steps=1, tasks_per_step=2, k=2, minibatches=1, starved=False,
            checkpoint_every=0, eval={"every": 0, "tasks": 1}, log={"console": "off"}, policies={"team": policy},
            groups={"main": {"model": tiny_llama, "slots": 4, "replicas": 2, "threads": 1}},
        )  # fmt: skip
    finally:
        unregister("two-of-replicas")
    row = next(row for row in run.history if row["kind"] == "step")
    assert row["engine/team/replicas"] == 2 and row["engine/team/replicas_lost"] == 0
    assert row["engine/team/routed_tokens"] > row["engine/team/routed_tokens_held"] >= 0
