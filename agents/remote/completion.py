"""Parser of a chat completion, whole or as a stream, from a server that may send anything.

An incomplete answer is never accepted: JSON must be complete, and a stream must report why it ends
(`finish_reason`).
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import httpx

from ..basics.json_types import JsonObject

LARGEST_ANSWER = 16 << 20
CUT = {"length": "length", "max_tokens": "length", "content_filter": "content_filter"}
"""Finish reasons of replies that were cut, by the server's word. With any other reason, the model has ended its reply."""


GOODBYE_SECONDS = 0.5  # for the end of a body after the end of its stream


class Unreadable(Exception):
    """Raised when an answer is not complete, so that the request may be tried again."""


class TooLarge(Exception):
    """Raised when an answer is larger than any reply can be."""


@dataclass(slots=True)
class Arrival:
    """Progress of one answer, which may break off at any place."""

    beat: Callable[[], None]
    """Function that is called whenever a part of a stream arrives."""
    pieces: int = 0
    """Number of parts of the reply so far, which is about its tokens. The server has counted them."""


@dataclass(slots=True)
class Completion:
    """Reply, and the server's facts about it."""

    text: str = ""
    thinking: str = ""
    reason: str = ""
    """Finish reason in the server's own word."""
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens: list[tuple[str, float]] = field(default_factory=list)
    """Text and log-prob of each token, if the server sent them."""

    @property
    def ending(self) -> str:
        """Return how the reply ended: stop, length or content_filter."""
        return CUT.get(self.reason, "stop")


async def read_completion(reply: httpx.Response, arrival: Arrival) -> Completion:
    """Read the body of an answer."""
    whole: list[bytes] = []
    stream: _Stream | None = None
    lines = _lines(reply)
    try:
        async for line in lines:
            if stream is None and not whole:
                if not line.strip():
                    continue
                if line.startswith((b"data:", b"event:", b"id:", b"retry:", b":")):
                    stream = _Stream(arrival)
            if stream is None:
                whole.append(line)
            else:
                arrival.beat()
                if stream.take(line):
                    # a body that is read to its end leaves a connection that the next request can use
                    with suppress(TooLarge), anyio.move_on_after(GOODBYE_SECONDS):
                        async for _ in lines:
                            pass
                    break
    except httpx.HTTPError as error:
        if stream is None or not stream.answer.reason:
            raise Unreadable(f"{type(error).__name__}: {error}") from error
    return _whole(b"\n".join(whole)) if stream is None else stream.end()


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Cut a body into lines as it arrives, in time linear in its length."""
    rest: list[bytes] = []
    size = 0
    async for chunk in reply.aiter_raw():
        size += len(chunk)
        if size > LARGEST_ANSWER:
            raise TooLarge(f"more than {LARGEST_ANSWER >> 20} MB as an answer")
        first, *others = chunk.split(b"\n")
        rest.append(first)
        for line in others:
            yield b"".join(rest)
            rest = [line]
    yield b"".join(rest)


class _Stream:
    """Collector of a stream's events."""

    def __init__(self, arrival: Arrival) -> None:
        self.answer, self.arrival = Completion(), arrival
        self._text: list[str] = []
        self._thinking: list[str] = []

    def take(self, line: bytes) -> bool:
        """Add a line. Return True at the end of the stream."""
        name, _, value = line.partition(b":")
        if name != b"data":
            return False
        value = value.strip()
        if value == b"[DONE]":
            return True
        event = _json(value)
        if event.get("error"):
            raise Unreadable(f"an error in the stream: {sentence_of(event):.200}")
        _count(self.answer, event.get("usage"))
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index") or self.answer.reason:
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._text.append(_text(delta))
                self._thinking.append(_thinking(delta))
                self.arrival.pieces += bool(self._text[-1] or self._thinking[-1])
            self.answer.tokens += _tokens(choice)
            self.answer.reason = _reason(choice)
        return False

    def end(self) -> Completion:
        """Return the answer, if it is complete."""
        if not self.answer.reason:
            raise Unreadable(f"half a stream: it ended after {self.arrival.pieces} pieces of a reply")
        self.answer.text, self.answer.thinking = "".join(self._text), "".join(self._thinking)
        return self.answer


def _whole(raw: bytes) -> Completion:
    plain = _json(raw)
    choices = plain.get("choices")
    if not isinstance(choices, list) or not choices:
        raise Unreadable(f"an answer without choices: {str(plain):.200}")
    first = choices[0]
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict):
        raise Unreadable(f"an answer without a message: {str(first):.200}")
    answer = Completion(
        text=_text(message),
        thinking=_thinking(message),
        reason=_reason(first) or "stop",
        tokens=_tokens(first),
    )
    _count(answer, plain.get("usage"))
    return answer


def _json(raw: bytes) -> JsonObject:
    try:
        plain = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"an answer that is no JSON ({type(error).__name__}): {raw[:100]!r}") from None
    if not isinstance(plain, dict):
        raise Unreadable(f"an answer that is no object: {str(plain):.100}")
    return plain


def _text(message: Mapping[str, object]) -> str:
    """Return the text of a message or of a part of it. A refusal, which the protocol sends apart, is the model's reply, too."""
    content, refusal = message.get("content"), message.get("refusal")
    if content is None or isinstance(content, str):
        return content or (refusal if isinstance(refusal, str) else "")
    if isinstance(content, list):  # parts; those that are no text are no part of a reply
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    raise Unreadable(f"a reply that is no text: {str(content):.100}")


def _thinking(message: Mapping[str, object]) -> str:
    """Return the thinking that a server with a reasoning parser sends apart from the reply."""
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return thinking if isinstance(thinking, str) else ""


def _reason(choice: Mapping[str, object]) -> str:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or not reason:
        return ""
    if reason in ("error", "abort", "cancelled"):
        raise Unreadable(f"a reply that the server gave up (finish_reason {reason!r})")
    return reason


def _count(answer: Completion, usage: object) -> None:
    """Store the tokens that the server counted. Invalid counts are ignored."""
    if isinstance(usage, dict):
        spent, spoken = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(spent) is int and type(spoken) is int and 0 <= spent < 1 << 31 and 0 <= spoken < 1 << 31:
            answer.tokens_in, answer.tokens_out = spent, spoken


def _tokens(choice: Mapping[str, object]) -> list[tuple[str, float]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    pairs = [
        (token.get("token"), token.get("logprob"))
        for token in (content if isinstance(content, list) else ())
        if isinstance(token, dict)
    ]
    return [
        (text, float(p))
        for text, p in pairs
        if isinstance(text, str) and isinstance(p, int | float) and math.isfinite(p)
    ]


def sentence_of(plain: object) -> str:
    """Return the server's sentence about an error, from the forms that servers use."""
    error = plain.get("error", plain) if isinstance(plain, dict) else plain
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)
