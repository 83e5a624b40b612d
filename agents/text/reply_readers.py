"""Readers of a reply's text, in time linear in its length: thinking, tags, JSON, boxes.

Replies are untrusted input: a model in training produces any text. No reader here backtracks over the text, and a
reply longer than `MAX_REPLY` is cut before it is read.

`<think>` and `</think>` are reserved words of a reply. All text up to the last `</think>` is thinking. So a block of
thinking may follow other words, blocks may repeat or nest, and the opening tag may be missing (some chat templates write
it in the prompt). If the last `<think>` is not closed, the whole text is thinking and the reply is empty.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import NoReturn

from ..basics.json_types import JsonObject

MAX_REPLY = 1_000_000
"""Largest number of characters of a reply. A longer reply is cut there and counts as malformed; `meta["cut"]` of its node
holds the original length.
"""

_THINK = re.compile(r"<(/?)think>", re.IGNORECASE)
_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")
_OBJECT = re.compile(r"\{(?=\s*[\"}])")  # where a JSON object may begin
_ATTEMPTS = 200


def split_thinking(text: str) -> tuple[str, str, bool]:
    """Split a text into thinking and reply, and tell whether the thinking is closed.

    The two parts together are the text.
    """
    if "think>" not in text.lower():
        return "", text, True
    end, closed = 0, True
    for mark in _THINK.finditer(text):
        closed = mark[1] == "/"
        if closed:
            end = mark.end()
    if not closed:
        return text, "", False
    end = len(text) - len(text[end:].lstrip()) if end else 0
    return text[:end], text[end:], True


def reply_end(text: str, stop: Iterable[str]) -> int | None:
    """Return the position after the first stop string of a reply, or None. Stop strings in the thinking do not count."""
    thinking, reply, closed = split_thinking(text)
    ends = [reply.index(s) + len(s) for s in stop if s in reply] if closed else []
    return len(thinking) + min(ends) if ends else None


def tag_split(text: str, *names: str, most: int = 64) -> tuple[list[str], list[str]]:
    """Return the first `most` tags of a text, in lower case and with "/" before a closing tag, and the texts around them.

    `names` are regular expressions. There is one more text than tags. The last text is all that follows the last tag.
    """
    parts = tag_pattern(names).split(text, maxsplit=most)
    tags = parts[1::2]
    return tags if "".join(tags).islower() else [tag.lower() for tag in tags], parts[::2]


def tagged(text: str, name: str) -> str | None:
    """Return the content of `<name>…</name>` if the text is exactly that, else None."""
    return tag_reader(name)(text)


@lru_cache(maxsize=512)
def tag_reader(name: str) -> Callable[[str], str | None]:
    """Return the function that `tagged` uses for one name. A caller that reads many replies keeps it."""
    tag = re.escape(name)
    plain = re.compile(rf"\s*<{tag}>([^<]*)</{tag}>\s*").fullmatch  # the usual case: no tag in the content

    def read(text: str) -> str | None:
        match = plain(text)
        if match is not None:
            return match[1].strip()
        tags, around = tag_split(text, name, most=3)
        if tags != [name, f"/{name}"] or around[0].strip() or around[2].strip():
            return None
        return around[1].strip()

    return read


def first_tagged(text: str, name: str, strip: bool = True) -> str | None:
    """Return the text between the first `<name>` and the next `</name>`, or None if either tag is missing."""
    opening = _any((f"<{name}>",)).search(text)
    closing = _any((f"</{name}>",)).search(text, opening.end()) if opening else None
    if opening is None or closing is None:
        return None
    content = text[opening.end() : closing.start()]
    return content.strip() if strip else content


def between(text: str, starts: tuple[str, ...], ends: tuple[str, ...]) -> str | None:
    """Return the text from the first of `starts` to the last of `ends`, both included, or None if there is none."""
    first = _any(starts).search(text)
    last = deque(_any(ends).finditer(text), maxlen=1)
    if first is None or not last or last[0].end() <= first.start():
        return None
    return text[first.start() : last[0].end()]


@lru_cache(maxsize=512)
def tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of the opening and closing tags of these names (regular expressions)."""
    return re.compile(rf"<(/?(?:{'|'.join(names)}))>", re.IGNORECASE)


@lru_cache(maxsize=512)
def _any(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)), re.IGNORECASE)


def json_object(text: str) -> tuple[JsonObject | None, str]:
    """Return the first JSON object in the text and the part of the text that it came from, or None and "".

    The search ends after 200 attempts, or when it has read about four times the length of the text. So a reply of a million
    braces, or of nested objects that never close, costs little.
    """
    decoder = json.JSONDecoder(parse_constant=_no_number)
    spent = 0
    for brace in islice(_OBJECT.finditer(text), _ATTEMPTS):
        start = brace.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            spent += error.pos - start
        except (
            ValueError,
            RecursionError,
        ):  # a number of a thousand digits, or deep nesting: the error does not say how far the decoder read
            spent += len(text) - start
        else:
            if isinstance(value, dict) and is_shallow(value):
                return value, text[start:end]
            spent += end - start
        if spent > 4 * len(text):
            break
    return None, ""


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def first_json_object(text: str) -> JsonObject | None:
    """Return the first JSON object in the text, or None."""
    return json_object(text)[0]


def is_shallow(value: object, most: int = 50) -> bool:
    """Tell whether plain data is nested at most `most` levels deep. Deeper data would end in a `RecursionError`."""
    level = [value]
    for _ in range(most):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [child for values in inner for child in values]
        if not level:
            return True
    return False


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}`, or None if there is none or its braces do not close."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    begin, depth = start + len(_BOX), 1
    for brace in _BRACE.finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.start()].strip()
    return None
