"""Text metrics of question answering: exact match and token F1, as SQuAD and HotpotQA define them.

    exact_match("The Eiffel Tower!", ["eiffel tower"])      # 1.0
    f1("tower of Paris", ["Eiffel tower", "Paris"])         # 0.5: the best match among the references

Both metrics compare *normalised* text: lower case, no ASCII punctuation, no English articles, single spaces.
HotpotQA's rule holds: "yes", "no" and "noanswer" match only as a whole, so "no" scores 0 against "no idea".
Two texts that are empty after normalisation are equal. An empty text against any other scores 0. Without references
the score is 0.

Rewards compare the same few strings millions of times, so normalised forms are cached.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = frozenset({("yes",), ("no",), ("noanswer",)})
_REMEMBERED_LENGTH = 2_000  # longer texts rarely come twice, and would fill the memory


def normalise(text: str) -> str:
    """Normalise a text: lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_tokens(text))


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction equals one of the normalised references, else 0.0.

    ``None``, for a role that gave no answer, scores 0. A single string counts as one reference.
    """
    if prediction is None:
        return 0.0
    guess = _tokens(prediction)
    return float(any(guess == _tokens(gold) for gold in _references(golds)))


def f1(prediction: str | None, golds: str | Iterable[str]) -> float:
    """Return the harmonic mean of token precision and recall, against the reference that matches best."""
    if prediction is None:
        return 0.0
    guess = _tokens(prediction)
    best = 0.0
    for gold in _references(golds):
        best = max(best, _overlap(guess, _tokens(gold)))
    return best


def _references(golds: str | Iterable[str]) -> Iterable[str]:
    return (golds,) if isinstance(golds, str) else golds


def _overlap(guess: tuple[str, ...], gold: tuple[str, ...]) -> float:
    if guess == gold:
        return 1.0
    if not guess or not gold or guess in _ALL_OR_NOTHING or gold in _ALL_OR_NOTHING:
        return 0.0
    common = _common_short(guess, gold) if len(gold) < 32 else sum((Counter(guess) & Counter(gold)).values())
    return 2 * common / (len(guess) + len(gold))


def _common_short(guess: tuple[str, ...], gold: tuple[str, ...]) -> int:
    """Return the size of the multiset intersection. For a few words, a list is faster than a Counter."""
    left = list(gold)
    for token in guess:
        if token in left:
            left.remove(token)
    return len(gold) - len(left)


def _tokens(text: str) -> tuple[str, ...]:
    text = text if isinstance(text, str) else str(text)  # JSON answers may be numbers
    return _remembered(text) if len(text) <= _REMEMBERED_LENGTH else _split(text)


def _split(text: str) -> tuple[str, ...]:
    return tuple(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


_remembered = lru_cache(maxsize=100_000)(_split)
