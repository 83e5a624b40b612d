"""Transfers of weights to vLLM that fail half way, or lack a weight. Needs vLLM, as test_vllm.py does.

VLLM_CPU_KVCACHE_SPACE=1 pytest -m vllm tests/agents/test_vllm_transfers.py
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from unitymas.agents import model_path
from unitymas.agents.basics.failures import Outage
from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.engines.vllm import vllm_engine
from unitymas.agents.engines.vllm.vllm_engine import VLLMEngine
from unitymas.agents.model.attention import pack
from unitymas.agents.model.weights import load_model, load_tokenizer, save_model, to_hf

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TRANSFER = "unitymas.agents.engines.vllm.weight_transfer"
ODD = "model.layers.0.mlp.odd_proj.weight"  # vLLM has no such weight
PART = "model.layers.1.self_attn.k_proj.weight"  # a part of vLLM's qkv_proj


@pytest.fixture(scope="module")
def model():
    return load_model(model_path("tiny"))


@pytest.fixture(scope="module")
def moved():
    """The model after something like an update."""
    moved = load_model(model_path("tiny"))
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    return moved


@pytest.fixture(scope="module")
def engine():
    made = VLLMEngine(
        str(model_path("tiny")), context=128, dtype="float32", enforce_eager=True, max_num_seqs=4,
        adapters={"solver": 4},
    )  # fmt: skip
    yield made
    made.close()


def ask(engine):
    ids = load_tokenizer(model_path("tiny")).encode("Where was Bruno Eaton born?")
    params = SamplingParams(temperature=0, max_tokens=6)

    async def go():
        return await asyncio.wait_for(engine.agenerate(ids, params), 60)

    return asyncio.run(go())


def speaks_with(engine, model):
    """Tell whether log-probs are those of a full forward pass of the model."""
    reply = ask(engine)
    hidden = model.forward_packed(pack([reply.prompt_ids + reply.ids], share=None))
    scores = (hidden[len(reply.prompt_ids) - 1 : -1] @ model.head.T).log_softmax(-1)
    told = scores.gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
    return torch.allclose(told, torch.tensor(reply.logprobs), atol=1e-3)


def sent_as(monkeypatch, change):
    """Let weights be changed on their way, by name."""

    def changed(model):
        return iter(change(dict(to_hf(model))).items())

    def saved(model, folder, **how):
        save_model(model, folder, **how)
        (file,) = Path(folder).glob("*.safetensors")
        save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)

    monkeypatch.setattr(f"{TRANSFER}.to_hf", changed)
    monkeypatch.setattr(vllm_engine, "save_model", saved)


def odd_in_the_middle(weights):
    names = sorted([*weights, ODD])
    return {name: weights.get(name, torch.zeros(4, 4)) for name in names}


class LostSender:
    """A sender for GPUs that loses the connection after it has begun."""

    def __init__(self, kind, model, client, dtype, workers):
        self.client = client

    def send(self, model, version):
        self.client.start_weight_update()
        raise RuntimeError("the connection broke")


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("way", ["shared", "files", "ipc", "nccl"])
def test_an_engine_with_mixed_weights_answers_nothing(engine, model, moved, monkeypatch, way, asleep):
    """Every request is refused, until a whole model has come."""
    engine.publish(model, 1)
    monkeypatch.setattr(engine, "transfer", way)
    engine._sender = None
    if way in ("shared", "files"):
        sent_as(monkeypatch, odd_in_the_middle)
    else:
        monkeypatch.setattr(f"{TRANSFER}.Sender", LostSender)
    if asleep:
        engine.sleep()
    with pytest.raises(Exception, match="odd_proj|connection broke"):
        engine.publish(moved, 2)
    assert engine.version == 1
    for _ in range(2):
        with pytest.raises(
            Outage, match=r"version 2 failed half way \(.*\).* Publish a whole model"
        ) as error:
            ask(engine)
    assert "\n" not in str(error.value)
    with pytest.raises(Exception, match="odd_proj|connection broke"):
        engine.publish(moved, 3)  # the cause is still there
    monkeypatch.undo()
    engine.publish(moved, 4)
    assert speaks_with(engine, moved) and not speaks_with(engine, model) and engine.version == 4


@pytest.mark.parametrize("way", ["shared", "files"])
def test_what_came_of_a_failed_transfer_is_no_part_of_the_next_one(engine, model, moved, monkeypatch, way):
    """A matrix of a wrong shape is kept by vLLM until its layer is whole, and would fail again with the next transfer."""
    engine.publish(model, 5)
    monkeypatch.setattr(engine, "transfer", way)
    engine._sender = None
    sent_as(monkeypatch, lambda weights: {**weights, PART: weights[PART][:, :-1].contiguous()})
    with pytest.raises(Exception, match="vLLM|Worker|shape|size"):
        engine.publish(moved, 6)
    with pytest.raises(Outage, match="version 6 failed half way"):
        ask(engine)
    monkeypatch.undo()
    engine.publish(moved, 7)
    assert speaks_with(engine, moved)


def test_an_error_before_the_workers_load_leaves_the_old_weights(engine, model, moved, monkeypatch):
    engine.publish(model, 10)
    monkeypatch.setattr(engine, "transfer", "files")
    monkeypatch.setattr(
        vllm_engine, "save_model", lambda *_, **__: (_ for _ in ()).throw(OSError("disk is full"))
    )
    with pytest.raises(OSError, match="disk is full"):
        engine.publish(moved, 11)
    assert speaks_with(engine, model) and engine.version == 10


def test_a_cache_that_cannot_be_reset_stops_the_engine_too(engine, model, moved, monkeypatch):
    """Keys and values of the old weights would be read beside the new weights."""

    async def refused(**_):
        return False

    monkeypatch.setattr(engine.llm, "reset_prefix_cache", refused)
    with pytest.raises(RuntimeError, match="kept prefixes of the old weights"):
        engine.publish(moved, 20)
    with pytest.raises(Outage, match="kept prefixes of the old weights"):
        ask(engine)
    monkeypatch.undo()
    engine.publish(model, 21)
    assert speaks_with(engine, model)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", PART])
@pytest.mark.parametrize("way", ["shared", "files"])
def test_a_weight_that_does_not_come_is_an_error(engine, model, moved, monkeypatch, way, name):
    """Half a model is never put in the place of a whole one in silence."""
    monkeypatch.setattr(engine, "transfer", way)
    engine._sender = None
    sent_as(monkeypatch, lambda weights: {key: weights[key] for key in weights if key != name})
    with pytest.raises(Exception, match=rf"1 weights of vLLM's model did not come, among them {name}"):
        engine.publish(moved, 30)
    with pytest.raises(Outage, match="did not come"):
        ask(engine)
    monkeypatch.undo()
    engine.publish(model, 31)
    assert speaks_with(engine, model)


class Part(torch.nn.Module):
    """A model as vLLM's workers see it."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(2, 2), "out": torch.nn.Linear(2, 2)})

    def load_weights(self, weights):
        fused = [
            name.replace(part, "qkv_proj")
            for name, _ in weights
            for part in [name.split(".")[1]]
            if "_proj" in part
        ]
        return {*fused, "layer.out.weight", "layer.out.bias"} if fused else set()


