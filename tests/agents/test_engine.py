"""The engine against a plain full forward pass; alone and in a crowd; every way a request can end."""

import asyncio
import copy
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from unitymas.agents.engines.sampling import SamplingParams, Trie, uniform
from unitymas.agents.engines.torch.prefill import cut, groups
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.model.attention import pack
from unitymas.agents.model.logprobs import Support, logprobs_entropy
from unitymas.agents.model.weights import from_config

VOCAB, END = 97, 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160,
}  # fmt: skip
LETTERS = [chr(33 + i) for i in range(90)] + ["ab", "</a>", "a>", " ", "é", "12", "<end>"]


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that distributions are far from uniform."""
    return from_config(Qwen3Config(**SIZES, head_dim=16, initializer_range=0.3))


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {piece: i for i, piece in enumerate(LETTERS)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("</a>|ab|<end>|12|."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def prompts(n=20, seed=0, shared=0):
    rng = random.Random(seed)
    system = [rng.randrange(END) for _ in range(shared)]
    return [system + [rng.randrange(END) for _ in range(rng.randint(1, 60))] for _ in range(n)]


def check_against_full_forward(model, results, params):
    """Log-probs of the engine = those of one full forward pass, under the distribution that was sampled from."""
    for r in results:
        packed = pack([r.prompt_ids + r.ids], share=None)
        hidden = model.forward_packed(packed)[len(r.prompt_ids) - 1 : -1]
        support = Support.of(r.support) if r.support else None
        logp, _ = logprobs_entropy(hidden, model.head, torch.tensor(r.ids), params.temperature, support)
        assert torch.allclose(logp, torch.tensor(r.logprobs), atol=1e-4)


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(max_tokens=12, seed=3),
        SamplingParams(temperature=0.6, max_tokens=12),
        SamplingParams(top_k=5, max_tokens=12),
        SamplingParams(top_p=0.7, temperature=1.4, max_tokens=12),
        SamplingParams(top_p=0.9, top_k=9, max_tokens=12),
    ],
    ids=str,
)
def test_log_probs_are_those_of_a_full_forward(model, params, deterministic, shared):
    engine = TorchEngine(model, slots=6, stop_ids=[END], deterministic=deterministic)
    results = engine.generate(prompts(14, shared=shared), params)
    assert all(r.finish_reason in ("stop", "length") for r in results)
    check_against_full_forward(model, results, params)
    if shared:
        assert sum(r.cached for r in results) >= 13 * 32
    if params.temperature == 0:
        for r in results:
            logits = model.logits(model.forward_packed(pack([r.prompt_ids + r.ids])))
            assert logits[len(r.prompt_ids) - 1 : -1].argmax(-1).tolist() == r.ids
    if params.top_k or params.top_p < 1:
        assert all(token in s for r in results for token, s in zip(r.ids, r.support, strict=True))


def test_samples_of_one_prompt_are_read_once(model):
    prompt = prompts(1, seed=5)[0] * 3
    engine = TorchEngine(model, slots=8, context=160, stop_ids=[])
    results = engine.generate([prompt] * 8, SamplingParams(max_tokens=3))
    assert engine.counts["tokens_read"] < len(prompt) + 8 * 16
    assert len({tuple(r.ids) for r in results}) > 1
    check_against_full_forward(model, results, SamplingParams())
    again = TorchEngine(model, slots=8, context=160, stop_ids=[], share_prefixes=False)
    assert [r.ids for r in again.generate([prompt] * 8, SamplingParams(max_tokens=3))] == [
        r.ids for r in results
    ]
    assert again.counts["tokens_copied"] == 0


def family(seed):
    """Prompts that branch off each other: some begin another, some are the same, some part in the middle of a block."""
    dice = random.Random(seed)
    found = [[dice.randrange(END) for _ in range(dice.randint(1, 40))]]
    for _ in range(14):
        stem = dice.choice(found)
        found.append(
            (stem[: dice.randint(1, len(stem))] + [dice.randrange(4)] * dice.choice((0, 0, 1, 9)))[:60]
        )
    return found


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**20), deterministic=st.booleans())
def test_prompts_that_branch_off_each_other(model, seed, deterministic):
    params, asked = SamplingParams(max_tokens=3), family(seed)
    engine = TorchEngine(model, slots=6, context=80, stop_ids=[], deterministic=deterministic)
    results = engine.generate(asked, params)
    check_against_full_forward(model, results, params)
    assert engine.counts["tokens_read"] + engine.counts["tokens_copied"] == sum(map(len, asked))
    apart = TorchEngine(model, slots=6, context=80, stop_ids=[], share_prefixes=False)
    assert [r.ids for r in results] == [r.ids for r in apart.generate(asked, params)]


def test_old_prefixes_give_way_and_are_forgotten_with_new_weights(model):
    engine = TorchEngine(model, slots=2, context=64, stop_ids=[])  # a pool of 128 tokens
    asked = [p[:60] for p in prompts(16, seed=2, shared=33)]
    check_against_full_forward(model, engine.generate(asked, SamplingParams(max_tokens=4)), SamplingParams())
    assert len(engine.prefixes.known) * engine.prefixes.size <= 128
    other = from_config(Qwen3Config(**SIZES, head_dim=16, initializer_range=0.3), seed=9)
    engine.publish(other, 1)
    results = engine.generate(asked, SamplingParams(max_tokens=4))
    assert results[0].cached == 0 and results[0].version == 1
    check_against_full_forward(other, results, SamplingParams())


def moved(model, seed):
    """The same model after an update."""
    other, dice = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=dice))
    return other


@pytest.mark.parametrize("deterministic", [False, True])
def test_replies_go_on_under_new_weights(model, deterministic):
    """Each token's log-prob is that of the version beside it, as if that version had computed all before it."""
    models = [model, moved(model, 1), moved(model, 2)]
    engine = TorchEngine(model, slots=4, context=96, stop_ids=[END], deterministic=deterministic)
    params = [SamplingParams(max_tokens=30, seed=i) for i in range(7)]  # three wait at first
    requests = [engine.submit(p, one) for p, one in zip(prompts(7, seed=4, shared=9), params, strict=True)]
    for version in (1, 2):
        for _ in range(5):
            engine.step()
        engine.publish(models[version], version)
    while engine.busy:
        engine.step()
    results = [r.result for r in requests]
    assert {1, 3} <= {len(set(r.versions)) for r in results} and engine.counts["interrupted"] >= 4
    for r in results:
        assert (
            len(r.versions) == len(r.ids) and r.versions == sorted(r.versions) and r.version == r.versions[0]
        )
        assert [v for _, v in r.switches] == sorted(set(r.versions) - {r.version})
        for version, own in enumerate(models):
            hidden = own.forward_packed(pack([r.prompt_ids + r.ids]))[len(r.prompt_ids) - 1 : -1]
            logp, _ = logprobs_entropy(hidden, own.head, torch.tensor(r.ids))
            mine = torch.tensor(r.versions) == version
            assert torch.allclose(logp[mine], torch.tensor(r.logprobs)[mine], atol=1e-4)
    if (
        deterministic
    ):  # a reply is settled, bit for bit, by its prompt, its seed, and where which weights took over
        for r, one in zip(results, params, strict=True):
            assert continued(models, r, one) == (r.ids, r.logprobs, r.versions)


