"""What several teams share: how passages are told, how an answer is read, what a malformed line is worth."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...agents.roles import Custom, FormatError

UNKNOWN = "unknown"
_FINAL = re.compile(r"\s*<final_answer>(.*?)</final_answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?\w+\s*/?>")


def first_line(text: str, most: int = 200) -> str:
    """What to make of a malformed reply: its first line, without tags."""
    lines = _TAG.sub(" ", text[:4000]).strip().splitlines()
    return " ".join(lines[0].split())[:most] if lines else ""


def enclosed(text: str, opening: str, closing: str) -> str:
    """What stands between two tags when nothing else is in the text; otherwise nothing."""
    said = text.strip()
    if said.startswith(opening) and said.endswith(closing):
        return said[len(opening) : -len(closing)].strip()
    return ""


def read_answer(text: str) -> str:
    """<final_answer>…</final_answer>"""
    answer = enclosed(text, "<final_answer>", "</final_answer>")
    if answer and "<final_answer>" not in answer:
        return answer
    inside = _FINAL.search(text[:20_000])
    raise FormatError(
        "answer inside <final_answer>", (inside[1].strip() if inside else first_line(text)) or UNKNOWN
    )


ANSWER = Custom(read_answer, ends=("</final_answer>",))


def passages_text(docs: Sequence[Mapping[str, str]]) -> str:
    """Passages, one a line."""
    lines = []
    for doc in docs:
        lines.append(f"{doc['title']}: {doc['text']}")
    return "\n".join(lines) or "none"
