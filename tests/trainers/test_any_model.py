"""A model group on any architecture: it speaks, learns, saves and exports as one on our own decoder does."""

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from unitymas.agents.llm import load_model_policy, load_policy
from unitymas.agents.model.auto import AutoDecoder
from unitymas.agents.model.shape import UnsupportedArchitecture
from unitymas.agents.model.weights import count_parameters, load_decoder, precisions
from unitymas.agents.policies import Call
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.algorithms.algorithm import Needs
from unitymas.trainers.config.group_settings import Adapter, GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group import persistence, shared_device
from unitymas.trainers.group.learning.update import Learner
from unitymas.trainers.group.model_group import ModelGroup

from ..any_models import folder

pytestmark = pytest.mark.filterwarnings("ignore")
LEARNING = Learning(lr=1e-2, micro_tokens=64)


def spec(model: str, policies: dict[str, PolicySpec], **options: Any) -> GroupSpec:
    return GroupSpec(name="main", model=model, policies=policies, slots=8, **options)


def policy(**options: Any) -> PolicySpec:
    return PolicySpec(**{"learning": LEARNING, "sampling": Sampling(max_tokens=6), **options})


def call(episode: str, node: str = "0", role: str = "solver", **options: Any) -> Call:
    words = " ".join(f"w{(7 * len(episode) + i) % 50}" for i in range(12 + sum(map(ord, episode + node)) % 5))
    return Call(
        agent="a", role=role, messages=({"role": "user", "content": words},), episode=episode, node=node,
        seed=sum(map(ord, episode + node)), **options,
    )  # fmt: skip


async def play(group: ModelGroup, name: str = "team", run: str = "e", **options: Any) -> list[str]:
    nodes = ("0", "1")
    await asyncio.gather(
        *(group.generate(name, call(f"{name}{run}{e}", node, **options)) for e in range(4) for node in nodes)
    )
    return [id for e in range(4) for id in await group.seal(f"{name}{run}{e}", nodes)]


async def greedy(group: ModelGroup, name: str) -> str:
    return (await group.generate(name, call("probe"), temperature=0.0, keep=False)).text


def signals(ids: list[str]) -> list[Signal]:
    return [Signal(id, (-1.0) ** i * (1 + i % 3)) for i, id in enumerate(ids)]