def continued(models, reply, params):
    """The same reply, part after part, each by an engine that knows one version alone."""
    begun, ends = None, [*(token for token, _ in reply.switches), params.max_tokens]
    for version, end in zip([reply.version, *(v for _, v in reply.switches)], ends, strict=True):
        engine = TorchEngine(models[version], slots=4, context=96, stop_ids=[END], deterministic=True)
        engine.version = version
        request = engine.submit(reply.prompt_ids, replace(params, max_tokens=end), begun=begun)
        while engine.busy:
            engine.step()
        begun = request.result
    return begun.ids, begun.logprobs, begun.versions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_or_in_a_crowd_is_the_same_bit_for_bit(model, dtype):
    params = SamplingParams(max_tokens=10, seed=77, temperature=0.9)
    mine, crowd = prompts(1, seed=9)[0], prompts(14, seed=1) + prompts(6, seed=2, shared=20)
    seen = []
    for place in (None, 0, 19):
        engine = TorchEngine(model, slots=8, context=96, dtype=dtype, stop_ids=[END], deterministic=True)
        others = [] if place is None else list(crowd)
        requests = [engine.submit(p, SamplingParams(max_tokens=1 + len(p) % 9, seed=len(p))) for p in others]
        ask = engine.submit(mine, params)
        engine.waiting.rotate(-(place or 0))
        while engine.busy:
            engine.step()
        assert all(r.done for r in requests)
        seen.append((ask.result.ids, ask.result.logprobs))
    assert all(s == seen[0] for s in seen)


