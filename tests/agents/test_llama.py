"""The decoder against transformers' own models, and packed against one by one."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from unitymas.agents.model.attention import pack
from unitymas.agents.model.logprobs import Support, logprobs_entropy
from unitymas.agents.model.shape import UnsupportedArchitecture, shape_of
from unitymas.agents.model.weights import from_config, load_model, save_adapter, save_model

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILY = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama wide heads": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=16)),
    "llama 3 positions": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_transformers_after_loading_and_after_saving(name, tmp_path):
    kind, config = FAMILY[name]
    theirs = kind(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms and biases must matter too
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "a")
    ours = load_model(tmp_path / "a")
    save_model(ours, tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32).eval()
    ids = torch.randint(0, 97, (60,))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        mine = ours.logits(ours.forward_packed(pack([ids.tolist()])))
        assert torch.allclose(mine, expected, atol=1e-4)
        assert torch.equal(again(ids[None]).logits[0], expected)


def test_an_export_names_its_class(tmp_path):
    """TRL and others choose the class by it; the configuration of a GGUF file has none."""
    config = LlamaConfig(**SIZES)
    assert not config.architectures
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "a")
    written = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps({**written, "architectures": None}))
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_what_cannot_be_computed_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedArchitecture, match="'gpt2'.*llama, mistral, qwen2, qwen3"):
        shape_of(GPT2Config())
    with pytest.raises(UnsupportedArchitecture, match="sliding"):
        shape_of(MistralConfig(**SIZES, sliding_window=8))
    with pytest.raises(UnsupportedArchitecture, match="gelu"):
        shape_of(LlamaConfig(**SIZES, hidden_act="gelu"))
    with pytest.raises(FileNotFoundError, match="no model at"):
        load_model(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)


def one_by_one(model, sequences, weights):
    """The loss of a reader who knows no packing: every sequence alone, weighted log-probs and entropies."""
    loss, values = 0.0, []
    for ids, weight in zip(sequences, weights, strict=True):
        logits = model.logits(model.forward_packed(pack([ids], share=None)))[:-1]
        logp = logits.log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        loss = loss + (weight[1:] * chosen).sum() + 0.3 * -(logp.exp() * logp).sum()
        values.append(chosen.detach())
    return loss, values


def packed_loss(model, sequences, weights, **how):
    share = how.pop("share", 4)
    packed = pack(sequences, share=share)
    hidden = model.forward_packed(packed, **how)
    rows = torch.cat([r[:-1] for r in packed.rows])
    targets = torch.cat([torch.tensor(s[1:]) for s in sequences])
    logp, entropy = logprobs_entropy(hidden[rows], model.head, targets)
    loss = (torch.cat([w[1:] for w in weights]) * logp).sum() + 0.3 * entropy.sum()
    return loss, list(logp.detach().split([len(s) - 1 for s in sequences]))


def ragged():
    system, prompt, other = (
        torch.randint(0, 97, (23,)).tolist(),
        torch.randint(0, 97, (11,)).tolist(),
        [5, 6, 7],
    )
    tails = [torch.randint(0, 97, (n,)).tolist() for n in (1, 7, 7, 20, 33)]
    sequences = (
        [system + prompt + t for t in tails] + [system + other + t for t in tails[:2]] + [tails[4], system]
    )
    return sequences + [sequences[0]], [torch.randn(len(s)) for s in [*sequences, sequences[0]]]


@pytest.mark.parametrize("how", [{}, {"share": None}, {"checkpointing": True}], ids=str)
def test_packed_is_one_by_one_in_values_and_gradients(how):
    model = from_config(FAMILY["qwen3"][1])
    sequences, weights = ragged()
    expected_loss, expected = one_by_one(model, sequences, weights)
    expected_loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss, values = packed_loss(model, sequences, weights, **how)
    loss.backward()
    assert torch.allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(values, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(p.grad, g, atol=1e-4 * g.abs().max() + 1e-7)


def test_packed_in_bfloat16_stays_near_float32():
    model = from_config(FAMILY["llama"][1])
    sequences, weights = ragged()
    _, exact = packed_loss(model, sequences, weights)
    _, rough = packed_loss(model, sequences, weights, dtype=torch.bfloat16)
    assert max((a - b).abs().max() for a, b in zip(exact, rough, strict=True)) < 0.05


def test_shared_prefixes_are_laid_once():
    prompt = list(range(40))
    packed = pack([[*prompt, 50 + i] for i in range(8)])
    assert len(packed) == 40 + 8
    assert len(pack([[*prompt, 50 + i] for i in range(8)], share=None)) == 41 * 8


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8),
    st.sampled_from([None, 1, 2, 5]),
)
def test_every_sequence_is_found_in_the_row(sequences, share):
    packed = pack(sequences, share)
    for rows, ids in zip(packed.rows, sequences, strict=True):
        assert packed.ids[rows].tolist() == ids
        assert packed.position[rows].tolist() == list(range(len(ids)))
    assert len(packed) == sum(s.stop - s.start for s in packed.segments)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.booleans(), st.integers(0, 10_000), st.sampled_from([1 << 22, 60]))
def test_log_probs_and_entropies_against_the_plain_formula(n, restricted, seed, chunk):
    generator = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(k, 5, generator=generator, dtype=torch.float64).float() for k in (n, 23))
    heat = torch.rand(n, generator=generator) + 0.3
    allowed = [sorted({1, i, i + 7}) if restricted and i % 2 else None for i in range(n)]
    targets = torch.tensor([a[-1] if a else 4 for a in allowed])
    g1, g2 = torch.randn(2, n, generator=generator)

    def plain(h, w):
        scores = h @ w.T / heat[:, None]
        for i, a in enumerate(allowed):
            if a:
                scores = torch.cat((scores[:i], only(scores[i], a)[None], scores[i + 1 :]))
        logp = scores.log_softmax(-1)
        entropy = -torch.where(logp.exp() > 0, logp.exp() * logp.clamp(min=-1e9), 0.0).sum(-1)
        return logp.gather(1, targets[:, None]).squeeze(1), entropy

    def only(row, ids):
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[ids] = False
        return row.masked_fill(mask, -1e9)

    def run(f):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logp, entropy = f(h, w)
        ((logp * g1).sum() + (entropy * g2).sum()).backward()
        return logp.detach(), entropy.detach(), h.grad, w.grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unitymas.agents.model.logprobs.CHUNK", chunk)
        mine = run(lambda h, w: logprobs_entropy(h, w, targets, heat, Support.of(allowed)))
    for a, b in zip(mine, run(plain), strict=True):
        assert torch.allclose(a, b, atol=2e-5)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("vocab", [1_000, 16_000, 128_000])
def test_tokens_by_vocabulary_is_never_held(vocab, monkeypatch):
    monkeypatch.setattr("unitymas.agents.model.logprobs.CHUNK", 1 << 18)
    hidden, head = torch.randn(700, 2, requires_grad=True), torch.randn(vocab, 2, requires_grad=True)
    targets = torch.randint(0, vocab, (700,))
    with Largest() as largest:
        logp, entropy = logprobs_entropy(hidden, head, targets)
        (logp.sum() + entropy.sum()).backward()
    assert largest.numel <= 1 << 18 < 700 * vocab


def test_a_fixed_head_costs_no_gradient():
    hidden, head = torch.randn(30, 2, requires_grad=True), torch.randn(50_000, 2)
    targets = torch.randint(0, 50_000, (30,))
    found = []
    for learns in (True, False):
        hidden.grad = None
        logp, entropy = logprobs_entropy(hidden, head.clone().requires_grad_(learns), targets)
        with Made((50_000, 2)) as made:
            (logp.sum() + entropy.sum()).backward()
        assert made.count == 0 if not learns else made.count > 0
        found.append(hidden.grad.clone())
    assert torch.equal(*found)


class Made(TorchDispatchMode):
    """Counts the tensors of a shape that operations make."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += any(
            isinstance(t, torch.Tensor) and t.shape == self.shape and not any(t is a for a in args)
            for t in tree_leaves(out)
        )
        return out


