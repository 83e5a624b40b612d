"""A model group from end to end: it speaks, keeps what it said, learns from it, and speaks otherwise."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unitymas.agents import TINY, model_path
from unitymas.agents.model.weights import load_model
from unitymas.agents.policies import Call
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import Adapter, GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.controller.checkpoint import CheckpointError
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.learning.update import UpdateError
from unitymas.trainers.group.model_group import CallCancelled, ModelGroup
from unitymas.trainers.group.persistence import HEAVY

LEARNING = Learning(lr=1e-2, micro_tokens=64)
NODES = ("0", "1", "2.0")


def spec(model: str, policies: dict[str, PolicySpec], **options: Any) -> GroupSpec:
    short = Sampling(max_tokens=6)
    policies = {n: replace(p, sampling=short) if p.sampling == Sampling() else p for n, p in policies.items()}
    return GroupSpec(name="main", model=model, policies=policies, slots=8, **options)


def call(episode: str, node: str, **options: Any) -> Call:
    words = " ".join(f"w{(7 * len(episode) + i) % 50}" for i in range(12))
    return Call(
        agent="a",
        role="solver",
        messages=({"role": "user", "content": f"{words} {node}"},),
        episode=episode,
        node=node,
        seed=sum(map(ord, episode + node)),
        **options,
    )


async def play(group: Any, policy: str = "team", episodes: int = 4) -> list[str]:
    """Play and seal some episodes; their decision ids."""
    calls = [call(f"e{e}", node) for e in range(episodes) for node in NODES]
    await asyncio.gather(*(group.generate(policy, c) for c in calls))
    return [id for e in range(episodes) for id in await group.seal(f"e{e}", NODES)]


def signals(ids: list[str]) -> list[Signal]:
    return [Signal(id, (-1.0) ** i * (1 + i % 3)) for i, id in enumerate(ids)]


def halves(ids: list[str]) -> list[list[str]]:
    return [ids[: len(ids) // 2], ids[len(ids) // 2 :]]


def test_a_model_is_named_as_in_a_team(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's base and a policy's own beginning: tiny, hf:PATH, PATH."""
    assert model_path("tiny") == model_path(f"hf:{TINY}") == model_path(TINY) == TINY
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.gguf").touch()
    assert model_path("hf:a/b.gguf") == model_path("a/b.gguf") == Path("a/b.gguf")
    policies = {"own": PolicySpec(init=tiny_llama), "base": PolicySpec()}
    hosted = ModelGroup(spec("tiny", policies)).hosted
    assert hosted["base"].parameters.model.shape == load_model(TINY).shape
    assert hosted["own"].parameters.model.shape == load_model(tiny_llama).shape
    hosted = ModelGroup(
        spec(f"hf:{tiny_llama}", {"own": PolicySpec(init="tiny"), "base": PolicySpec()})
    ).hosted
    assert hosted["base"].parameters.model.shape == load_model(tiny_llama).shape
    assert hosted["own"].parameters.model.shape == load_model(TINY).shape


def test_a_step(tiny_llama: str) -> None:
    """Collect, update, publish, retire: versions are on the answers, nothing is left over, the reply changes."""

    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, {"team": PolicySpec(learning=LEARNING)}))
        answer = await group.generate("team", call("probe", "0"), temperature=0.0, keep=False)
        assert answer.meta["policy"] == "team" and answer.meta["version"] == 0 and "sample" not in answer.meta
        ids = await play(group)
        metrics = await group.update("team", make_algorithm("grpo"), signals(ids), halves(ids))
        assert metrics["max_mismatch"] < 1e-4  # engine against trainer, at zero staleness
        still = await group.generate("team", call("probe", "0"), temperature=0.0, keep=False)
        assert still.text == answer.text and still.meta["version"] == 0
        for _ in range(5):
            await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
        assert await group.publish() == {"team": 1}
        changed = await group.generate("team", call("probe", "0"), temperature=0.0, keep=False)
        assert changed.meta["version"] == 1 and changed.text != answer.text
        counts = await group.retire([f"e{e}" for e in range(4)])
        assert counts["trained"] == 12 and counts["held/taken"] == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "sampling, choices",
    [
        (Sampling(max_tokens=6, temperature=0.7), None),
        (Sampling(max_tokens=6, top_p=0.8), None),
        (Sampling(max_tokens=6, top_k=5, temperature=1.3), None),
        (Sampling(max_tokens=6), ("w1 w2", "w1 w3 w4", "w9")),
        (Sampling(max_tokens=6, temperature=0.0), None),
    ],
)
def test_the_trainer_computes_what_the_engine_sampled(
    tiny_llama: str, sampling: Sampling, choices: tuple[str, ...] | None
) -> None:
    """Temperature, top-p, top-k and choices enter the trainer's log-probs: the ratio is 1 at zero staleness."""

    async def run() -> None:
        policy = PolicySpec(learning=LEARNING, sampling=sampling)
        group = ModelGroup(spec(tiny_llama, {"team": policy}))
        calls = [call(f"e{e}", "0", choices=choices) for e in range(12)]
        await asyncio.gather(*(group.generate("team", c) for c in calls))
        ids = [id for e in range(12) for id in await group.seal(f"e{e}", ["0"])]
        metrics = await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
        assert metrics["max_mismatch"] < 1e-4

    asyncio.run(run())