def test_an_engine_made_deterministic_later_gives_the_same_bits(model):
    """Blocks and pieces included: prompts that share what is no multiple of a whole piece."""
    asked, params = prompts(12, seed=4, shared=22), SamplingParams(max_tokens=6)
    made, changed = (
        TorchEngine(model, slots=4, context=96, stop_ids=[], deterministic=d) for d in (True, False)
    )
    changed.submit(asked[0], params)
    with pytest.raises(RuntimeError, match="while requests run or wait"):
        changed.fix_shapes()
    while changed.busy:
        changed.step()
    changed.fix_shapes()
    assert changed.prefixes.size == TorchEngine.fixed_block
    both = [
        [(r.ids, r.logprobs, r.cached) for r in engine.generate(asked, params)] for engine in (made, changed)
    ]
    assert both[0] == both[1]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    st.sampled_from((1, 2, 4)), st.integers(1, 5), st.integers(5, 9),
)  # fmt: skip
def test_every_unknown_token_of_a_prompt_is_read_once_and_in_order(asked, block, most, rows):
    asked = dict(enumerate(asked))
    known = {slot: min(block, len(ids) // block * block) for slot, ids in asked.items()}
    family = {slot: (0, "" if slot % 3 else "other") for slot in asked}
    pieces = list(cut(asked, known, family, block, most))
    read = dict(known)
    for piece in pieces:
        first = piece.slots[0]
        assert 1 <= piece.n <= most
        for slot in piece.slots:
            assert piece.start == read[slot] and family[slot] == family[first]
            assert asked[slot][: piece.start + piece.n] == asked[first][: piece.start + piece.n]
            read[slot] += piece.n
    assert read == {slot: len(ids) for slot, ids in asked.items()}
    cuts = groups(pieces, rows)
    assert [p for group in cuts for p in group] == pieces
    assert all(sum(p.n for p in group) <= rows for group in cuts)


def test_the_same_bits_whether_a_prefix_was_copied_or_read(model):
    prompt = prompts(1, seed=9, shared=40)[0]
    engine = TorchEngine(model, slots=4, context=128, deterministic=True, stop_ids=[])
    first, second = (engine.generate([prompt], SamplingParams(max_tokens=5))[0] for _ in range(2))
    assert first.cached == 0 and second.cached >= 32
    assert (first.ids, first.logprobs) == (second.ids, second.logprobs)


def test_requests_join_and_leave_by_themselves(model):
    engine = TorchEngine(model, slots=3, stop_ids=[])
    lengths = [1, 9, 2, 7, 3, 3, 8, 1]
    requests = [
        engine.submit(p, SamplingParams(max_tokens=n)) for p, n in zip(prompts(8), lengths, strict=True)
    ]
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.running))
    assert [len(r.result.ids) for r in requests] == lengths
    assert most <= 3 and engine.counts["steps"] < sum(lengths)
    check_against_full_forward(model, [r.result for r in requests], SamplingParams())


def test_a_prompt_too_long_is_a_finish_reason(model):
    engine = TorchEngine(model, slots=2, context=32, stop_ids=[])
    long, edge, short = engine.generate([[1] * 32, [1] * 31, [1] * 20], SamplingParams(max_tokens=50))
    assert (long.finish_reason, long.ids) == ("overflow", [])
    assert (edge.finish_reason, len(edge.ids)) == ("length", 1)
    assert (short.finish_reason, len(short.ids)) == ("length", 12)


def test_the_closing_token_is_kept_among_ids_and_left_out_of_the_text(model, tokenizer):
    engine = TorchEngine(model, tokenizer, slots=8, stop_ids=[END])
    results = engine.generate(prompts(16), SamplingParams(max_tokens=60))
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert stopped and all(r.ids[-1] == END and END not in r.ids[:-1] for r in stopped)
    assert all(r.text == "".join(LETTERS[i] for i in r.ids[:-1]) for r in stopped)


def test_stop_strings_end_the_text_wherever_tokens_end(model, tokenizer):
    engine = TorchEngine(model, tokenizer, slots=8, stop_ids=[])
    for stop in (("a",), ("b", "é"), ("/a",)):
        results = engine.generate(prompts(16), SamplingParams(max_tokens=60, stop=stop))
        for r in results:
            text = "".join(LETTERS[i] for i in r.ids)
            if r.finish_reason == "stop":
                assert text.startswith(r.text) and r.text.endswith(stop)
                assert not any(s in "".join(LETTERS[i] for i in r.ids[:-1]) for s in stop)
            else:
                assert r.text == text and not any(s in text for s in stop)
        assert any(r.finish_reason == "stop" for r in results)


