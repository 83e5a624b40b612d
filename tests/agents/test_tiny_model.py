"""The embedded tiny model: it loads, its tokenizer loses nothing, it copies names it never saw."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unitymas.agents
from unitymas.agents.model.attention import pack
from unitymas.agents.model.llama import Llama
from unitymas.agents.model.weights import load_model
from unitymas.envs.data import mini
from unitymas.trainers.tiny import make as tiny
from unitymas.trainers.tiny.drills import system_text
from unitymas.trainers.tiny.school import School
from unitymas.trainers.tiny.tokenizer import OPENING, SPECIAL, build, grow, known_words, pieces

HOME = Path(unitymas.agents.__path__[0]) / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(HOME)


@pytest.fixture(scope="module")
def model() -> Llama:
    return load_model(HOME)


def round_trip(tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=False))


CHARACTERS = (
    st.text(st.sampled_from([*OPENING, " ", "/", "a", "é", "日", "\x00", "\r", "|", "7", "_", "😀"]))
    | st.text()
)


@settings(deadline=None, max_examples=300)
@given(CHARACTERS)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    if not any(0xD800 <= ord(c) < 0xE000 for c in text):  # lone surrogates are no text
        assert round_trip(tokenizer, text) == text


def test_the_mini_world_is_whole_words(tokenizer: Any) -> None:
    for passage in mini.load("qa", "test", size=40).passages or ():
        text = f"{passage['title']}: {passage['text']}"
        assert round_trip(tokenizer, text) == text
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        assert all(len(token) > 1 or not token.isalnum() for token in tokens), tokens
        assert len(tokens) <= 45


def test_a_word_is_one_token_wherever_it_stands(tokenizer: Any) -> None:
    (ada,) = tokenizer("Ada")["input_ids"]
    for text in ("by Ada", "<answer>Ada</answer>", "\nAda", '{"sub": ["Ada"]}', "(Ada)", "\\boxed{Ada}"):
        assert ada in tokenizer(text)["input_ids"], text


def test_the_chat_template_is_what_the_model_learned(tokenizer: Any) -> None:
    lesson = (
        {"role": "system", "content": "Answer the question."},
        {"role": "user", "content": "Question: Who made The Silent River?"},
        {"role": "assistant", "content": "<final_answer>Ada Abbott</final_answer>"},
    )
    ids, said = tiny.encode(lesson, tokenizer)
    assert tokenizer.apply_chat_template(list(lesson), tokenize=True, return_dict=True)["input_ids"] == ids
    learned = [i for i, own in zip(ids, said, strict=True) if own]
    assert tokenizer.decode(learned) == "<final_answer>Ada Abbott</final_answer><|end|>"
    prompt = tokenizer.apply_chat_template(
        list(lesson[:2]), tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert prompt == ids[: len(prompt)] and prompt[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_words_are_appended_and_keep_their_ids() -> None:
    words = grow([], [" Ada", " Bruno"], ["Ada met Bruno. Ada met Cara."])
    more = grow(words, [], ["Cara and Dora and Dora"])
    assert more[: len(words)] == words and " and" in more
    assert known_words(build(more)) == more
    assert build(words).token_to_id("<|end|>") == SPECIAL.index("<|end|>")
    with pytest.raises(ValueError, match="do not fit"):
        grow([], [f" w{i}" for i in range(9)], [], size=len(SPECIAL) + 256 + 8)
    assert pieces(["a <b>x</b>"])[" <b>"] == 1


def test_it_is_small(model: Llama) -> None:
    assert sum(file.stat().st_size for file in HOME.iterdir()) < 10_000_000
    assert model.shape.context >= 1024
    assert sum(p.numel() for p in model.parameters()) < 3_000_000


@torch.no_grad()
def right_share(model: Llama, examples: list[tiny.Example]) -> float:
    """The share of learned tokens that are the likeliest."""
    packed = pack([example.ids for example in examples])
    hidden = model.forward_packed(packed)
    right = total = 0
    for example, rows in zip(examples, packed.rows, strict=True):
        likeliest = model.logits(hidden[rows]).argmax(-1)[:-1]
        learned = torch.tensor(example.weight[1:]) == 1.0
        right += int((likeliest == torch.tensor(example.ids[1:]))[learned].sum())
        total += int(learned.sum())
    return right / total


def test_it_copies_any_token(model: Llama) -> None:
    rng = random.Random(1)
    assert right_share(model, [tiny.repeats(rng, model.shape.vocab, 128) for _ in range(16)]) > 0.9


def test_it_reads_names_that_no_training_text_holds(model: Llama, tokenizer: Any) -> None:
    """Answers to simple questions about the world of the test split, word by word."""
    data = mini.load("qa-single", "test", size=64)
    texts = {p["title"]: f"{p['title']}: {p['text']}" for p in data.passages or ()}
    titles = sorted(texts)
    rng = random.Random(2)
    examples = []
    for row in data.rows:
        told = [*rng.sample(titles, 1), *row["supporting"]]
        rng.shuffle(told)
        lesson = (
            {"role": "system", "content": system_text("mask-hotpotqa", "summarizer")},
            {
                "role": "user",
                "content": "Passages:\n" + "\n".join(texts[t] for t in told) + f"\nQuery: {row['question']}",
            },
            {"role": "assistant", "content": f"<evidence>{row['answers'][0]}</evidence>"},
        )
        ids, said = tiny.encode(lesson, tokenizer)
        tags = {*tokenizer("<evidence>Ada</evidence>")["input_ids"], tokenizer.eos_token_id}
        weight = [float(own and token not in tags) for own, token in zip(said, ids, strict=True)]
        examples.append(tiny.Example(ids, weight))
    assert (
        right_share(model, examples) > 0.4
    )  # words of names and values; one at random would be right 1 time in 20


@torch.no_grad()
def test_a_head_of_the_new_model_looks_at_the_token_before(tokenizer: Any) -> None:
    fresh = tiny.new_model(tokenizer, seed=0)
    seen: list[Any] = []

    def watch(layer: int, q: Any, k: Any, v: Any) -> Any:
        scores = q[:, 0] @ k[:, 0].T / q.shape[-1] ** 0.5
        seen.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf")).softmax(-1))
        return torch.zeros_like(q)

    fresh(torch.randint(0, len(tokenizer), (200,)), torch.arange(200), watch)
    assert seen[0].diagonal(-1).mean() > 0.8


def test_lessons_show_no_name_of_another_split() -> None:
    from itertools import islice

    groups = islice(School(3, tasks=256).lessons(0.5), 60)
    said = " ".join(m["content"] for group in groups for lesson in group for m in lesson)
    words = set(said.replace("?", " ").replace(".", " ").replace(",", " ").split())
    assert not words & {word.strip() for word in tiny.held_out_words()}