KINDS = ["gemma3_text", "opt", "qwen3_moe", "phi3", "olmo2", "granite", "gpt_oss", "gpt2", "jamba", "rwkv"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_a_critic(kind: str, tmp_path: Path) -> None:
    """The ratio is 1 at zero staleness; an update changes the reply; a checkpoint, and an export, give it again."""
    path = folder(kind, tmp_path / "model")
    policies = {
        "team": policy(reference=True),
        "judge": policy(critic=True),
        "cold": policy(sampling=Sampling(max_tokens=6, temperature=0.7, top_k=5)),
    }

    async def run() -> None:
        group = ModelGroup(spec(path, policies))
        before = await greedy(group, "team")
        ids = await play(group)
        needs = Needs(values=True, reference=True)
        assert len(await group.values("team", ids, needs, "judge")) == len(ids)
        metrics = await group.update("team", make_algorithm("grpo", kl_loss=0.1), signals(ids), [ids])
        assert metrics["max_mismatch"] < 1e-4
        judged = [Signal(id, 1.0, target=1.0) for id in ids]
        assert (await group.update("judge", make_algorithm("ppo"), judged, [ids]))["grad_norm"] > 0
        cold = await play(group, "cold", choices=("w1 w2", "w1 w3 w4", "w9"))
        metrics = await group.update("cold", make_algorithm("grpo"), signals(cold), [cold])
        assert metrics["max_mismatch"] < 1e-4
        for _ in range(4):
            await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
        await group.publish()
        after = await greedy(group, "team")
        assert after != before
        await group.save(tmp_path / "saved")
        await group.export("team", tmp_path / "exported")
        again = ModelGroup(spec(path, policies))
        assert await greedy(again, "team") == before
        assert await again.load(tmp_path / "saved") == {"team": 1, "judge": 1, "cold": 1}
        assert await greedy(again, "team") == after
        ids = await play(again, run="again")
        metrics = await again.update("team", make_algorithm("grpo"), signals(ids), [ids])
        assert metrics["max_mismatch"] < 1e-4
        exported = load_model_policy(tmp_path / "exported", max_tokens=6, temperature=0.0)
        assert isinstance(exported.engine.model, AutoDecoder)
        assert (await exported.act(call("probe"))).text == after

    asyncio.run(run())


def bits(group: ModelGroup) -> dict[str, dict[str, torch.Tensor]]:
    return {name: hosted.parameters.state_dict() for name, hosted in group.hosted.items()}


@pytest.mark.parametrize("kind", ["gemma3_text", "jamba"])
def test_adapters_on_one_base_learn_apart(kind: str, tmp_path: Path) -> None:
    """LoRAs of two ranks and of some matrices, a prefix, a full copy and a frozen one: an update moves one alone."""
    path = folder(kind, tmp_path / "model")
    policies = {
        "small": policy(adapter=Adapter(rank=2)),
        "large": policy(adapter=Adapter(rank=8, targets=("q_proj", "v_proj"))),
        "full": policy(),
        "frozen": policy(learning=None),
    }
    if kind != "jamba":
        policies["prefix"] = policy(adapter=Adapter(tokens=4))

    async def run() -> None:
        group = ModelGroup(spec(path, policies))
        base = {
            n: p.detach().clone() for n, p in group.hosted["small"].parameters.model.learnable(None).items()
        }
        for name in set(policies) - {"frozen"}:
            before = bits(group)
            ids = await play(group, name)
            metrics = await group.update(name, make_algorithm("grpo"), signals(ids), [ids])
            assert metrics["max_mismatch"] < 1e-4
            for other, state in bits(group).items():
                same = all(torch.equal(tensor, before[other][key]) for key, tensor in state.items())
                assert same == (other != name)
        await group.publish()
        again = {name: await play(group, name, "again") for name in set(policies) - {"frozen"}}
        both = await asyncio.gather(  # side by side, on one base
            *(group.update(n, make_algorithm("grpo"), signals(ids), [ids]) for n, ids in again.items())
        )
        assert all(metrics["max_mismatch"] < 1e-4 for metrics in both)
        await group.publish()
        for key, tensor in group.hosted["small"].parameters.model.learnable(None).items():
            assert torch.equal(tensor, base[key])
        await group.save(tmp_path / "saved")
        other = ModelGroup(spec(path, policies))
        await other.load(tmp_path / "saved")
        for name in policies:
            reply = await greedy(group, name)
            assert await greedy(other, name) == reply
            await group.export(name, tmp_path / name)
            exported = load_model_policy(tmp_path / name, max_tokens=6, temperature=0.0)
            assert (await exported.act(call("probe"))).text == reply, name

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["tiny", "granite"])
def test_a_base_learns_from_all_roles_and_an_adapter_from_its_own(kind: str, tmp_path: Path) -> None:
    """On our own decoder and on another: what one role does trains the base and this role's adapter alone."""
    path = "tiny" if kind == "tiny" else folder(kind, tmp_path / "model")
    policies = {"team": policy(adapters={"solver": Adapter(rank=2), "judge": Adapter(rank=4)})}

    async def run() -> None:
        group = ModelGroup(spec(path, policies))
        parameters = group.hosted["team"].parameters

        def moved(before: dict[str, torch.Tensor]) -> set[str]:
            changed = {n for n, t in parameters.state_dict().items() if not torch.equal(t, before[n])}
            return {r for n in changed for r in ("solver", "judge") if f".{r}." in n} | (
                {"base"} if any(".solver." not in n and ".judge." not in n for n in changed) else set()
            )

        for role in ("solver", "judge", "other"):
            before = parameters.state_dict()
            ids = await play(group, "team", role, role=role)
            metrics = await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
            assert metrics["max_mismatch"] < 1e-4
            assert moved(before) == {"base"} | ({role} - {"other"})
            await group.publish()
        ids = [id for role in ("solver", "judge") for id in await play(group, "team", f"{role}2", role=role)]
        metrics = await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
        assert metrics["max_mismatch"] < 1e-4  # roles side by side, in one mini-batch
        await group.publish()
        await group.save(tmp_path / "saved")
        other = ModelGroup(spec(path, policies))
        await other.load(tmp_path / "saved")
        await group.export("team", tmp_path / "policies" / "team")
        (tmp_path / "config.yaml").write_text("map: {'*': team}")
        exported = load_policy(f"run:{tmp_path}", max_tokens=6, temperature=0.0)
        for role in ("solver", "judge", "other"):
            asked = call("probe", role=role)
            texts = {
                (await g.generate("team", asked, temperature=0.0, keep=False)).text for g in (group, other)
            }
            assert texts == {(await exported.act(asked)).text}

    asyncio.run(run())