def test_choices_are_sampled_by_their_probability_and_nothing_else(model, tokenizer):
    choices = ("1", "12", "abc", "abd", "</a>")
    prompt = prompts(1)[0]
    engine = TorchEngine(model, tokenizer, slots=32, stop_ids=[END])
    results = engine.generate([prompt] * 100, SamplingParams(choices=choices))
    assert {r.text for r in results} <= set(choices) and all(r.finish_reason == "stop" for r in results)
    check_against_full_forward(model, results, SamplingParams())
    told = {r.text: math.exp(sum(r.logprobs)) for r in results}
    for text, probability in told.items():
        share = sum(r.text == text for r in results) / 100
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / 100) + 1e-3


def test_choices_that_read_the_same_are_refused(tokenizer):
    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    root = Trie.of(("1", "1 "), encode, END)
    assert set(root.children[LETTERS.index("1")].children) == {END, LETTERS.index(" ")}
    with pytest.raises(ValueError, match="same tokens"):
        Trie.of(("~", "\u4e00", "\u4e01"), encode, END)


def test_cancelling_ends_a_request_and_frees_its_slot(model):
    engine = TorchEngine(model, slots=1, stop_ids=[])
    first, second, third = (engine.submit(p, SamplingParams(max_tokens=9)) for p in prompts(3))
    for _ in range(3):
        engine.step()
    engine.cancel(first)
    engine.cancel(third)
    assert first.result.finish_reason == third.result.finish_reason == "cancelled"
    assert len(first.result.ids) == 3 and third.result.ids == []
    while engine.busy:
        engine.step()
    assert second.result.finish_reason == "length"
    check_against_full_forward(model, [second.result, first.result], SamplingParams())


def test_many_ask_at_once_from_asyncio_and_a_cancelled_task_frees_its_slot(model):
    engine = TorchEngine(model, slots=4, stop_ids=[])
    expected = engine.generate(prompts(12), SamplingParams(max_tokens=6))

    async def ask():
        slow = asyncio.create_task(engine.agenerate([1, 2], SamplingParams(max_tokens=150)))
        asks = [engine.agenerate(p, SamplingParams(max_tokens=6, seed=i)) for i, p in enumerate(prompts(12))]
        results = await asyncio.gather(*asks)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        return results

    for _ in range(2):  # two event loops, one after the other
        assert [r.ids for r in asyncio.run(ask())] == [r.ids for r in expected]
        assert not engine.busy


@pytest.mark.parametrize("turns", range(5))
def test_a_team_asks_its_next_question_before_the_engine_goes_on(model, turns):
    """Between an answer and the next question lie turns of the loop (tasks, gathers); no step fits between them."""
    engine = TorchEngine(model, slots=4, stop_ids=[])

    async def team(acts, tokens):
        for seed in range(acts):
            await asyncio.gather(engine.agenerate([1, 2, 3], SamplingParams(max_tokens=tokens, seed=seed)))
            for _ in range(turns):
                await asyncio.sleep(0)

    async def side_by_side():
        await asyncio.gather(team(5, 2), team(5, 2), team(1, 10))

    asyncio.run(side_by_side())
    # of ten passes the first reads all prompts; in the others somebody speaks
    assert engine.counts["steps"] == 9
    assert engine.counts["tokens_spoken"] == 9 + 2 * 5