def test_policies_on_one_base_learn_apart(tiny_llama: str) -> None:
    """Two adapters, a full copy and a frozen policy: each update moves one of them alone."""
    policies = {
        "a": PolicySpec(learning=LEARNING, adapter=Adapter(rank=4)),
        "b": PolicySpec(learning=LEARNING, adapter=Adapter(rank=4)),
        "full": PolicySpec(learning=LEARNING),
        "frozen": PolicySpec(),
    }

    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, policies))
        before = {name: h.parameters.state_dict() for name, h in group.hosted.items()}
        ids = await play(group, "a")
        await group.update("a", make_algorithm("grpo"), signals(ids), [ids])
        assert await group.publish() == {"a": 1, "b": 0, "full": 0, "frozen": 0}
        for name, hosted in group.hosted.items():
            same = all(torch.equal(t, before[name][k]) for k, t in hosted.parameters.state_dict().items())
            assert same == (name != "a")
        with pytest.raises(ValueError, match="frozen"):
            await group.update("frozen", make_algorithm("grpo"), signals(ids), [ids])
        speakers = {name: h.engine for name, h in group.hosted.items()}
        assert speakers["a"] is speakers["b"] and speakers["full"] is not speakers["a"]

    asyncio.run(run())


def test_ppo_with_a_critic_and_a_reference(tiny_llama: str) -> None:
    """Values to the controller, tails back, actor and critic updated; the KL reward needs the reference."""
    policies = {
        "team": PolicySpec(learning=LEARNING, reference=True),
        "team-critic": PolicySpec(learning=LEARNING, critic=True),
    }

    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, policies))
        algorithm = make_algorithm("ppo", gamma=0.95, lam=0.9, kl_reward=0.1, kl_loss=0.01)
        for _ in range(2):  # by the second time policy and reference differ
            ids = await play(group)
            found = await group.values("team", ids, algorithm.needs, "team-critic")
            assert found.keys() == set(ids)
            tails = [Signal(id, None, tail=1.0) for id in ids]
            metrics = await group.update("team", algorithm, tails, halves(ids))
            judged = await group.update("team-critic", algorithm, tails, halves(ids))
            assert {"kl", "entropy", "clipped"} <= metrics.keys() and "value_loss" in judged
            versions = await group.publish()
            await group.retire([f"e{e}" for e in range(4)])
            group.store = type(group.store)()  # the same episode names again
        assert versions == {"team": 2, "team-critic": 2}
        with pytest.raises(ValueError, match="critic"):
            await group.generate("team-critic", call("e9", "0"))

    asyncio.run(run())


def test_the_reference_is_measured_beside_the_critic_and_once(tiny_llama: str) -> None:
    policies = {
        "team": PolicySpec(learning=LEARNING, reference=True),
        "team-critic": PolicySpec(learning=LEARNING, critic=True),
    }
    algorithm = make_algorithm("ppo", kl_loss=0.5)

    async def update(early: bool) -> dict[str, float]:
        group = ModelGroup(spec(tiny_llama, policies))
        with torch.no_grad():  # the reference is another model, so that the penalty is none of 0
            for parameter in group.hosted["team"].parameters.model.parameters():
                parameter.mul_(1.05)
        group.hosted["team"].publish()
        ids = await play(group)
        values = group.values("team", ids, algorithm.needs, "team-critic")
        if early:
            learner = group.hosted["team"].learning()
            await asyncio.gather(values, group.prepare("team", ids))
            learner.reference = replace_with_silence(learner.reference)
        else:
            await values
        found = await group.update("team", algorithm, [Signal(id, None, tail=1.0) for id in ids], halves(ids))
        return {name: value for name, value in found.items() if "time" not in name}

    async def both() -> None:
        early, late = await update(True), await update(False)
        assert early["kl"] > 1e-4
        assert early == pytest.approx(late, rel=1e-5, abs=1e-7)

    asyncio.run(both())


