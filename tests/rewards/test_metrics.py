"""EM and F1 against an independent statement of the SQuAD and HotpotQA rules."""

import re
import string
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitymas.rewards.metrics import exact_match, f1, normalise

WORDS = [
    "the",
    "a",
    "An",
    "Eiffel",
    "eiffel",
    "tower",
    "Tower.",
    "yes",
    "No",
    "noanswer",
    "no!",
    "1,000",
    "É",
    "-",
]
texts = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join))


def plain_normalise(text: str) -> str:
    """The order of the official script: lower, punctuation, articles, white space."""
    lowered = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def plain_f1(prediction: str, gold: str) -> float:
    guess, want = plain_normalise(prediction), plain_normalise(gold)
    if guess != want and (guess in ("yes", "no", "noanswer") or want in ("yes", "no", "noanswer")):
        return 0.0
    left, same = want.split(), 0
    for token in guess.split():
        if token in left:
            left.remove(token)
            same += 1
    if not guess.split() or not want.split():
        return float(guess == want)
    if not same:
        return 0.0
    precision, recall = same / len(guess.split()), same / len(want.split())
    return 2 * precision * recall / (precision + recall)


@given(texts, st.lists(texts, max_size=3))
def test_agrees_with_the_independent_reference(prediction: str, golds: list[str]) -> None:
    assert normalise(prediction) == plain_normalise(prediction)
    assert f1(prediction, golds) == pytest.approx(max((plain_f1(prediction, g) for g in golds), default=0.0))
    assert exact_match(prediction, golds) == float(plain_normalise(prediction) in map(plain_normalise, golds))


@given(texts, st.lists(texts, min_size=1, max_size=3))
def test_bounds_and_order(prediction: str, golds: list[str]) -> None:
    assert 0.0 <= exact_match(prediction, golds) <= f1(prediction, golds) <= 1.0
    assert f1(prediction, golds) == f1(prediction, golds[::-1])
    assert f1(golds[0], golds) == 1.0


@pytest.mark.parametrize(
    ("prediction", "golds", "em", "f"),
    [
        ("the Eiffel Tower", ["Eiffel tower"], 1.0, 1.0),
        ("tower of Paris", ["Eiffel tower", "Paris"], 0.0, 0.5),
        ("no", ["no idea"], 0.0, 0.0),
        ("Yes.", ["yes"], 1.0, 1.0),
        ("yes it is", ["yes"], 0.0, 0.0),
        ("", [""], 1.0, 1.0),
        ("", ["x"], 0.0, 0.0),
        ("x", [""], 0.0, 0.0),
        ("x", [], 0.0, 0.0),
        ("x y " * 30, ["x y z " * 20], 0.0, 0.6667),  # long texts are counted another way
        ("a a b b", ["a b c"], 0.0, 0.5),  # articles gone: "b b" against "b c"
        ("Eiffel tower", "the Eiffel Tower", 1.0, 1.0),  # a string is one reference, not its letters
    ],
)
def test_table(prediction: str, golds: list[str], em: float, f: float) -> None:
    assert (exact_match(prediction, golds), round(f1(prediction, golds), 4)) == (em, f)


def test_no_answer_is_never_right() -> None:
    assert exact_match(None, [""]) == f1(None, [""]) == 0.0


def test_long_text_is_not_kept() -> None:
    from unitymas.rewards import metrics

    before = metrics._remembered.cache_info().currsize
    assert f1("word " * 10_000, ["word"]) > 0
    assert metrics._remembered.cache_info().currsize <= before + 1


def test_fast_enough_for_millions() -> None:
    def once() -> None:
        f1("Charles Dickens", ["Charles John Huffam Dickens"])

    assert (
        min(timeit.repeat(once, number=2_000, repeat=5)) / 2_000 < 100e-6
    )  # about 2 µs; slack for busy machines
