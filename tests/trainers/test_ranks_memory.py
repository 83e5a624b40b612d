"""Groups of many ranks with little memory: 8-bit moments, bfloat16 parameters, offload, and export tensor by tensor."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from unitymas.agents.model.attention import pack
from unitymas.agents.model.vocabulary_split import VocabularyRanks
from unitymas.agents.model.weights import from_config, load_model, load_tokenizer, save_model
from unitymas.agents.policies import Call
from unitymas.benchmarks.speed.models.memory import config_of, counted
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import GroupSpec, Learning, PolicySpec, Sampling
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.model_group import ModelGroup
from unitymas.trainers.group.ranks.fsdp import cut
from unitymas.trainers.group.ranks.group import RankedGroup
from unitymas.trainers.group.runtime import start_groups, stop_groups

LEAN = {"moments": "8bit", "parameters": "bfloat16", "precision": "bfloat16"}


def spec(model: str, ranks: int, **learning: Any) -> GroupSpec:
    own = Learning(lr=1e-3, micro_tokens=60, **learning)
    policies = {"team": PolicySpec(learning=own, sampling=Sampling(max_tokens=6))}
    how: dict[str, Any] = {"slots": 8, "threads": 1, "deterministic": True, "ranks": ranks}
    return GroupSpec(name="main", model=model, policies=policies, **how)


async def step(group: Any, number: int) -> dict[str, float]:
    """Play, update twice, publish. The prompts decide the replies' seeds, so a group in another state says other things."""
    episodes = [f"{number}-{i}" for i in range(5)]

    def call(episode: str, i: int) -> Call:
        text = " ".join(f"w{(7 * i + k) % 50}" for k in range(5 + i))
        message = {"role": "user", "content": text}
        return Call(agent="a", role="r", messages=(message,), episode=episode, node="0", seed=i)

    await asyncio.gather(*(group.generate("team", call(e, i)) for i, e in enumerate(episodes)))
    ids = [id for e in episodes for id in await group.seal(e, ["0"])]
    signals = [Signal(id, float(i % 3 - 1)) for i, id in enumerate(ids)]
    metrics = await group.update("team", make_algorithm("grpo"), signals, [ids[:3], ids[3:]])
    await group.publish()
    await group.retire(episodes)
    return {name: metrics[name] for name in ("loss", "grad_norm", "entropy")}