def replace_with_silence(reference: Any) -> Any:
    """A reference that is there and must not be asked."""

    class Silent:
        def logprobs(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the reference was measured a second time")

    assert reference is not None
    return Silent()


def test_a_critic_in_another_group_sees_the_same(tiny_llama: str) -> None:
    """Samples cross as records, values come back: the summaries are those of a critic in the same group."""

    async def run() -> None:
        needs = make_algorithm("ppo").needs
        both = {"team": PolicySpec(learning=LEARNING), "judge": PolicySpec(learning=LEARNING, critic=True)}
        together = ModelGroup(spec(tiny_llama, both))
        actor = ModelGroup(spec(tiny_llama, {"team": both["team"]}))
        critic = ModelGroup(spec(tiny_llama, {"judge": both["judge"]}))
        for group in (together, critic):
            head = group.hosted["judge"].parameters.head
            assert head is not None
            torch.nn.init.constant_(head.weight, 0.1)
        ids = await play(together)
        assert ids == await play(actor)
        expected = await together.values("team", ids, needs, "judge")
        await actor.send(ids, critic.peer)
        await critic.values("team", ids, needs, "judge")
        await critic.send(ids, actor.peer, True)
        assert await actor.values("team", ids, needs) == expected
        context = {id: "w1 w2 w3" for id in ids}
        assert await together.values("team", ids, needs, "judge", context) != expected

    asyncio.run(run())


def test_cancelling(tiny_llama: str) -> None:
    """A call can be called off from either side, and leaves no sample."""

    async def run() -> None:
        long = PolicySpec(learning=LEARNING, sampling=Sampling(max_tokens=100))
        group = ModelGroup(spec(tiny_llama, {"team": long}))
        first, second, third = (
            asyncio.ensure_future(group.generate("team", call(e, "0"))) for e in ("e1", "e2", "e3")
        )
        engine = group.hosted["team"].engine
        while len(engine.waiting) + len(engine.running) < 3:  # all have begun
            await asyncio.sleep(0)
        assert await group.cancel("e1", "0") == 1
        with pytest.raises(CallCancelled, match="e1/0"):
            await first
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await third
        assert [sample.id for sample in group.store] == ["e3/0"]
        assert engine.counts["finish_cancelled"] == 2 and not engine.busy

    asyncio.run(run())


def test_a_reply_that_comes_after_its_step_is_counted_and_forgotten(tiny_llama: str) -> None:
    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, {"team": PolicySpec(learning=LEARNING)}))
        late = asyncio.ensure_future(group.generate("team", call("e1", "0")))
        while not group._running:
            await asyncio.sleep(0)
        await group.retire(["e1"])
        assert "sample" not in (await late).meta
        counts = await group.retire(["e2"])
        assert counts["discarded/late"] == 1 and not group.store._closed

    asyncio.run(run())


def test_new_calls_wait_while_the_group_learns(tiny_llama: str) -> None:
    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, {"team": PolicySpec(learning=LEARNING)}))
        await group.phase("learn")
        waiting = asyncio.ensure_future(group.generate("team", call("e1", "0")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await group.phase("collect")
        assert (await waiting).meta["tokens_out"] > 0

    asyncio.run(run())


def test_a_checkpoint_goes_on_bit_for_bit(tiny_llama: str, tmp_path: Path) -> None:
    """Save, go on; load elsewhere, go on the same way: the same weights, optimizer, versions and counters."""
    policies = {
        "team": PolicySpec(learning=LEARNING),
        "judge": PolicySpec(learning=LEARNING, critic=True),
        "lora": PolicySpec(learning=LEARNING, adapter=Adapter()),
    }
    ppo = make_algorithm("ppo")

    async def step(group: ModelGroup, number: int) -> None:
        for policy in ("team", "lora"):
            calls = [call(f"s{number}{policy}{e}", "0") for e in range(6)]
            await asyncio.gather(*(group.generate(policy, c) for c in calls))
            ids = [id for c in calls for id in await group.seal(c.episode, ["0"])]
            await group.values(policy, ids, ppo.needs, "judge")
            await group.update(policy, ppo, signals(ids), halves(ids))
            await group.update("judge", ppo, [Signal(id, None, tail=1.0) for id in ids], halves(ids))
        await group.publish()
        await group.retire([f"s{number}{policy}{e}" for policy in ("team", "lora") for e in range(6)])

    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, policies, deterministic=True, threads=1))
        await step(group, 1)
        await group.generate("team", call("open", "0"))
        await group.save(tmp_path / "c1")
        await step(group, 2)
        again = ModelGroup(spec(tiny_llama, policies, deterministic=True, threads=1))
        await again.load(tmp_path / "c1")
        assert again.store.get("open/0").state == "open"
        await step(again, 2)
        for name, hosted in group.hosted.items():
            other = again.hosted[name]
            assert hosted.version == other.version and hosted.learning().steps == other.learning().steps
            theirs = other.parameters.state_dict()
            assert all(torch.equal(t, theirs[k]) for k, t in hosted.parameters.state_dict().items())
            mine, yours = (h.learning().optimiser.state_dict()["state"] for h in (hosted, other))
            assert all(torch.equal(mine[i]["exp_avg_sq"], yours[i]["exp_avg_sq"]) for i in mine)
        assert group.store.summary() == again.store.summary()
        stranger = ModelGroup(spec(tiny_llama, {"other": PolicySpec()}))
        with pytest.raises(ValueError, match="holds policies"):
            await stranger.load(tmp_path / "c1")
        with pytest.raises(CheckpointError):
            await group.load(tmp_path)

    asyncio.run(run())