def test_a_group_that_cannot_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the group, what it needs and what helps; with an adapter the same model fits."""
    path = folder("phi3", tmp_path / "model")
    size = 4 * count_parameters(tmp_path / "model")
    assert size == 4 * sum(p.numel() for p in load_decoder(path).parameters())
    monkeypatch.setattr("unitymas.trainers.group.hosting.available", lambda device: 3 * size)
    with pytest.raises(MemoryError, match=r"groups\.main: .* need .* GiB .*policies\.\*\.adapter"):
        ModelGroup(spec(path, {"team": policy()}))
    ModelGroup(spec(path, {"team": policy(adapter=Adapter(rank=2))}))


def test_a_bfloat16_base_of_adapters_is_held_once_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners, reference, critic and engine share it. Replies, metrics and exports are those of a float32 base and a copy."""
    path = folder("qwen3", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    learning = replace(LEARNING, precision="bfloat16")
    policies = {
        "one": policy(adapter=Adapter(rank=2), reference=True, learning=learning),
        "two": policy(adapter=Adapter(rank=3), learning=learning),
        "judge": policy(adapter=Adapter(rank=2), critic=True, learning=learning),
    }

    async def run(where: Path) -> tuple[object, ...]:
        group = ModelGroup(spec(path, policies, precision="bfloat16"))
        base, engine = (model.layers[0].qkv.weight for model in (group.hosted["one"].parameters.model, group.hosted["two"].engine.model))  # fmt: skip
        ids = await play(group, "one")
        values = await group.values("one", ids, Needs(values=True, reference=True), "judge")
        told = await group.update("one", make_algorithm("grpo", kl_loss=0.1), signals(ids), [ids])
        judged = [Signal(id, 1.0, target=1.0) for id in ids]
        critic = await group.update("judge", make_algorithm("ppo"), judged, [ids])
        await group.publish()
        reply = await greedy(group, "one")
        await group.export("one", where)
        figures = [{k: v for k, v in m.items() if not k.startswith("time/")} for m in (told, critic)]
        alone = base.dtype == torch.bfloat16 and base.data_ptr() == engine.data_ptr()
        return alone, (values, figures, reply, bits(group), load_file(where / "model.safetensors"))

    shared, mine = asyncio.run(run(tmp_path / "mine"))
    monkeypatch.setattr("unitymas.trainers.group.hosting._halved", lambda spec: False)
    apart, theirs = asyncio.run(run(tmp_path / "theirs"))
    assert shared and not apart
    assert mine[:3] == theirs[:3]
    torch.testing.assert_close(mine[3:], theirs[3:], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "bamba"])
