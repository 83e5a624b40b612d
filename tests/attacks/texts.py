"""Hostile texts of any size, made to cost a reader more than they cost their author."""

from __future__ import annotations

import re
from collections.abc import Iterator


def fill(part: str, size: int) -> str:
    """A part again and again, `size` characters of it."""
    return (part * (size // len(part) + 1))[:size]


def hostile(size: int, tags: tuple[str, ...] = ("answer",)) -> Iterator[tuple[str, str]]:
    """Names and texts of `size` characters or a little less; `tags` are the reader's own."""
    opening, closing = "".join(f"<{t}>" for t in tags), "".join(f"</{t}>" for t in tags)
    half = size // 2
    yield "open tags", fill(opening, size)
    yield "closing tags", fill(closing, size)
    yield "pairs", fill("".join(f"<{t}>x</{t}>" for t in tags), size)
    yield "nested tags", fill(opening, half) + fill(closing, half)
    yield "one tag, much in it", f"<{tags[0]}>{fill('a <b ', size - 60)}</{tags[-1]}>"
    yield "blanks", fill(" \n\t", size)
    yield "a tag and blanks", f"<{tags[0]}>  {fill(' ', size - 60)}<"
    yield "an end and blanks", f"{opening}up{closing}{fill(' ', size - 200)}x"
    yield "braces", fill("{", size)
    yield "nested objects", fill('{"a":', size)
    yield "objects in strings", '{"tests": [' + fill('{"x": "', size - 20)
    yield "an array behind objects", '{"a":' * 60 + "[" + fill("1,", size - 400)
    yield "backslashes", fill("\\", size)
    yield "boxes", fill("\\boxed{", size)
    yield "a box of braces", "\\boxed{" + fill("{}{", size - 10)
    yield "fences", fill("```python\nx\n", size)
    yield "ticks", fill("```", size)
    yield "digits in a tag", f"<{tags[0]}>t{fill('7', size - 60)}</{tags[-1]}>"
    yield "digits in an object", '{"a": ' + fill("7", size - 10) + "}"
    yield "thinking, open", fill("<think>", size)
    yield "thinking, closed", fill("<think></think>", size)
    yield "calls", fill('<tool>{"name": "a"}</tool>', size)
    yield "less-than signs", fill("<", size)
    yield "moves", f"<plan>{fill('1 2 ', size - 20)}</plan>"
    yield "unicode", fill("İ\u202e\ud800ß", size)


def tags_of(description: str) -> tuple[str, ...]:
    """The tags that a format's own words name."""
    return tuple(dict.fromkeys(re.findall(r"</?(\w+)>", description))) or ("answer",)
