"""The paths of a GPU, as far as a CPU can run them: recorded decode steps, and attention without mask tensors."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.engines.torch.cuda_graphs import DecodeGraphs, fixed_size
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.model import attention
from unitymas.agents.model.attention import LastQueries, pack
from unitymas.agents.model.weights import from_config

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 600, "head_dim": 16, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return from_config(Qwen3Config(**SIZES))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, "fused", lambda device: True)


def test_recorded_steps_say_what_plain_steps_say(model, monkeypatch):
    """Requests of many lengths come and go, the cache grows, weights are published: the sizes of the steps change."""
    rng = random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(rng.choice((3, 40, 300)))] for _ in range(11)]
    other = from_config(Qwen3Config(**SIZES), seed=1)

    def said():
        engine = TorchEngine(model, slots=5, stop_ids=())
        first = engine.generate(prompts, SamplingParams(max_tokens=9))
        engine.publish(other, 1)
        return engine, [*first, *engine.generate(prompts, SamplingParams(max_tokens=4))]

    _, plain = said()
    monkeypatch.setattr(DecodeGraphs, "of", classmethod(lambda cls, model: cls(model)))
    engine, recorded = said()
    assert [r.ids for r in recorded] == [r.ids for r in plain]
    got, want = (torch.tensor([x for r in results for x in r.logprobs]) for results in (recorded, plain))
    assert torch.allclose(got, want, atol=1e-5)
    assert engine.graphs is not None and len(engine.graphs.recorded) > 1


def test_a_step_has_few_sizes_within_the_cache():
    sizes = {fixed_size(rows, width, (6, 600)) for rows in range(1, 7) for width in range(1, 601)}
    assert sizes == {(rows, width) for rows in (1, 2, 4, 6) for width in (256, 512, 600)}
    assert all(fixed_size(n, w, (6, 600)) >= (n, w) for n in range(1, 7) for w in (1, 256, 257, 600))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 9))
def test_attention_without_mask_tensors_is_attention(model, lengths, shared, seed):
    """Sequences with and without a common beginning: hidden states and gradients are those of the plain path."""
    rng = random.Random(seed)
    begin = [rng.randrange(97) for _ in range(shared)]
    packed = pack([begin + [rng.randrange(97) for _ in range(n)] for n in lengths], share=8)

    def states():
        model.zero_grad()
        hidden = model.forward_packed(packed)
        hidden.square().sum().backward()
        return hidden.detach(), model.layers[0].qkv.weight.grad.clone()

    with pytest.MonkeyPatch.context() as patch:
        plain = states()
        patch.setattr(attention, "fused", lambda device: True)
        fused = states()
    for got, want in zip(fused, plain, strict=True):
        assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1_000, 4_000])
def test_a_long_context_has_no_mask_of_its_square(tokens, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(attention.Buckets, "pairs_fused", 1 << 16)
    packed = pack([[1] * tokens, [1] * tokens + [2] * 300, [1] * tokens + [3] * 200], share=8)
    laid = attention.PackedAttention(packed.segments, torch.bfloat16, torch.device("cpu"))
    assert any(isinstance(mask, LastQueries) for mask in laid.buckets.masks)
    held = sum(mask.numel() for mask in laid.buckets.masks if not isinstance(mask, LastQueries))
    assert held <= len(laid.buckets.masks) * (1 << 16)


def test_an_engine_reads_prompts_without_mask_tensors(model, as_on_a_gpu):
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(rng.choice((5, 120, 400)))] for _ in range(6)]
    results = TorchEngine(model, slots=4, stop_ids=()).generate(prompts, SamplingParams(max_tokens=6))
    for r in results:
        hidden = model.forward_packed(pack([r.prompt_ids + r.ids], share=None))[len(r.prompt_ids) - 1 : -1]
        logp = model.logits(hidden).log_softmax(-1).gather(1, torch.tensor(r.ids)[:, None]).squeeze(1)
        assert torch.allclose(logp, torch.tensor(r.logprobs), atol=1e-4)
