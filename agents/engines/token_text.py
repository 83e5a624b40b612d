"""Text pieces: the text that each token of a reply adds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..text.reply_readers import split_thinking
from ..text.tokenizing import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return one text per token. Joined, they are the decoded reply.

    A token alone decodes wrongly where spaces are implied or a character spans tokens. So each token is decoded together
    with the tokens before it that gave the last text, and its piece is what it adds. A token that ends within a character
    adds nothing yet; the next token adds the whole character.
    """
    texts: list[str] = []
    begin = known = 0  # ids[begin:known] gave the last text
    for end in range(1, len(ids) + 1):
        before = _decoded(tokenizer, ids[begin:known])
        text = _decoded(tokenizer, ids[begin:end])
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and end < len(ids)):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, known = known, end
    return texts


def opens_thinking(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Tell whether a prompt ends in an open thinking block, as some chat templates write it. The reply then
    begins inside it.
    """
    return _opens_thinking(tokenizer, tuple(prompt[-16:]))


@lru_cache(maxsize=4096)  # each prompt is checked twice, and samples of a group share their prompt
def _opens_thinking(tokenizer: Tokenizer, tail: tuple[int, ...]) -> bool:
    return _decoded(tokenizer, tail).rstrip().lower().endswith("<think>")


def thinking_tokens(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """Count the first tokens of a reply that are thinking; 0 where there is none, or where it is never
    closed.
    """
    thinking, _, closed = split_thinking(text)
    if not thinking or not closed:
        return 0
    length = 0
    for count, piece in enumerate(pieces(tokenizer, ids), 1):
        length += len(piece)
        if length >= len(thinking.rstrip()):
            return count
    return len(ids)


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) if ids else ""
