"""Search terms of a text.

Terms are runs of letters and digits, in lower case and without accents. English stop words are dropped. English stems are an
option. The settings are part of an index and of its fingerprint, so queries and passages are always read in the same way.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

_STOP_WORDS = (
    "a an and are as at be but by did do does for from had has have he her his how i if in into is it its of on or "
    "she such that the their then there these they this to was we were what when where which who whom whose why "
    "will with you"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_words = re.compile(r"[^\W_]+").findall
_ascii_words = re.compile(r"[a-z0-9]+").findall  # the same on ASCII text, and twice as fast


def fold(text: str) -> str:
    """Return a text in lower case and without accents: 'zizka' for 'Žižka'."""
    letters = unicodedata.normalize("NFKD", text)
    return "".join(letter for letter in letters if not unicodedata.combining(letter)).lower()


@dataclass(frozen=True, slots=True)
class Analyzer:
    """Analyzer that turns a text into the terms for index and search."""

    stem: str = ""
    """Name of a Snowball stemmer ("english"), which needs the package PyStemmer. Empty: no stems."""

    stop_words: bool = True
    """Flag: drop English stop words."""

    _stem_words: Callable[[list[str]], list[str]] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        if self.stem:
            object.__setattr__(self, "_stem_words", _stemmer(self.stem))

    def __call__(self, text: str) -> list[str]:
        words: list[str] = _ascii_words(text.lower()) if text.isascii() else _words(fold(text))
        if self.stop_words:
            words = [word for word in words if word not in STOP_WORDS]
        return words if self._stem_words is None else self._stem_words(words)

    def __reduce__(self) -> tuple[object, ...]:  # a stemmer holds C state and does not pickle
        return Analyzer, (self.stem, self.stop_words)


def _stemmer(language: str) -> Callable[[list[str]], list[str]]:
    try:
        import Stemmer
    except ImportError as error:
        raise ModuleNotFoundError(
            f"stemming ({language!r}) needs the PyStemmer package: pip install PyStemmer"
        ) from error
    try:
        stem_words: Callable[[list[str]], list[str]] = Stemmer.Stemmer(language).stemWords
    except KeyError:
        raise ValueError(
            f"no stemmer for {language!r}; choose from {', '.join(Stemmer.algorithms())}"
        ) from None
    return stem_words