def test_an_adapter_speaks_as_it_has_learned_when_it_is_published_and_not_before(tiny_llama: str) -> None:
    policies = {name: PolicySpec(learning=LEARNING, adapter=Adapter(rank=4)) for name in ("a", "b")}

    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, policies))

        async def say(policy: str) -> Any:
            return await group.generate(policy, call("p", "0"), temperature=0.0, keep=False)

        first = {name: await say(name) for name in policies}
        for name in policies:
            ids = await play(group, name)
            for _ in range(3):
                await group.update(name, make_algorithm("grpo"), signals(ids), [ids])
        await group.publish("a")
        now = {name: await say(name) for name in policies}
        assert now["a"].text != first["a"].text and now["a"].meta["version"] == 1
        assert now["b"].text == first["b"].text and now["b"].meta["version"] == 0
        await group.publish()
        last = await say("b")
        assert last.text != first["b"].text and last.meta["version"] == 1

    asyncio.run(run())


def test_export_and_adopt(tiny_llama: str, tmp_path: Path) -> None:
    """An exported policy is a model directory; an adapter is merged; another policy can take it over."""
    policies = {
        "lora": PolicySpec(learning=LEARNING, adapter=Adapter()),
        "full": PolicySpec(learning=LEARNING),
    }

    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, policies))
        ids = await play(group, "lora")
        for _ in range(3):
            await group.update("lora", make_algorithm("grpo"), signals(ids), [ids])
        await group.publish()
        await group.export("lora", tmp_path / "hf")
        assert (tmp_path / "hf" / "adapter" / "adapter_config.json").is_file()
        assert load_model(tmp_path / "hf").shape == load_model(tiny_llama).shape
        before = await group.generate("full", call("p", "0"), temperature=0.0, keep=False)
        expected = await group.generate("lora", call("p", "0"), temperature=0.0, keep=False)
        await group.adopt("full", tmp_path / "hf")
        assert (await group.publish())["full"] == 1
        after = await group.generate("full", call("p", "0"), temperature=0.0, keep=False)
        assert after.text == expected.text != before.text

    asyncio.run(run())


def test_mistakes_are_named(tiny_llama: str, tmp_path: Path) -> None:
    async def run() -> None:
        group = ModelGroup(spec(tiny_llama, {"team": PolicySpec(learning=LEARNING)}, folder=str(tmp_path)))
        with pytest.raises(KeyError, match="did you mean 'team'"):
            await group.generate("taem", call("e1", "0"))
        ids = await play(group)
        with pytest.raises(UpdateError, match="failed-updates"):
            await group.update(
                "team", make_algorithm("grpo"), [Signal(id, float("inf")) for id in ids], [ids]
            )
        await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
        with pytest.raises(ValueError, match="not published"):
            await group.save(tmp_path / "c")

    asyncio.run(run())
    with pytest.raises(
        FileNotFoundError, match=r"groups\.main\.model: no model at .*: there is no such folder"
    ):
        ModelGroup(spec(str(tmp_path / "nowhere"), {"team": PolicySpec()}))
    with pytest.raises(ValueError, match="no policies"):
        ModelGroup(spec(tiny_llama, {}))
    with pytest.raises(ValueError, match=r"groups\.main\.device: 'cuba' is no device"):
        ModelGroup(spec(tiny_llama, {"team": PolicySpec()}, device="cuba"))
    with pytest.raises(ValueError, match=r"groups\.main\.device: 'cuda:99' is not there: torch sees"):
        ModelGroup(spec(tiny_llama, {"team": PolicySpec()}, device="cuda:99"))
    with pytest.raises(ValueError, match="adapter"):
        PolicySpec(adapter=Adapter(), init="somewhere")


def test_heavy_work_has_the_groups_number_of_threads(tiny_llama: str) -> None:
    """Also where the pool's threads were used before with another number: sums would have another order."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        everyone = threading.Barrier(os.cpu_count() or 1)
        waiting = [
            HEAVY.submit(lambda: (torch.get_num_threads(), everyone.wait(60)))
            for _ in range(everyone.parties)
        ]
        for done in waiting:
            done.result()
        group = ModelGroup(
            GroupSpec(name="main", model=tiny_llama, policies={"team": PolicySpec()}, slots=2, threads=1)
        )
        assert asyncio.run(group._thread(torch.get_num_threads)) == 1
    finally:
        torch.set_num_threads(before)
