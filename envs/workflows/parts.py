"""Parts that several teams share: passages as text, the reader of an answer, the value of a malformed reply."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...agents.roles import Custom, FormatError
from ...agents.text.reply_readers import first_tagged, tag_reader

UNKNOWN = "unknown"
PROMPTS = Path(__file__).with_name("prompts")
"""Folder of the prompts of all roles, with a file for each family."""
_TAG = re.compile(r"</?\w+\s*/?>")
_answer = tag_reader("final_answer")


def first_line(text: str, most: int = 200) -> str:
    """Return the value of a malformed reply: its first line, without tags."""
    lines = _TAG.sub(" ", text[:4000]).strip().splitlines()
    return " ".join(lines[0].split())[:most] if lines else ""


def read_answer(text: str) -> str:
    """Read an answer: <final_answer>…</final_answer>"""
    answer = _answer(text)
    if answer:
        return answer
    raise FormatError(
        "answer inside <final_answer>", first_tagged(text, "final_answer") or first_line(text) or UNKNOWN
    )


ANSWER = Custom(read_answer, ends=("</final_answer>",))


def passages_text(docs: Sequence[Mapping[str, str]]) -> str:
    """Return passages as text, each in one line."""
    lines = []
    for doc in docs:
        lines.append(f"{doc['title']}: {doc['text']}")
    return "\n".join(lines) or "none"
