"""The text that each token of a reply adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per token; together they are the decoded reply.

    A token alone decodes wrongly where spaces are implied or a character spans tokens. So each is decoded with
    those before it that gave the last text, and what that adds is its own. A token that ends within a character
    adds nothing yet; its successor adds the whole character.
    """
    said: list[str] = []
    begin = known = 0  # ids[begin:known] gave the last text
    for end in range(1, len(ids) + 1):
        before = _decoded(tokenizer, ids[begin:known])
        text = _decoded(tokenizer, ids[begin:end])
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and end < len(ids)):
            said.append("")
            continue
        said.append(text[len(before) :])
        begin, known = known, end
    return said


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)) if ids else ""
