"""The mini world: consistent, disjoint between splits, the same everywhere, of any size."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest

from unitymas.envs.core.tasks import CODE, MATH, QA, Task, TaskError
from unitymas.envs.data import mini
from unitymas.envs.data.mini import words
from unitymas.envs.data.mini.programs import FAMILIES, combinations, run_solution
from unitymas.envs.data.mini.questions import RELATIONS
from unitymas.envs.data.mini.splits import check_disjoint
from unitymas.envs.data.mini.sums import working
from unitymas.envs.data.mini.world import World


def test_every_word_of_a_name_has_one_meaning() -> None:
    lists = [words.PEOPLE, words.TOWNS, words.WORKS, words.COMPANIES]
    every = [word for kind in lists for word in (*kind.first, *kind.second)]
    every += [*words.COUNTRIES, *words.RIVERS]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("kind", mini.KINDS)
@pytest.mark.parametrize("split", mini.SPLITS)
def test_rows_fit_their_schema_and_ids_are_unique(kind: str, split: str) -> None:
    data = mini.load(kind, split, size=64)
    schema = {"code": CODE, "math": MATH}.get(kind, QA)
    assert len(data) == 64 and data.split == split and len({row["id"] for row in data.rows}) == 64
    for row in data.rows:
        task = Task.of(row, schema)
        shown = {"code": {"problem", "visible_tests", "fn_name"}, "math": {"problem"}}.get(kind, {"question"})
        assert set(task.view) - {"id"} <= shown


@pytest.mark.parametrize("split", mini.SPLITS)
def test_every_answer_can_be_read_in_the_passages_its_hops_name(split: str) -> None:
    data = mini.load("qa", split, size=400)
    texts = {passage["title"]: passage["text"] for passage in data.passages or ()}
    for row in data.rows:
        for hop in row["hops"]:
            assert hop["answer"] in texts[hop["title"]]
        assert row["answers"][0] in " ".join(texts[title] for title in row["supporting"])
        assert row["supporting"] == [hop["title"] for hop in row["hops"]]


def test_kinds_of_question_are_mixed_and_bridges_hide_their_middle() -> None:
    rows = mini.load("qa", "train", size=800).rows
    bridges = [
        r
        for r in rows
        if len(r["hops"]) == 2 and r["hops"][1]["answer"] == r["answers"][0] and " or " not in r["question"]
    ]
    assert sum(" or " in row["question"] for row in rows) == 200
    assert len(bridges) >= 350
    for row in bridges:
        assert row["hops"][0]["answer"] not in row["question"]
        assert row["hops"][0]["answer"] in row["hops"][1]["question"]
    assert all(len(r["hops"]) == 1 for r in mini.load("qa-single", "train", size=80).rows)
    assert all(len(r["hops"]) == 2 for r in mini.load("qa-multi", "train", size=80).rows)


def test_facts_agree_wherever_they_are_told() -> None:
    world = World("train")
    for number in range(30):
        block = world.block(number)
        assert world.block(number) == block
        for person in block.people:
            assert person.birthplace in block.towns and person.home in block.towns
            assert person.birthplace != person.home and person.born in words.YEARS
        for work in block.works:
            assert work.creator in block.people and work.creator != work.sponsor
            assert work.creator.born + 20 <= work.year and work.year in words.YEARS
        for company in block.companies:
            assert company.founder != company.head and company.seat in block.towns


def test_one_question_has_one_answer() -> None:
    """No name stands for two entities, so a question determines its answer."""
    answers: dict[str, str] = {}
    for kind in ("qa", "qa-single", "qa-multi"):
        for row in mini.load(kind, "train", size=2000).rows:
            assert answers.setdefault(row["question"], row["answers"][0]) == row["answers"][0]
    titles = [passage["title"] for passage in mini.passages("train", 40_000)]
    assert len(set(titles)) == len(titles)


def test_first_match_does_not_answer() -> None:
    """Taking the first word or number of the right kind from the right passage is often wrong."""
    rows = mini.load("qa-single", "train", size=2000)
    texts = {passage["title"]: passage["text"] for passage in rows.passages or ()}
    years = [row for row in rows.rows if row["answers"][0].isdigit()]
    towns = [
        row
        for row in rows.rows
        if row["question"].startswith(("Where was", "Where does", "What is the birthplace"))
    ]
    assert years and towns
    wrong = 0
    for row in towns:
        text = texts[row["supporting"][0]]
        others = [p.name for p in World("train").block(int(row["id"].rsplit("-", 1)[1]) // 8).towns]
        first = min((o for o in others if o in text), key=text.index)
        wrong += first != row["answers"][0]
    assert 0.25 < wrong / len(towns) < 0.75


def test_splits_share_no_entity_and_no_combination() -> None:
    check_disjoint(seeds=(0, 1))
    for family in FAMILIES:
        pools = [set(combinations(family, split)) for split in mini.SPLITS]
        assert all(pools) and not any(a & b for a, b in itertools.combinations(pools, 2))


def test_some_words_of_test_names_occur_in_no_training_name() -> None:
    for kind in (words.PEOPLE, words.TOWNS, words.WORKS, words.COMPANIES):
        seen = {
            (split, second)
            for split in mini.SPLITS
            for first in range(len(kind.first))
            for second in range(len(kind.second))
            if kind.split_of(first, second) == split
        }
        only_test = [s for s in range(len(kind.second)) if ("test", s) in seen and ("train", s) not in seen]
        assert len(only_test) == kind.held_out


def test_relations_cover_every_kind_of_entity() -> None:
    assert len({relation.of for relation in RELATIONS}) == 4


@pytest.mark.parametrize("split", mini.SPLITS)
def test_programs_pass_their_own_tests(split: str) -> None:
    for row in mini.load("code", split, size=90).rows:
        tests = [*row["visible_tests"], *row["hidden_tests"]]
        assert len(row["visible_tests"]) == 2 and len(row["hidden_tests"]) >= 4
        for test in tests:
            case = test["input"] if "fn_name" in row else test["input"][:-1]
            assert run_solution(row["solution"], case, row.get("fn_name")) == test["output"]


def test_hidden_tests_catch_what_visible_ones_miss() -> None:
    for row in mini.load("code", "test", size=200).rows:
        if " > " in row["solution"] and "input().split" not in row["solution"]:
            wrong = row["solution"].replace(" > ", " >= ")
            verdicts = [
                run_solution(wrong, t["input"][:-1], None) == t["output"] for t in row["hidden_tests"]
            ]
            assert all(
                run_solution(wrong, t["input"][:-1], None) == t["output"] for t in row["visible_tests"]
            )
            assert not all(verdicts)


@pytest.mark.parametrize("split", mini.SPLITS)
def test_sums_add_up(split: str) -> None:
    for row in mini.load("math", split, size=300).rows:
        for step in row["steps"]:
            left, right = step.split(" = ")
            assert eval(left) == int(right)
        assert row["steps"][-1].endswith(f"= {row['answer']}") and 0 <= int(row["answer"]) <= 99
    assert working("+-", (2, 13, 8)) == [("2 + 13 = 15", 15), ("15 - 8 = 7", 7)]


def test_the_same_in_another_process_whatever_the_hash_seed() -> None:
    code = "from unitymas.envs.data import mini; print(*(mini.load(k, s, size=40).fingerprint for k in mini.KINDS for s in mini.SPLITS))"
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": h},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for h in ("0", "1")
    }
    here = " ".join(mini.load(k, s, size=40).fingerprint for k in mini.KINDS for s in mini.SPLITS)
    assert prints == {here + "\n"}
    assert mini.load("qa", "test", size=16).fingerprint == "8f2f956c34a5183b"


def test_a_smaller_set_is_the_start_of_a_larger_one_and_seeds_differ() -> None:
    small, large = mini.load("qa", "test", size=50), mini.load("qa", "test", size=200)
    assert large.rows[:50] == small.rows
    assert mini.load("qa", "test", size=50, seed=1).fingerprint != small.fingerprint


def test_passages_stream_at_any_size() -> None:
    start = time.perf_counter()
    assert sum(1 for _ in mini.passages("train", 20_001)) == 20_001
    assert time.perf_counter() - start < 10
    far = World("train").block(1_000_000)
    assert len({entity.name for entity in far.entities}) == 8


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TaskError, match="no tasks of kind 'poems'"):
        mini.load("poems", "test")
    with pytest.raises(TaskError, match="no split 'dev'"):
        mini.load("qa", "dev")
    with pytest.raises(TaskError, match="size=0"):
        mini.load("qa", "test", size=0)