def test_broken_weights_are_told_to_everyone_who_waits(model):
    engine = TorchEngine(model, slots=2, stop_ids=[])
    engine.model.norm.weight.fill_(float("nan"))

    async def ask():
        asks = [engine.agenerate(p, SamplingParams()) for p in prompts(5)]
        return await asyncio.gather(*asks, return_exceptions=True)

    assert all(isinstance(r, FloatingPointError) for r in asyncio.run(ask()))


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [([], {}, "at least one token"), ([VOCAB], {}, "0..96"), ([1], {"stop": ("x",)}, "tokenizer")],
)
def test_what_makes_no_sense_is_refused(model, prompt, changes, message):
    with pytest.raises(ValueError, match=message):
        TorchEngine(model, stop_ids=[]).submit(prompt, SamplingParams(**changes))


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"choices": ()}, {"stop": ("",)}]
)
def test_sampling_parameters_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_the_counter_based_numbers_are_uniform_and_independent_of_order():
    many = uniform(list(range(200)) * 50, [i // 200 for i in range(10_000)])
    assert many.min() >= 0 and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.02 and abs(many.var() - 1 / 12) < 0.005
    assert uniform([5, 7], [2, 3]).tolist() == [uniform([5], [2])[0], uniform([7], [3])[0]]


def test_adapters_of_different_requests_run_side_by_side():
    model = from_config(LlamaConfig(**SIZES, initializer_range=0.3))
    for p in model.add_adapter("b", rank=2):
        torch.nn.init.normal_(p, std=0.3)
    engine = TorchEngine(model, slots=4, stop_ids=[])
    asked = [(p, "b" if i % 2 else None) for i, p in enumerate(prompts(8, shared=20))]
    requests = [engine.submit(p, SamplingParams(max_tokens=5), adapter=a) for p, a in asked]
    while engine.busy:
        engine.step()
    for request, (prompt, adapter) in zip(requests, asked, strict=True):
        r = request.result
        hidden = model.forward_packed(pack([prompt + r.ids]), adapter=adapter)[len(prompt) - 1 : -1]
        logp, _ = logprobs_entropy(hidden, model.head, torch.tensor(r.ids))
        assert torch.allclose(logp, torch.tensor(r.logprobs), atol=1e-4)


def test_new_weights_of_an_adapter_interrupt_its_own_requests_alone():
    model = from_config(LlamaConfig(**SIZES, initializer_range=0.3))
    for name in ("a", "b"):
        for p in model.add_adapter(name, rank=2):
            torch.nn.init.normal_(p, std=0.3)
    engine, later = TorchEngine(model, slots=4, stop_ids=[]), copy.deepcopy(model)
    with torch.no_grad():
        for p in later.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    adapters = ("a", "b", None, "a")
    asked = [
        engine.submit(p, SamplingParams(max_tokens=8, seed=i), adapter=adapter)
        for i, (p, adapter) in enumerate(zip(prompts(4), adapters, strict=True))
    ]
    for _ in range(3):
        engine.step()
    engine.publish(later, 3, "a")
    assert engine.counts["interrupted"] == 2
    while engine.busy:
        engine.step()
    mixed = copy.deepcopy(model).with_adapter_of(later, "a")
    for request, adapter in zip(asked, adapters, strict=True):
        r = request.result
        assert r.versions == ([0] * 3 + [3] * 5 if adapter == "a" else [0] * 8)
        for own, version in ((model, 0), (mixed, 3)):
            hidden = own.forward_packed(pack([r.prompt_ids + r.ids]), adapter=adapter)
            logp, _ = logprobs_entropy(hidden[len(r.prompt_ids) - 1 : -1], own.head, torch.tensor(r.ids))
            mine = torch.tensor(r.versions) == version
            assert torch.allclose(logp[mine], torch.tensor(r.logprobs)[mine], atol=1e-4)


def test_an_adapter_is_published_alone():
    """It alone speaks otherwise and is of another version; the base's weights are not copied again."""
    model = from_config(LlamaConfig(**SIZES, initializer_range=0.3))
    for name in ("a", "b"):
        for p in model.add_adapter(name, rank=2):
            torch.nn.init.normal_(p, std=0.3)
    engine = TorchEngine(model, slots=4, stop_ids=[])
    before, embed = copy.deepcopy(model), engine.model.embed
    with torch.no_grad():  # all have learned, but only one shall speak so
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    engine.publish(model, 3, "a")
    assert engine.model.embed is embed
    mixed = before.with_adapter_of(model, "a")
    for adapter in ("a", "b", None):
        asked = [engine.submit(p, SamplingParams(max_tokens=5), adapter=adapter) for p in prompts(3)]
        while engine.busy:
            engine.step()
        for r in (request.result for request in asked):
            assert r.version == (3 if adapter == "a" else 0)
            hidden = mixed.forward_packed(pack([r.prompt_ids + r.ids]), adapter=adapter)
            logp, _ = logprobs_entropy(hidden[len(r.prompt_ids) - 1 : -1], mixed.head, torch.tensor(r.ids))
            assert torch.allclose(logp, torch.tensor(r.logprobs), atol=1e-4)
