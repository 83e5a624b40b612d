"""A critic in another group: samples travel between the groups, and the controller's messages do not grow with them."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from unitymas.agents.answers import DecisionId
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import GroupSpec, Learning, PolicySpec
from unitymas.trainers.group.actor import ActorPeer, GroupActor, RayGroup
from unitymas.trainers.group.model_group import ModelGroup
from unitymas.trainers.group.runtime import start_groups, stop_groups
from unitymas.trainers.group.sample_store import Sample

NEEDS = make_algorithm("ppo", kl_reward=0.05).needs
IDS = [DecisionId("e", str(i)) for i in range(8)]


def specs(model: str) -> dict[str, GroupSpec]:
    learning = Learning(lr=1e-2)
    policies = {
        "home": {"team": PolicySpec(learning=learning, reference=True)},
        "away": {"judge": PolicySpec(learning=learning, critic=True)},
    }
    return {
        name: GroupSpec(name=name, model=model, policies=own, slots=4, deterministic=True, threads=1)
        for name, own in policies.items()
    }


def sample(id: DecisionId, length: int) -> Sample:
    chance = np.random.default_rng(int(id.node))
    prompt, reply = chance.integers(4, 60, (2, length))
    allowed = tuple(tuple(sorted({1, int(token)})) for token in reply)
    return Sample(
        id.episode, id.node, "team", 0, prompt, reply, -np.ones(length, np.float32), support=allowed
    )


class Counted:
    """An actor of this process, whose messages from and to the controller are counted. It travels as its number."""

    there: list["Counted"] = []

    def __init__(self, spec: GroupSpec) -> None:
        self.inner, self.bytes, self.between = GroupActor(ModelGroup, spec), 0, 0
        Counted.there.append(self)

    def __reduce__(self) -> Any:
        return arrived, (Counted.there.index(self),)

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


def arrived(number: int) -> Counted:
    """The actor of a number, at the end of its journey."""
    return Counted.there[number]


class Method:
    def __init__(self, actor: Counted, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> Any:
        async def deliver() -> Any:
            packed = pickle.dumps(arguments)
            answer = await getattr(self.actor.inner, self.name)(*pickle.loads(packed))
            if self.name == "receive":
                self.actor.between += len(packed)
            else:
                self.actor.bytes += len(packed) + len(pickle.dumps(answer))
            return answer

        return asyncio.ensure_future(deliver())


async def judged(home: Any, away: Any) -> Any:
    """What the controller asks when a critic lives elsewhere (HostedGroups.values)."""
    await home.send(IDS, away.peer)
    await away.values("judge", IDS, make_algorithm("ppo").needs, "judge")
    await away.send(IDS, home.peer, True)
    values = await home.values("team", IDS, NEEDS)
    await home.send(IDS, away.peer, True)
    return values


def test_the_controllers_messages_do_not_grow_with_the_samples(tiny_llama: str) -> None:
    async def run(length: int) -> tuple[int, int]:
        actors = {name: Counted(spec) for name, spec in specs(tiny_llama).items()}
        home, away = (RayGroup(spec, actors[name]) for name, spec in specs(tiny_llama).items())
        for id in IDS:
            actors["home"].inner.group.store.put(sample(id, length))
        await home.seal("e", [id.node for id in IDS])
        for actor in actors.values():
            actor.bytes = 0
        await judged(home, away)
        mine = actors["away"].inner.group.store.get(IDS[0])
        assert mine.n_tokens == length and mine.reference is not None and mine.support is None
        bytes_between = sum(actor.between for actor in actors.values())
        return sum(actor.bytes for actor in actors.values()) // len(IDS), bytes_between // len(IDS)

    short, long = asyncio.run(run(6)), asyncio.run(run(60))
    print(f"bytes a sample through the controller: {short[0]} for 12 tokens, {long[0]} for 120")
    assert abs(long[0] - short[0]) <= 8
    assert long[1] > 5 * short[1] / 2 and long[1] > 120 * 8  # all of the tokens went between the groups


def test_what_was_measured_belongs_to_a_sample_that_is_there(tiny_llama: str) -> None:
    async def run() -> None:
        home, away = (ModelGroup(spec) for spec in specs(tiny_llama).values())
        home.store.put(sample(IDS[0], 5))
        await home.seal("e", ["0"])
        with pytest.raises(KeyError, match="no sample 'e/0' in this group"):
            await home.send(IDS[:1], away.peer, True)
        assert not len(away.store)

    asyncio.run(run())


@pytest.mark.ray
def test_actors_give_samples_to_each_other(tiny_llama: str, cluster: object) -> None:
    """Two groups in actors of Ray: the values are those of two groups in this process, and errors cross."""

    async def run() -> None:
        local = [ModelGroup(spec) for spec in specs(tiny_llama).values()]
        groups = await start_groups(specs(tiny_llama), "ray")
        for home in (local[0], groups["home"]):
            await home.admit([sample(id, 20) for id in IDS])
        assert await judged(*local) == await judged(groups["home"], groups["away"])
        assert isinstance(groups["away"].peer, ActorPeer)
        with pytest.raises(KeyError, match="no sample 'e/9' in this group"):
            await groups["home"].send([DecisionId("e", "9")], groups["away"].peer)
        await stop_groups(groups)

    asyncio.run(run())