def test_transformers_layers_hold_a_bfloat16_base_of_adapters_once_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies, losses and exports are those of a float32 base, up to rounding. The adapter learns in float32."""
    path = folder(kind, tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    learning = replace(LEARNING, precision="bfloat16")
    policies = {
        "one": policy(adapter=Adapter(rank=2), reference=True, learning=learning),
        "two": policy(adapter=Adapter(rank=3, targets=("q_proj", "v_proj")), learning=learning),
        "judge": policy(adapter=Adapter(rank=2), critic=True, learning=learning),
    }

    async def run(where: Path) -> tuple[bool, list[float], list[str], dict[str, float]]:
        group = ModelGroup(spec(path, policies, precision="bfloat16"))
        models = group.hosted["one"].parameters.model, group.hosted["two"].engine.model  # type: ignore[union-attr]
        alone = all(
            a.dtype == torch.bfloat16 and a.data_ptr() == b.data_ptr()
            for a, b in zip(*(model.learnable(None).values() for model in models), strict=True)
        )
        before = {name: t.clone() for name, t in models[0].learnable(None).items()}
        ids = await play(group, "one")
        values = await group.values("one", ids, Needs(values=True, reference=True), "judge")
        assert len(values) == len(ids)
        metrics = await group.update("one", make_algorithm("grpo", kl_loss=0.1), signals(ids), [ids])
        judged = [Signal(id, 1.0, target=1.0) for id in ids]
        assert (await group.update("judge", make_algorithm("ppo"), judged, [ids]))["grad_norm"] > 0
        await group.publish()
        assert all(p.dtype == torch.float32 for p in group.hosted["one"].parameters.named().values())
        torch.testing.assert_close(dict(models[0].learnable(None)), before, rtol=0, atol=0)
        reply = await greedy(group, "one")
        await group.save(where / "saved")
        again = ModelGroup(spec(path, policies, precision="bfloat16"))
        await again.load(where / "saved")
        assert await greedy(again, "one") == reply
        await group.export("one", where / "out")
        merged = load_file(where / "out" / "model.safetensors")
        return alone, [merged[n].float().norm().item() for n in sorted(merged)], ids, metrics

    alone, mine, _, figures = asyncio.run(run(tmp_path / "mine"))
    monkeypatch.setattr("unitymas.trainers.group.hosting._halved", lambda spec: False)
    apart, theirs, _, others = asyncio.run(run(tmp_path / "theirs"))
    assert alone and not apart
    assert figures["mismatch_kl"] <= 2 * others["mismatch_kl"] + 1e-5
    assert figures["grad_norm"] == pytest.approx(others["grad_norm"], rel=0.1)
    assert mine == pytest.approx(theirs, rel=2e-2)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_an_export_has_the_precision_that_the_model_came_in(
    kind: str, adapter: Adapter | None, tmp_path: Path
) -> None:
    """Half as large as in float32, it is what the engine played: the same replies to the bit (an adapter apart)."""
    path = folder(kind, tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    own = policy(adapter=adapter, learning=replace(LEARNING, precision="bfloat16"))

    async def run(where: Path, **options: Any) -> list[str]:
        group = ModelGroup(spec(path, {"team": own}, precision="bfloat16", **options))
        ids = await play(group)
        await group.update("team", make_algorithm("grpo"), signals(ids), [ids])
        await group.publish()
        await group.export("team", where)
        return [
            (await group.generate("team", call(f"p{i}"), temperature=0.0, keep=False)).text for i in range(3)
        ]

    half, whole = tmp_path / "half", tmp_path / "whole"
    replies = asyncio.run(run(half))
    asyncio.run(run(whole, export="float32"))
    assert (precisions(half), precisions(whole)) == ({"BF16"}, {"F32"})
    assert [json.loads((x / "config.json").read_text())["dtype"] for x in (half, whole)] == [
        "bfloat16",
        "float32",
    ]
    rounded = {name: t.bfloat16() for name, t in load_file(whole / "model.safetensors").items()}
    torch.testing.assert_close(load_file(half / "model.safetensors"), rounded, rtol=0, atol=0)
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    if adapter is None:
        again = load_model_policy(half, dtype="bfloat16", temperature=0, max_tokens=6, device="cpu")
        assert [asyncio.run(again.act(call(f"p{i}"))).text for i in range(3)] == replies


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_export_loses_no_digits_that_played(precision: str, tmp_path: Path) -> None:
    """In float32 stays what came in float32, and what played in float32."""
    path = folder("qwen3", tmp_path / "model")
    if precision == "float32":
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    group = ModelGroup(spec(path, {"team": policy()}, precision=precision))
    asyncio.run(group.export("team", tmp_path / "out"))
    assert precisions(tmp_path / "out") == {"F32"}


@pytest.mark.parametrize("gpu", [True, False])
def test_updates_on_a_gpu_run_one_after_the_other(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of all adapters at once would need as many times the memory. Cores of a processor work side by side."""
    if gpu:
        monkeypatch.setattr(shared_device, "SIDE_BY_SIDE", set())
    inside, most, both = [0], [0], threading.Barrier(2)

    def slow(learner: Learner, *arguments: Any) -> dict[str, float]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2 if gpu else 60)  # for the other update, which comes only if it may
        inside[0] -= 1
        return {}

    monkeypatch.setattr(Learner, "update", slow)
    monkeypatch.setattr(persistence, "HEAVY", ThreadPoolExecutor(2))

    async def run() -> None:
        policies = {name: policy(adapter=Adapter(rank=2)) for name in ("one", "two")}
        group = ModelGroup(spec(folder("qwen3", tmp_path / "model"), policies))
        await asyncio.gather(*(group.update(name, make_algorithm("grpo"), [], [[]]) for name in policies))

    asyncio.run(run())
    assert most[0] == (1 if gpu else 2)


def test_an_unknown_architecture_and_a_missing_template_are_named(tmp_path: Path) -> None:
    """Before anything large is read."""
    path = Path(folder("phi3", tmp_path / "model"))
    for file in (path / "chat_template.jinja", *path.glob("*.safetensors")):
        file.unlink()  # without weights an attempt to read them would be another error
    for load in (lambda: ModelGroup(spec(str(path), {"team": policy()})), lambda: load_model_policy(path)):
        with pytest.raises(ValueError, match="no chat template"):
            load()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "gemma99"}))
    with pytest.raises(UnsupportedArchitecture, match=r"groups\.main\.model: .*no architecture 'gemma99'"):
        ModelGroup(spec(str(path), {"team": policy()}))


@pytest.mark.parametrize("kind", ["", "gemma3_text"])
def test_a_rank_above_the_full_rank_is_refused(kind: str, tiny_llama: str, tmp_path: Path) -> None:
    """Before memory is taken for it."""
    path = folder(kind, tmp_path / "model") if kind else tiny_llama
    with pytest.raises(ValueError, match=r"adapter 'team': rank 10000000 is above \d+, the full rank"):
        ModelGroup(spec(path, {"team": policy(adapter=Adapter(rank=10_000_000))}))
    with pytest.raises(ValueError, match=r"above \d+, the full rank") if kind else contextlib.nullcontext():
        narrow = Adapter(rank=33, targets=("k_proj",)) if kind else Adapter(rank=2)
        ModelGroup(spec(path, {"team": policy(adapter=narrow)}))