@pytest.mark.parametrize("kind", ["shared", "ipc", "nccl"])
@pytest.mark.parametrize("lost", ["", "layer.k_proj.weight", "layer.v_proj.bias", "layer.out"])
def test_each_kind_of_transfer_counts_the_weights_in_its_worker(kind, lost, monkeypatch):
    """vLLM's receivers for GPUs load in several calls, and look at no result. Theirs is replaced by two such calls."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from unitymas.agents.engines.vllm import arrivals
    from unitymas.agents.engines.vllm.vllm_setup import engine_arguments

    name = engine_arguments(kind, {"model": str(model_path("tiny"))}).weight_transfer_config.backend
    finished = []
    base = WeightTransferEngineFactory._registry[name]().__mro__[2]
    parts = [f"layer.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    weights = [(part, torch.zeros(2)) for part in parts if part != lost]

    def receive(self, info):
        self.model.load_weights(weights[:2])
        self.model.load_weights(iter(weights[2:]))

    monkeypatch.setattr(base, "start_weight_update", lambda self: None)
    monkeypatch.setattr(base, "receive_weights", receive)
    monkeypatch.setattr(base, "finish_weight_update", lambda self: finished.append(self))
    monkeypatch.setattr(arrivals, "pack_head", lambda model: None)
    model = Part()
    if lost == "layer.out":
        monkeypatch.setattr(
            Part,
            "load_weights",
            lambda self, it: {f"layer.qkv_proj.{k}" for k in ("weight", "bias") for _ in it},
        )
    config = SimpleNamespace(
        lora_config=None, parallel_config=None, model_config=SimpleNamespace(quantization=None)
    )
    worker = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=name), config, torch.device("cpu"), model
    )
    worker.start_weight_update()
    worker.receive_weights(None)
    if lost:
        with pytest.raises(RuntimeError, match=rf"did not come, among them {lost}"):
            worker.finish_weight_update()
    else:
        worker.finish_weight_update()
    assert len(finished) == (not lost) and "load_weights" not in vars(model)
