"""Stop strings: when a reply has said one, judged on its text but found out cheaply, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def closing_tokens(stop: tuple[str, ...], tokenizer: Any, vocab: int) -> frozenset[int]:
    """Tokens at which one of the strings may end; a token of broken UTF-8 may hold any character's last byte."""
    last = {s[-1] for s in stop} | {"\ufffd"}
    known = range(min(vocab, len(tokenizer)))
    pieces = tokenizer.batch_decode([[i] for i in known], clean_up_tokenization_spaces=False)
    return frozenset(i for i, piece in zip(known, pieces, strict=True) if last & set(piece))


class Stopper:
    """Watches one reply for its stop strings.

    Decoding at every token would cost more than a small model's step. A stop string can only be complete at a token
    that holds its last character, so only there is the tail of the reply decoded.
    """

    __slots__ = ("closers", "stop", "tail", "tokenizer")

    def __init__(self, stop: tuple[str, ...], tokenizer: Any, closers: frozenset[int]) -> None:
        self.stop, self.tokenizer, self.closers = stop, tokenizer, closers
        self.tail = 4 + max(len(s.encode()) for s in stop)  # no token holds less than a byte

    def stops(self, ids: Sequence[int]) -> bool:
        """Is the reply complete with its newest token?"""
        if ids[-1] not in self.closers:
            return False
        text = self.tokenizer.decode(ids[-self.tail :], clean_up_tokenization_spaces=False)
        return any(s in text for s in self.stop)

    def cut(self, text: str) -> str:
        """The text up to and including the first stop string."""
        ends = [text.index(s) + len(s) for s in self.stop if s in text]
        return text[: min(ends)] if ends else text
