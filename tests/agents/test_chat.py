"""Conversations to tokens: what was sampled is never tokenised again."""

import asyncio
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.engines.stopping import closing_ids
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.llm import LLMPolicy, RunPolicy, load_policy
from unitymas.agents.model.weights import from_config, save_model
from unitymas.agents.policies import Call
from unitymas.agents.text.attributed_text import Spoken
from unitymas.agents.text.chat import Chat

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else '(cut)' }}")


@pytest.fixture
def tokenizer():
    """Bytes, and merges that make the same text tokenisable in several ways."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*bytes_, "ab", "abc", "bc"])}
    raw = Tokenizer(models.BPE(vocab, merges=[("a", "b"), ("b", "c"), ("ab", "c")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    fast.add_special_tokens(
        {"additional_special_tokens": [f"<|{r}|>" for r in ("system", "user", "assistant", "tool")]}
    )
    fast.chat_template = TEMPLATE
    return fast


def chat_of(tokenizer, **how):
    return Chat(tokenizer, stop_ids=[tokenizer.eos_token_id], **how)


def call(*messages, node="0", episode="e", role="solver"):
    return Call(agent=role, role=role, messages=messages, node=node, episode=episode)


def user(text):
    return {"role": "user", "content": text}


def spoken(text, node):
    return {"role": "assistant", "content": Spoken(text, node)}


def test_a_plain_conversation_is_what_the_template_says(tokenizer):
    prompt = chat_of(tokenizer).prompt(call(user("abc")))
    assert tokenizer.decode(prompt.ids) == "<|user|>abc<|end|><|assistant|>"
    assert prompt.continued is None


ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SILENT = TEMPLATE.replace("%}<|{{", "%}{% if m['role'] != 'system' %}<|{{").replace(
    "<|end|>{%", "<|end|>{% endif %}{%"
)


@pytest.mark.parametrize("template", [ALTERNATING, SILENT], ids=["refuses", "leaves out in silence"])
def test_a_template_without_system_messages_shows_their_words_to_the_user(tokenizer, template):
    """As Gemma's and Mistral's, which refuse them, and some, which drop them: a role must see its instructions."""
    tokenizer.chat_template = template
    chat = chat_of(tokenizer, system={"solver": "be brief"})
    asked = "<|user|>be brief\n\nwhy?<|end|>"
    assert tokenizer.decode(chat.prompt(call(user("why?"))).ids) == f"{asked}<|assistant|>"
    turns = [{"role": "system", "content": "be brief"}, user("why?"), {"role": "assistant", "content": "so"}]
    assert tokenizer.decode(chat.conversation(turns, ready=False)) == f"{asked}<|assistant|>so<|end|>"


def test_the_templates_end_of_a_turn_ends_a_reply_whatever_the_configuration_says(tokenizer):
    """A base model names the end of a document as eos; its template ends turns otherwise, and so would replies never end."""
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    tokenizer.add_special_tokens({"eos_token": "<|document|>"})
    assert closing_ids(tokenizer) == {end, tokenizer.convert_tokens_to_ids("<|document|>")}
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", " ")
    assert closing_ids(tokenizer) == {tokenizer.eos_token_id}
    tokenizer.chat_template = None
    assert closing_ids(tokenizer) == {tokenizer.eos_token_id}


def test_messages_in_a_row_are_joined_where_roles_must_alternate(tokenizer):
    tokenizer.chat_template = ALTERNATING
    messages = [user("a"), {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}, user("d")]
    text = tokenizer.decode(chat_of(tokenizer).prompt(call(*messages)).ids)
    assert text == "<|user|>a<|end|><|assistant|>b<|end|><|user|>c\n\nd<|end|><|assistant|>"


def test_a_reply_that_goes_on_is_found_behind_joined_words(tokenizer):
    """What was sampled is not tokenised again, although the system's words stand in the user's message."""
    tokenizer.chat_template = ALTERNATING
    chat = chat_of(tokenizer, system={"solver": "be brief"})
    first = call(user("why?"))
    prompt = chat.prompt(first)
    chat.remember(
        first, prompt, [*tokenizer.encode("a"), *tokenizer.encode("bc"), tokenizer.eos_token_id], "abc"
    )
    later = chat.prompt(call(user("why?"), spoken("abc", "0"), user("and?"), node="1"))
    assert later.continued == "0" and later.ids[: len(prompt.ids)] == prompt.ids


def test_each_role_has_its_system_prompt(tokenizer):
    chat = chat_of(tokenizer, system={"solver": "Solve."})
    text = tokenizer.decode(chat.prompt(call(user("x"))).ids)
    assert text == "<|system|>Solve.<|end|><|user|>x<|end|><|assistant|>"
    text = tokenizer.decode(chat.prompt(call({"role": "system", "content": "Briefly."}, user("x"))).ids)
    assert text.startswith("<|system|>Solve.\n\nBriefly.<|end|>")
    assert "Solve" not in tokenizer.decode(chat.prompt(call(user("x"), role="judge")).ids)


@pytest.mark.parametrize("closed", [True, False])
def test_a_conversation_goes_on_from_the_sampled_tokens(tokenizer, closed):
    chat = chat_of(tokenizer)
    end = tokenizer.eos_token_id
    first = call(user("abc"))
    shown = chat.prompt(first)
    sampled = [tokenizer.convert_tokens_to_ids(t) for t in ("a", "bc")]  # not how "abc" is tokenised
    assert tokenizer.encode("abc") != sampled
    chat.remember(first, shown, sampled + [end] * closed, "abc")
    second = chat.prompt(call(user("abc"), spoken("abc", "0"), user("b"), node="1"))
    assert second.continued == "0"
    assert second.ids[: len(shown.ids) + 2] == shown.ids + sampled
    assert tokenizer.decode(second.ids[len(shown.ids) + 2 :]) == "<|end|><|user|>b<|end|><|assistant|>"
    chat.remember(call(node="1"), second, [5, end], tokenizer.decode([5]))
    said = tokenizer.decode([5])
    third = chat.prompt(
        call(user("abc"), spoken("abc", "0"), user("b"), spoken(said, "1"), user("c"), node="2")
    )
    assert third.continued == "1" and third.ids[: len(second.ids) + 1] == [*second.ids, 5]


def test_without_an_exact_prefix_a_conversation_is_rendered_anew(tokenizer):
    chat = chat_of(tokenizer)
    first = call(user("abc"))
    chat.remember(first, chat.prompt(first), [1, 2], "xy")
    assert chat.prompt(call(user("other"), spoken("xy", "0"), user("b"))).continued is None
    assert chat.prompt(call(user("abc"), spoken("edited", "0"), user("b"))).continued is None
    assert chat.prompt(call(user("abc"), spoken("xy", "0"), user("b"), episode="f")).continued is None
    assert chat.prompt(call(user("abc"), spoken("xy", "0"), user("b"))).continued == "0"
    chat.forget("e")
    assert chat.prompt(call(user("abc"), spoken("xy", "0"), user("b"))).continued is None


def test_a_template_that_rewrites_the_past_is_never_continued(tokenizer):
    tokenizer.chat_template = FORGETFUL
    chat = chat_of(tokenizer)
    first = call(user("abc"))
    chat.remember(first, chat.prompt(first), [1, 2], "xy")
    prompt = chat.prompt(call(user("abc"), spoken("xy", "0"), user("b")))
    assert prompt.continued is None and "(cut)" in tokenizer.decode(prompt.ids)


def test_a_tokenizer_without_a_template_and_a_message_it_refuses_are_told(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match="roles user: no such role"):
        chat_of(tokenizer).prompt(call(user("x")))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template: add chat_template\.jinja"):
        chat_of(tokenizer)


def model_for(tokenizer):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    return from_config(config)


def test_a_policy_plays_a_conversation_and_its_samples_share_prefixes(tokenizer):
    policy = LLMPolicy(
        TorchEngine(model_for(tokenizer), tokenizer, slots=4),
        tokenizer,
        sampling=SamplingParams(max_tokens=9),
    )

    async def talk():
        messages, last = [user("abc")], None
        for node in range(4):
            answer, said = await policy.say(call(*messages, node=str(node)))
            if last is not None:
                assert said.prompt_ids[: len(last.prompt_ids) + len(last.ids)] == last.prompt_ids + last.ids
                assert said.cached > 0 or len(said.prompt_ids) < 33
            messages += [spoken(answer.text, str(node)), user("b")]
            last = said
        return answer

    answer = asyncio.run(talk())
    assert answer.meta["tokens_out"] == 9 and answer.meta["finish_reason"] in ("stop", "length")


def test_a_prompt_that_does_not_fit_is_an_empty_reply_with_its_reason(tokenizer):
    policy = LLMPolicy(TorchEngine(model_for(tokenizer), tokenizer, slots=4, context=32), tokenizer)
    answer = asyncio.run(policy.act(call(user("x" * 40))))
    assert (answer.text, answer.meta["finish_reason"]) == ("", "overflow")


def test_half_a_surrogate_pair_in_a_reply_fails_no_later_prompt(tokenizer):
    """`json.loads` makes one of what a role may write; no tokenizer takes it."""
    half = json.loads('"\\ud800"')
    voice = chat_of(tokenizer).plain
    assert voice.encode(f"a{half}b") == voice.encode("a\ufffdb") and voice.encode(
        "a\U0001f600"
    ) != voice.encode("a\ufffd")
    policy = LLMPolicy(
        TorchEngine(model_for(tokenizer), tokenizer, slots=4),
        tokenizer,
        sampling=SamplingParams(max_tokens=9),
    )
    assert asyncio.run(policy.act(call(user(f"say {half}")))).meta["tokens_out"] == 9


def test_policies_are_loaded_by_name(tokenizer, tmp_path):
    save_model(model_for(tokenizer), tmp_path / "policies" / "team", tokenizer)
    (tmp_path / "config.yaml").write_text("map: {'*': team, judge: scripted}\n")
    asked = call(user("abc"))
    asked.max_tokens, asked.choices = 4, ("ab", "c")
    by_path = asyncio.run(load_policy(f"hf:{tmp_path / 'policies' / 'team'}").act(asked))
    run = load_policy(f"run:{tmp_path}")
    assert isinstance(run, RunPolicy)

    async def ask():
        return await run.act(asked)

    assert asyncio.run(ask()).text == by_path.text and by_path.text in ("ab", "c")
    with pytest.raises(ValueError, match="'scripted', which is no policy"):
        run.act(call(user("x"), role="judge"))
    with pytest.raises(FileNotFoundError, match="no model at"):
        load_policy("hf:nowhere/at/all")
    with pytest.raises(FileNotFoundError, match="no run directory"):
        load_policy(f"run:{tmp_path / 'policies'}")
