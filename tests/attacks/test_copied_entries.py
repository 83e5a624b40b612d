"""The same episodes under several names, and pages that stay small whatever an entry holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unitymas.benchmarks.leaderboard import board as leaderboard
from unitymas.benchmarks.leaderboard import copies, entry_page
from unitymas.benchmarks.leaderboard.speakers import fewest_tokens

from .forging import Entry, honest

Forge = Callable[[Entry], Any]
FOUR = 2 * 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest(tmp_path_factory.mktemp("honest"), tasks=2, k=2)


def renamed(e: Entry) -> None:
    e.metadata.update(name="A bold team", authors="them")


def other_model(e: Entry) -> None:
    renamed(e)
    seat = e.roles["answerer"]
    seat.update(player="hf:bold/model", model="hf:bold/model", weights="2" * 64, template_sha="3" * 16)
    for t in e.traces:
        t["tags"]["team"]["answerer"] = "hf:bold/model"
        for n in t["nodes"]:
            if n["role"] == "answerer":
                n["meta"]["policy"] = "hf:bold/model"


def other_tokens(e: Entry) -> None:
    other_model(e)
    for t in e.traces:
        t["tags"]["seconds"] = 1.0
        for n in t["nodes"]:
            if n["role"] == "answerer":
                n["meta"].update(tokens_in=n["meta"]["tokens_in"] + 7, tokens_out=6, version=3)


def backdated(e: Entry) -> None:
    other_model(e)
    e.results["run"]["date"] = "2001-01-01T00:00:00+00:00"


@pytest.mark.parametrize("forge", [renamed, other_model, other_tokens, backdated])
def test_a_copy_is_marked_by_the_name_of_the_other(source: Path, tmp_path: Path, forge: Forge) -> None:
    """Both are marked and both stay: a copy with an early date removes nobody."""
    for name, change in (("first", lambda e: None), ("second", forge)):
        entry = Entry(source, tmp_path / "board" / name)
        change(entry)
        entry.sign()
        entry.write()
    entries, rejected = leaderboard.build(tmp_path / "board", tmp_path / "site")
    assert not rejected and all(entry.verified for entry in entries)
    mine, theirs = sorted(entries, key=lambda entry: entry.slug)
    assert mine.same.startswith("same episodes as A bold team (second-")
    assert theirs.same.startswith("same episodes as An honest team (first-")
    assert ("earlier" in mine.same) == (forge is backdated)
    html = (tmp_path / "site" / "index.html").read_text()
    assert "same episodes as A bold team" in html and "same episodes as An honest team" in html
    assert all(row["same"] for row in json.loads((tmp_path / "site" / "leaderboard.json").read_text()))


def told(name: str, said: list[int], *, date: str = "2026", scripted: bool = False) -> copies.Sketch:
    return copies.Sketch(name, date, [str(n) for n in said], scripted)


def test_parts_of_an_entry_count_too_and_chance_does_not() -> None:
    whole = list(range(40))
    marks = copies.marks({
        "a": told("A", whole), "half": told("Half", [*whole[:20], *range(100, 120)]),
        "few": told("Few", [*whole[:7], *range(200, 233)]), "other": told("Other", list(range(300, 340))),
    })  # fmt: skip
    assert marks == {
        "a": "20 of 40 the same episodes as Half (half, dated alike)",
        "half": "20 of 40 the same episodes as A (a, dated alike)",
    }


def test_a_tail_of_the_tasks_is_a_copy_too() -> None:
    """An entry on fewer tasks, all of which another has."""
    marks = copies.marks({"a": told("A", list(range(40))), "b": told("B", [1, 2, 3])})
    assert marks["b"] == "3 of 3 the same episodes as A (a, dated alike)"


def test_scripted_entries_are_alike_by_themselves_and_still_no_model_is_one() -> None:
    said = list(range(10))
    alike = copies.marks({"a": told("A", said, scripted=True), "b": told("B", said, scripted=True)})
    assert alike == {}
    assert set(copies.marks({"a": told("A", said, scripted=True), "b": told("B", said)})) == {"a", "b"}


def test_right_replies_are_no_copies_unless_all_are_the_same() -> None:
    """Teams that learned say what the expert says; who has nothing else than another's episodes is marked still."""
    right = list(range(40))
    board = {
        "expert": told("Expert", right, scripted=True), "one": told("One", [*right[:30], *range(100, 110)]),
        "two": told("Two", [*right[5:35], *range(200, 210)]),
    }  # fmt: skip
    assert copies.marks(board) == {}
    copied = copies.marks({**board, "copy": told("Copy", board["one"].digests)})  # type: ignore[arg-type]
    assert set(copied) == {"one", "copy"}
    half = copies.marks({**board, "half": told("Half", [*right[:10], *range(100, 110), *range(200, 220)])})
    assert (
        "two" not in half and "half" not in half
    )  # half of what is not the expert's would have to be one entry's
    assert set(copies.marks({"expert": board["expert"], "all": told("All", right)})) == {"expert", "all"}


