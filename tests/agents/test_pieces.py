"""The text that each token adds: together always the reply, for words, implied spaces and split characters."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.agents import TINY
from unitymas.agents.engines.token_text import pieces
from unitymas.agents.llm import load_policy
from unitymas.agents.model.weights import load_tokenizer
from unitymas.agents.policies import Call

TOKENIZER = load_tokenizer(TINY)


def decoded(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, clean_up_tokenization_spaces=False))


@settings(deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_pieces_of_any_ids_join_to_the_decoded_reply(ids: list[int]) -> None:
    found = pieces(TOKENIZER, ids)
    assert len(found) == len(ids) and "".join(found) == decoded(ids)


@pytest.mark.parametrize("text", ["", "two  spaces\n\n(a, b)", "日本語 🙂", "<answer>Ada Lorn</answer>"])
def test_pieces_of_text_join_to_it_and_no_character_is_broken(text: str) -> None:
    found = pieces(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False))
    assert "".join(found) == text and "\ufffd" not in "".join(found)


def test_a_policy_keeps_its_tokens_when_asked_to() -> None:
    policy = load_policy("tiny", slots=2, max_tokens=8)
    call = Call("answerer", "answerer", ({"role": "user", "content": "Say yes."},))

    def ask() -> dict[str, object]:
        return asyncio.run(policy.act(call)).meta  # type: ignore[union-attr, arg-type]

    assert "tokens" not in ask()
    policy.keep_tokens()
    meta = ask()
    kept = meta["tokens"]
    assert isinstance(kept, dict) and len(kept["text"]) == len(kept["logprob"]) == meta["tokens_out"]
    assert all(p <= 0 for p in kept["logprob"])
