"""Models of transformers as decoders: packed rows against transformers' own forward pass, sequence by sequence."""

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from unitymas.agents.basics.manifest import Damaged
from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.engines.torch.whole_engine import WholeEngine
from unitymas.agents.model.attention import pack
from unitymas.agents.model.auto import AutoDecoder
from unitymas.agents.model.logprobs import Support
from unitymas.agents.model.shape import UnsupportedArchitecture
from unitymas.agents.model.weights import load_decoder, load_tokenizer, save_adapter, save_model

from ..any_models import KINDS, SIZES, WHOLE, folder, network, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore")


def ragged(seed: int = 1) -> list[list[int]]:
    """Sequences that share a system prompt, a prompt, or nothing; longer than the windows of the models here."""
    chance = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 97, (n,), generator=chance).tolist()  # noqa: E731
    system, prompt = draw(19), draw(8)
    begun = [system + prompt + draw(n) for n in (1, 9, 9, 14)]
    return [*begun, system + draw(5), begun[1], draw(21), system]


def theirs(net, sequences, heat, allowed):
    """Log-probs and entropies by transformers' own forward pass, one sequence at a time."""
    logps, entropies = [], []
    for ids in sequences:
        scores = net(torch.tensor([ids]), use_cache=False).logits[0, :-1] / heat
        if allowed is not None:
            mask = torch.full_like(scores, -1e30)
            mask[:, allowed] = 0
            scores = scores + mask
        logp = scores.log_softmax(-1)
        logps.append(logp.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def ours(decoder, sequences, heat, allowed, **how):
    share = how.pop("share", 4)
    packed = pack(sequences, share)
    keep = torch.cat([rows[:-1] for rows in packed.rows])
    targets = torch.cat([torch.tensor(s[1:]) for s in sequences])
    hidden = decoder.forward_packed(packed, keep=keep, dtype=decoder.embed.dtype, **how)
    support = None if allowed is None else Support.of([allowed] * len(targets))
    return decoder.logprobs(hidden, targets, heat, support)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradients_are_those_of_transformers(kind, monkeypatch):
    """In float64: packed with shared prefixes, packed one by one, and computed again in the backward pass."""
    monkeypatch.setattr("unitymas.agents.model.logprobs.CHUNK", 97 * 7)  # several chunks of scores
    net = network(kind).double()
    decoder = AutoDecoder(copy.deepcopy(net))
    assert bool(decoder.unpackable) == (kind in WHOLE)
    sequences = ragged()
    allowed = sorted({t for s in sequences for t in s} | {3, 50})
    weights = torch.randn(2, sum(len(s) - 1 for s in sequences), dtype=torch.float64)
    # transformers' attention in plain products rounds its softmax to float32
    close = {"rtol": 2e-5, "atol": 2e-6}
    for support in (None, allowed):
        net.zero_grad()
        expected = theirs(net, sequences, 0.7, support)
        sum((w * x).sum() for w, x in zip(weights, expected, strict=True)).backward()
        gradients = {n: p.grad for n, p in net.named_parameters()}
        for how in ({}, {"share": None}, {"checkpointing": True}):
            decoder.zero_grad()
            mine = ours(decoder, sequences, 0.7, support, **how)
            sum((w * x).sum() for w, x in zip(weights, mine, strict=True)).backward()
            for a, b in zip(mine, expected, strict=True):
                assert a.dtype == b.dtype  # float64, but for the few models that make float32 scores
                torch.testing.assert_close(a, b, **close)
            for name, parameter in decoder.net.named_parameters():
                if gradients[name] is not None:
                    size = gradients[name].abs().max()
                    assert (parameter.grad - gradients[name]).abs().max() <= 2e-5 * size + 2e-6, (name, how)


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma3n_text", "gpt_oss", "bamba", "diffllama"])
def test_greedy_replies_are_those_of_generate(kind):
    """With keys of several shapes, shared keys, sinks, and with the models' own caches."""
    net = network(kind, spread=0.3)
    decoder = AutoDecoder(copy.deepcopy(net))
    make = WholeEngine if decoder.unpackable else TorchEngine
    engine = make(decoder, slots=4, context=96, stop_ids=[])
    prompts = [ids[:n] for ids, n in zip(ragged(), (28, 28, 30, 36), strict=False)]
    requests = [engine.submit(ids, SamplingParams(max_tokens=12, temperature=0.0)) for ids in prompts]
    while engine.busy:
        engine.step()
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for ids, request in zip(prompts, requests, strict=True):
        expected = net.generate(torch.tensor([ids]), **how)[0, len(ids) :]
        assert list(request.result.ids) == expected.tolist()


def test_a_layer_that_attends_twice_is_not_packed():
    """The engine would store the keys and values of its second attention alone."""
    assert AutoDecoder(network("diffllama")).unpackable == "a layer attends twice"


def test_positions_go_on_where_the_cache_ends():
    """Bamba counts from 0 in each call that gets no positions. Its cache is right nevertheless."""
    assert AutoDecoder(network("bamba")).ways.remembers


@pytest.mark.parametrize("kind", ["bamba", "minimax"])
def test_a_fresh_model_computes_padded_batches(kind):
    """Behind a norm without weights the sum of squares is constant: its gradients tell nothing about padding."""
    assert AutoDecoder(network(kind, spread=0.0)).ways.pads


def test_a_model_that_sees_images_is_used_for_its_text(tmp_path):
    """Its eyes learn nothing, and stay in an export, which transformers loads as what it was."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = CONFIG_MAPPING["qwen2_vl"](
        text_config={**SIZES, "vocab_size": 64, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63, eos_token_id=7,
    )  # fmt: skip
    torch.manual_seed(0)
    net = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    net.save_pretrained(tmp_path / "hub")
    tokenizer_of("w", 60).save_pretrained(tmp_path / "hub")
    decoder, tokenizer = load_decoder(tmp_path / "hub"), load_tokenizer(tmp_path / "hub")
    assert not decoder.unpackable and {2, 7} <= TorchEngine(decoder, tokenizer, slots=1).stop_ids
    sequences = [[4 + token % 50 for token in ids] for ids in ragged()]
    with torch.no_grad():
        expected = theirs(net, sequences, 0.7, None)
        for a, b in zip(ours(decoder, sequences, 0.7, None), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    eyes = [name for name, _ in decoder.named_parameters() if ".visual." in name]
    assert eyes and not set(eyes) & set(decoder.learnable(None))
    assert any("lm_head" in name or "embed_tokens" in name for name in decoder.learnable(None))
    out = save_model(decoder, tmp_path / "out", tokenizer)
    again = AutoModelForImageTextToText.from_pretrained(out)
    torch.testing.assert_close(dict(again.named_parameters()), dict(net.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bert", "vit", "t5"])
def test_what_is_no_causal_language_model_is_refused_by_name(kind, tmp_path):
    config = CONFIG_MAPPING[kind](
        **{**SIZES, "d_kv": 8, "d_ff": 48, "d_model": 32, "num_layers": 1, "num_heads": 4}
    )
    (AutoModelForCausalLM if kind == "bert" else AutoModel).from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitecture, match=f"{kind}.* is no causal language model"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3"])
def test_what_ends_a_reply_stands_in_the_generation_config_too(kind, tmp_path):
    """Gemma 2 and Phi-3 name their end of a turn nowhere else. An export keeps the file as it was."""
    path = Path(folder(kind, tmp_path / "hub"))
    settings = {"eos_token_id": [2, 7, 9], "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(settings))
    decoder, tokenizer = load_decoder(path), load_tokenizer(path)
    assert TorchEngine(decoder, tokenizer, slots=1).stop_ids == {2, 7, 9}
    out = save_model(decoder.merged(), tmp_path / "out", tokenizer)
    assert json.loads((out / "generation_config.json").read_text()) == settings
    (path / "generation_config.json").write_text('{"eos_tok')
    with pytest.raises(Damaged, match="generation_config.json is no JSON"):
        load_decoder(path)


TARGETS = {"gpt2": ["c_attn"], "deepseek_v3": ["q_b_proj", "o_proj"]}


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "deepseek_v3", "llama4_text", "gpt2", "jamba"])
@pytest.mark.parametrize("options", [{"rank": 3}, {"rank": 4, "targets": "some"}, {"tokens": 5}], ids=str)
def test_an_adapter_is_what_peft_makes_of_its_files(kind, options, tmp_path):
    """States with the adapter are those of peft's model; the base and a second adapter do not change."""
    if options.get("targets"):
        options = {**options, "targets": TARGETS.get(kind, ["q_proj", "v_proj"])}
    decoder = AutoDecoder(network(kind))
    if options.get("tokens") and kind in ("jamba", "deepseek_v3"):
        with pytest.raises(ValueError, match=f"no prefix can be learned for {kind}"):
            decoder.add_adapter("b", **options)
        return
    sequences = ragged()[:5]
    plain, _ = ours(decoder, sequences, 1.0, None)
    decoder.add_adapter("a", rank=2)
    added = decoder.add_adapter("b", **options)
    assert {id(p) for p in added} == {id(p) for p in decoder.learnable("b").values()}
    assert not {id(p) for p in added} & {id(p) for p in decoder.learnable(None).values()}
    with torch.no_grad():
        for parameter in added:
            parameter.normal_(std=0.5)
    save_model(decoder, tmp_path / "base")
    save_adapter(decoder, "b", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    expected, _ = theirs(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), sequences, 1.0, None)
    mine, _ = ours(decoder, sequences, 1.0, None, adapter="b")
    torch.testing.assert_close(mine.float(), expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(mine, plain, atol=1e-2)
    torch.testing.assert_close(
        ours(decoder, sequences, 1.0, None, adapter="a")[0], plain, atol=1e-5, rtol=1e-5
    )
    if not options.get("tokens"):
        merged, _ = ours(decoder.merged("b"), sequences, 1.0, None)
        torch.testing.assert_close(merged, mine, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["model", "self_attn"])
def test_an_adapter_may_be_called_as_a_part_of_the_model(name, tmp_path):
    """The names in its file are those of peft, which reads it whole."""
    decoder = AutoDecoder(network("phi3"))
    with torch.no_grad():
        for parameter in decoder.add_adapter(name, rank=2):
            parameter.normal_(std=0.5)
    save_model(decoder, tmp_path / "base")
    save_adapter(decoder, name, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    expected, _ = theirs(
        PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), ragged()[:2], 1.0, None
    )
    mine, _ = ours(decoder, ragged()[:2], 1.0, None, adapter=name)
    torch.testing.assert_close(mine.float(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "some", "none"),
    [
        ("falcon_h1", {"in_proj", "q_proj"}, {"out_proj"}),  # peft refuses `out_proj` in a Mamba layer
        ("gemma3n_text", {"q_proj", "0"}, {"lm_head"}),  # "0" is also the name of a layer
        ("falcon", {"query_key_value", "dense"}, {"lm_head"}),  # a class of its own for matrices
        ("afmoe", {"q_proj"}, {"gate", "gate_proj"}),  # names that peft reads as those of experts
    ],
)
def test_lora_has_matrices_by_default(kind, some, none):
    """A step moves their adapter, and what is merged is what was learned."""
    decoder = AutoDecoder(network(kind))
    added = decoder.add_adapter("a", rank=2)
    names = {n.rpartition(".")[2] for n, m in decoder.net.named_modules() if hasattr(m, "lora_A")}
    assert some <= names and not none & names
    with torch.no_grad():
        for parameter in added:
            parameter.normal_(std=0.3)
    mine, _ = ours(decoder, ragged()[:3], 1.0, None, adapter="a")
    mine.sum().backward()
    assert all(parameter.grad.any() for parameter in added)
    merged, _ = ours(decoder.merged("a"), ragged()[:3], 1.0, None)
    torch.testing.assert_close(merged, mine, atol=1e-4, rtol=1e-4)


def test_a_matrix_that_no_layer_calls_is_no_target():
    """Jamba reads the weights of `dt_proj` by itself: an adapter there would act only once it is merged."""
    decoder = AutoDecoder(network("jamba"))
    assert "dt_proj" not in decoder.adapters.matrices and "in_proj" in decoder.adapters.matrices
    with pytest.raises(ValueError, match="no layer calls a matrix 'dt_proj'"):
        decoder.add_adapter("a", targets=["dt_proj"])
    with pytest.raises(ValueError, match="'q_prj'.*did you mean 'q_proj'"):
        decoder.add_adapter("a", targets=["q_prj"])


def test_replies_of_a_recurrent_model_go_on_under_new_weights():
    """What the model remembers is computed again by the new weights, prompt and reply."""
    nets = [network("rwkv", seed) for seed in (0, 1)]
    decoders = [AutoDecoder(net) for net in nets]
    engine = WholeEngine(decoders[0], slots=3, context=96, stop_ids=[])
    requests = [
        engine.submit(list(range(3, 9 + i // 2)), SamplingParams(max_tokens=9, seed=i)) for i in range(5)
    ]
    for _ in range(4):
        engine.step()
    engine.publish(decoders[1], 1)
    while engine.busy:
        engine.step()
    results = [request.result for request in requests]
    assert {tuple(sorted(set(r.versions))) for r in results} == {(0, 1), (1,)}
    for r in results:
        for version, net in enumerate(nets):
            logp = theirs(net, [r.prompt_ids + r.ids], 1.0, None)[0][len(r.prompt_ids) - 1 :]
            mine = torch.tensor(r.versions) == version
            assert torch.allclose(logp[mine].float(), torch.tensor(r.logprobs)[mine], atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "opt"])
@given(roles=st.lists(st.sampled_from(["planner", "solver", None]), min_size=8, max_size=8))
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
def test_a_base_learns_from_all_roles_as_in_peft(kind, roles):
    """In float64: its gradient is the sum over all roles, and an adapter's is that of its own role's sequences alone."""
    decoder = AutoDecoder(network(kind).double())
    ranks = {"planner": 2, "solver": 5}
    torch.manual_seed(0)
    with torch.no_grad():
        for name, rank in ranks.items():
            for parameter in decoder.add_adapter(name, rank=rank, alpha=1.0):
                parameter.data = parameter.double().normal_(std=0.2)
    sequences, expected = ragged(), {}
    for role in (None, *ranks):
        own = [ids for ids, by in zip(sequences, roles, strict=True) if by == role]
        if not own:
            continue
        ours(decoder, own, 1.0, None, adapter=role)[0].sum().backward()
        with tempfile.TemporaryDirectory() as place:
            net = network(kind).double()
            if role is not None:
                save_adapter(decoder, role, Path(place))
                net = PeftModel.from_pretrained(net, place, is_trainable=True, autocast_adapter_dtype=False)
            net.double().requires_grad_(True)
            theirs(net, own, 1.0, None)[0].sum().backward()
        for name, parameter in net.named_parameters():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            plain = plain.replace(".default.", f".{role}.")
            expected[plain] = expected.get(plain, 0) + parameter.grad
    for name, parameter in decoder.net.named_parameters():
        want = expected.get(name.replace(".base_layer", ""))
        if want is None:  # the adapter of a role without sequences
            assert parameter.grad is None, name
        else:
            # transformers' attention rounds its softmax to float32
            torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=5e-5)