async def weights(group: Any, folder: Path) -> torch.Tensor:
    await group.export("team", folder)
    tensors = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_what_half_a_billion_parameters_need_divides_by_the_ranks() -> None:
    """Parameters, gradients and optimizer of 1, 2 and 4 ranks, counted from shards of a model without weights."""
    one, two, four = (counted(config_of("0.5B"), ranks, Learning()) for ranks in (1, 2, 4))
    whole = one[0]
    assert whole["parameters"] == 4 * 494_032_768 and whole["gradients"] == whole["parameters"]
    assert whole["optimizer"] == pytest.approx(
        2 * whole["parameters"], rel=1e-6
    )  # and a count for each tensor
    for kind, size in whole.items():
        for ranks in (two, four):
            assert sum(rank[kind] for rank in ranks) == pytest.approx(size, rel=1e-6)
            assert max(rank[kind] for rank in ranks) == pytest.approx(size / len(ranks), rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_no_rank_gathers_the_vocabulary(tied: bool) -> None:
    """While a pass runs, the parameters of layers are whole; of embedding and head each rank has its rows."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)  # sends nothing
    try:
        model: Any = from_config(config)
        cut(model, init_device_mesh("cpu", (2,)), None, False)
        model.unshard()
        assert type(model.norm.weight.data) is torch.Tensor and model.vocabulary == VocabularyRanks(2, 1, 49)
        for matrix in (model.embed, model.head):
            assert isinstance(matrix, DTensor) and matrix.to_local().shape == (48, 32)
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(600)
def test_ranks_with_little_memory_learn_what_one_process_learns(tiny_llama: str, tmp_path: Path) -> None:
    async def run() -> None:
        one: Any = ModelGroup(spec(tiny_llama, 1, **LEAN))
        start = await weights(one, tmp_path / "start")
        many = await start_groups({"two": spec(tiny_llama, 2, **LEAN)})
        two = many["two"]
        try:
            loading = two.ranks.call("watch", "team")  # type: ignore[attr-defined]
            alone, both = await step(one, 0), await step(two, 0)
            peaks = two.ranks.call("watched")  # type: ignore[attr-defined]
            assert all(rank["began"] <= rank["loaded"] <= rank["load"] for rank in loading)
            assert all(0 < rank["after"] <= max(rank["backward"], rank["step"]) for rank in peaks)
            assert alone["loss"] == pytest.approx(both["loss"], abs=1e-2)
            learned = await weights(one, tmp_path / "one")
            assert learned.dtype == torch.bfloat16
            moved = distance(learned, start)
            assert distance(await weights(two, tmp_path / "two"), learned) < 0.15 * moved
            ranks = (await two.report())["ranks"]
            held = ranks[0]
            shape = load_model(tiny_llama).hf_config
            own = Learning(**LEAN)
            for rank, without_weights in zip(ranks, counted(shape, 2, own), strict=True):
                for kind in ("parameters", "optimizer"):
                    assert rank[kind] == without_weights[kind]
            numbers = held["parameters"] // 2
            assert (
                held["optimizer"] < 6 * numbers
            )  # float32: 8; tiny tensors keep float32, the larger ones have bytes
            await one.save(tmp_path / "of-one")
            await two.load(tmp_path / "of-one")
            await two.save(tmp_path / "of-two")
            undisturbed = await step(two, 1), await weights(two, tmp_path / "end")
            await two.load(tmp_path / "of-two")
            assert await step(two, 1) == undisturbed[0]
            assert torch.equal(await weights(two, tmp_path / "again"), undisturbed[1])
            before = copy.deepcopy(one.hosted["team"].learner.state_dict()["optimiser"]["state"])
            assert {t.dtype for state in before.values() for t in state.values()} >= {torch.uint8}
            await step(one, 1)
            await one.load(tmp_path / "of-two")  # codes and scales went through both, and came back
            after = one.hosted["team"].learner.state_dict()["optimiser"]["state"]
            assert torch.equal(await weights(one, tmp_path / "back"), learned)
            assert all(torch.equal(after[i][n], before[i][n]) for i in before for n in before[i])
        finally:
            await stop_groups(many)

    asyncio.run(run())


@pytest.mark.timeout(600)
def test_offload_changes_no_bit(tiny_llama: str, tmp_path: Path) -> None:
    async def run() -> None:
        here: Any = ModelGroup(spec(tiny_llama, 1))
        groups = await start_groups({"main": spec(tiny_llama, 1, offload=True)})
        there = groups["main"]
        assert isinstance(there, RankedGroup)  # FSDP's offload, over one rank
        try:
            for number in range(2):
                assert await step(here, number) == await step(there, number)
            assert torch.equal(
                await weights(here, tmp_path / "here"), await weights(there, tmp_path / "there")
            )
        finally:
            await stop_groups(groups)

    asyncio.run(run())


@pytest.fixture(scope="module")
def larger_llama(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of 23 million parameters: 93 MB in float32."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=2048, num_hidden_layers=13, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("larger-llama")
    return str(save_model(from_config(config), folder, load_tokenizer(tiny_llama)))


@pytest.mark.timeout(600)
def test_an_export_is_written_tensor_by_tensor(larger_llama: str, tmp_path: Path) -> None:
    """Transformers loads the files; no rank, and not the group's process, ever held the whole model for them."""

    async def run() -> None:
        groups = await start_groups({"main": spec(larger_llama, 2)})
        group: Any = groups["main"]
        try:
            await group.export("team", tmp_path / "first")  # what is allocated once is there
            group.largest_file = 30_000_000
            group.ranks.call("memory")  # the mark falls to what is held now
            held = [rank["peak"] for rank in group.ranks.call("memory")]
            await group.export("team", tmp_path / "model")
            peaks = [rank["peak"] for rank in group.ranks.call("memory")]
        finally:
            await stop_groups(groups)
        assert max(peak - before for peak, before in zip(peaks, held, strict=True)) < 40_000_000  # of 93 MB

    asyncio.run(run())
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert all(file.stat().st_size < 30_100_000 for file in (tmp_path / "model").iterdir())
    assert [f.name for f in (tmp_path / "first").glob("*.safetensors")] == ["model.safetensors"]
    ids = list(range(3, 20))
    ours = load_model(larger_llama)
    want = ours.logits(ours.forward_packed(pack([ids])))
    for folder in ("model", "first"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        got = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