def test_many_copies_make_short_marks() -> None:
    many = {str(n): told("N" * 1000, list(range(500))) for n in range(300)}
    marks = copies.marks(many)
    assert len(marks) == 300 and max(map(len, marks.values())) < 600


@pytest.mark.parametrize(
    ("text", "fewest"),
    [("", 0), ("a", 1), (" " * 500, 1), ("-=" * 250, 1), ("é" * 5000, 20), ("the cat sat on a mat " * 10, 2), ("x" * 10_000, 20)],
)  # fmt: skip
def test_the_bound_on_tokens_is_one_that_every_tokenizer_keeps(text: str, fewest: int) -> None:
    assert fewest_tokens([text]) == fewest


def test_the_bound_holds_for_the_tokenizer_here() -> None:
    tokenizers = pytest.importorskip("transformers")
    from unitymas.agents import TINY

    tokenizer = tokenizers.AutoTokenizer.from_pretrained(str(TINY))
    for text in (
        "Question: who?",
        "a" * 300,
        "\n\n\n" * 90,
        "antidisestablishmentarianism " * 20,
        "日本語" * 30,
    ):
        assert fewest_tokens([text]) <= len(tokenizer(text)["input_ids"])


# sizes of pages ------------------------------------------------------------------------------------------


def test_an_entry_of_a_thousand_roles_has_a_small_row(source: Path, tmp_path: Path) -> None:
    entry = Entry(source, tmp_path / "board" / "wide")
    figure = entry.results["figures"]["roles"]["answerer"]
    many = {f"role {n} " + "x" * 150: copy.deepcopy(figure) for n in range(800)}
    entry.results["figures"]["roles"].update(many)
    shown = leaderboard.Entry(
        "wide", entry.metadata, entry.results, ("own code: not verified: " + "y" * 900,)
    )
    for name in many:
        entry.roles[name] = {**entry.roles["answerer"], "more": "z" * 5000}
    page = leaderboard._body("board", [[shown]], {f"bad {n}": ["z" * 5000] for n in range(5000)})
    assert len(page) < 200_000 and "and 4,800 more" in page
    assert len(json.dumps(leaderboard._summary(shown))) < 100_000


def test_a_page_of_episodes_carries_so_many_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry(source, tmp_path / "entry")
    one = len(json.dumps(entry.traces[0]))
    monkeypatch.setattr(entry_page, "SHOWN_BYTES", int(one * 2.5))
    lines = [json.dumps(t).encode() for t in entry.traces]
    assert 1 <= len(list(entry_page._first(lines))) < FOUR


def test_a_board_lists_so_many_entries(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "MOST_ENTRIES", 1)
    for name in ("a", "b"):
        Entry(source, tmp_path / "board" / name)
    entries, rejected = leaderboard.build(tmp_path / "board", tmp_path / "site")
    assert len(entries) == 1 and "the board is full" in rejected["b"][0]
