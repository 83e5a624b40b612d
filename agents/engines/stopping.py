"""Stop strings in the text of a reply. They are looked for only at tokens that can complete one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ..text.chat import turn_end
from ..text.reply_readers import reply_end
from ..text.tokenizing import Tokenizer
from .token_text import UNFINISHED, opens_thinking


def pieces_within(tokenizer: Tokenizer, vocab: int) -> list[str]:
    """Return the text that each token adds inside a text (alone, some decoders drop its space)."""
    known = range(min(vocab, len(tokenizer)))
    once, twice = (
        tokenizer.batch_decode([[i] * n for i in known], clean_up_tokenization_spaces=False) for n in (1, 2)
    )
    return [b[len(a) :] if b.startswith(a) else UNFINISHED for a, b in zip(once, twice, strict=True)]


def closing_tokens(stop: tuple[str, ...], pieces: Sequence[str]) -> frozenset[int]:
    """Return the tokens that can complete one of the strings. A token of broken UTF-8 may hold any
    character's last byte.
    """
    return frozenset(
        i
        for i, piece in enumerate(pieces)
        if UNFINISHED in piece or any(s in piece or _ends(s, piece) for s in stop)
    )


def _ends(stop: str, piece: str) -> bool:
    """Tell whether the piece can continue a text and so complete the string."""
    return any(stop.endswith(piece[:n]) for n in range(1, min(len(stop), len(piece)) + 1))


class Stopper:
    """Detector of stop strings in one reply. Stop strings inside of thinking do not count.

    Decoding at every token would cost more than a small model's step. A stop string can only be complete at a token
    that begins with an end of the string, or that holds all of it. So the end of the reply is decoded only there.
    """

    __slots__ = ("closers", "opened", "stop", "tail", "tokenizer")

    def __init__(
        self,
        stop: tuple[str, ...],
        tokenizer: Tokenizer,
        closers: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self.stop, self.tokenizer, self.closers = stop, tokenizer, closers
        self.opened = "<think>" if opens_thinking(tokenizer, prompt) else ""
        self.tail = 4 + max(len(s.encode()) for s in stop)  # no token holds less than a byte

    def stops(self, ids: Sequence[int]) -> bool:
        """Tell whether the reply is complete with its newest token."""
        if ids[-1] not in self.closers:
            return False
        tail = self._decoded(ids[-self.tail :])
        return any(s in tail for s in self.stop) and self._end(self._decoded(ids)) is not None

    def open(self, text: str) -> bool:
        """Tell whether a text continues, although an engine without knowledge of thinking ended it."""
        return self._end(text) is None and any(s in text for s in self.stop)

    def cut(self, text: str) -> str:
        """Cut the text after the first stop string."""
        return text[: self._end(text)]

    def _end(self, text: str) -> int | None:
        """Return the position at which the reply is complete, or None."""
        end = reply_end(self.opened + text, self.stop)
        return None if end is None else end - len(self.opened)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def closing_ids(*owners: object) -> set[int]:
    """Return the tokens that end a reply, according to a model's configurations (the one of generation is a mapping), its
    tokenizer, and the tokenizer's chat template. A base model's configuration often does not know the template's end of a turn.
    """
    closing: set[int] = set()
    # a model that also sees images has a configuration of its own for text
    texts = [owner.get_text_config() for owner in owners if hasattr(owner, "get_text_config")]
    for owner in (*owners, *texts):
        ids = (
            owner.get("eos_token_id") if isinstance(owner, Mapping) else getattr(owner, "eos_token_id", None)
        )
        closing.update([ids] if isinstance(ids, int) else ids or [])
        if getattr(owner, "chat_template", None):
            end = turn_end(cast(Tokenizer, owner))
            closing.update([] if end is None else [end])
    return closing