def test_adapters_start_neutral_and_each_row_may_use_its_own():
    model = from_config(FAMILY["llama"][1])
    packed = pack([[1, 2, 3, 4], [9, 8, 7]], share=None)
    base = model.forward_packed(packed)
    for i, name in enumerate(("a", "b")):
        for p in model.add_adapter(name, rank=2):
            if i:
                torch.nn.init.normal_(p, std=0.3)
    assert torch.allclose(model.forward_packed(packed, adapter="a"), base)
    changed = model.forward_packed(packed, adapter="b")
    assert not torch.allclose(changed, base, atol=1e-3)
    from unitymas.agents.model.attention import PackedAttention

    attention = PackedAttention(packed.segments, torch.float32, torch.device("cpu"))
    mixed = model(packed.ids, packed.position, attention, route=[("b", torch.arange(7) >= 4)])
    assert torch.allclose(mixed[:4], base[:4], atol=1e-6) and torch.allclose(
        mixed[4:], changed[4:], atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILY)
def test_a_saved_adapter_is_pefts(family, tmp_path):
    """What peft makes of the files, on transformers' model, is what the adapter does here."""
    peft = pytest.importorskip("peft")
    model = from_config(FAMILY[family][1])
    for name in ("a", "b"):
        for p in model.add_adapter(name, rank=3, alpha=5.0):
            torch.nn.init.normal_(p, std=0.3)
    save_model(model, tmp_path / "base")
    save_adapter(model, "b", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.tensor([[1, 2, 3, 4, 9, 8, 7]])
    plain, changed = (model.logits(model.forward_packed(pack(ids.tolist()), adapter=a)) for a in (None, "b"))
    assert torch.allclose(changed, theirs(ids).logits[0], atol=1e-4)
    assert not torch.allclose(changed, plain, atol=1e-2)
