"""Corpora, good and hostile, and the command that indexes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.cli import main
from unitymas.envs.tools.retrieval import (
    Bm25Index,
    CorpusError,
    DenseIndex,
    Passage,
    RetrievalError,
    index_corpus,
    index_main,
    open_index,
    read_corpus,
)

ROWS = [
    {"id": "a", "title": "Fritz Lang", "text": "A director born in Vienna."},
    {"id": "b", "title": "Vienna", "text": "A city on the Danube."},
]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_json_lines_under_the_usual_names(tmp_path: Path) -> None:
    corpus = write_lines(
        tmp_path / "c.jsonl",
        [
            {"_id": "x", "title": "T", "contents": "one"},
            "",
            {"docid": 7, "content": "two"},
            {"contents": '"Lang"\nthree'},
            {"document": "four"},
        ],
    )
    assert list(read_corpus(corpus)) == [
        Passage(id="x", title="T", text="one"),
        Passage(id="7", title="", text="two"),
        Passage(id="2", title="Lang", text="three"),
        Passage(id="3", title="", text="four"),
    ]


def test_columns_can_be_named(tmp_path: Path) -> None:
    corpus = write_lines(
        tmp_path / "c.jsonl", [{"text": "no", "abstract": "yes", "name": "N", "key": 5, "id": "x"}] * 2
    )
    fields = {"text": "abstract", "title": "name", "id": "-"}
    assert list(read_corpus(corpus, fields=fields)) == [
        Passage(id="0", title="N", text="yes"),
        Passage(id="1", title="N", text="yes"),
    ]
    with pytest.raises(
        CorpusError, match="line 1: there is no column 'abstrakt' for the text; the row has text, abs"
    ):
        list(read_corpus(corpus, fields={"text": "abstrakt"}))
    with pytest.raises(CorpusError, match="rows 1 and 2 have the same id"):
        list(read_corpus(corpus, fields={"id": "key"}))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("3", "not int"),
        ("[]", "not list"),
        ("null", "not NoneType"),
        ('{"title": "x"}', "has no text"),
        ('{"text": 3}', "has no text"),
        ('{"text": null, "id": "x"}', "has no text"),
        ("\xff\xfe\x00", "line 2: not UTF-8 .*save the file as UTF-8"),
        ("9" * 5000, "line 2"),
        ('{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_a_hostile_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises((CorpusError, ValueError), match=says):
        index_corpus(corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists() and len(list(tmp_path.iterdir())) == 1


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unitymas.envs.tools.retrieval.index.corpus.LONGEST_LINE", 1 << 20)
    corpus = tmp_path / "c.jsonl"
    with open(corpus, "wb") as file:
        file.truncate(1 << 32)  # sparse: four gigabytes of zeros in one line
    with pytest.raises(CorpusError, match="line 1: longer than 1 MB"):
        list(read_corpus(corpus))


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_passages_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    corpus = tmp_path_factory.mktemp("any") / "c.jsonl"
    corpus.write_bytes(data)
    try:
        for passage in read_corpus(corpus):
            assert isinstance(passage["text"], str)
    except CorpusError as error:
        assert "c.jsonl" in str(error)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    file = tmp_path / "c.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    told: list[tuple[int, int]] = []
    assert list(read_corpus(file, progress=lambda done, total: told.append((done, total)))) == ROWS
    assert told[-1][0] == told[-1][1] == file.stat().st_size
    data = file.read_bytes()
    for damaged in (b"", b"PAR1", data[:-20], b"x" * 100, data[:10] + bytes(40) + data[50:]):
        file.write_bytes(damaged)
        with pytest.raises(CorpusError, match="c.parquet: cannot be read as Parquet"):
            list(read_corpus(file))


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(str(tmp_path / "two"))
    assert list(read_corpus(tmp_path / "one")) == ROWS
    assert list(read_corpus(tmp_path / "two", split="test")) == ROWS[:1]
    with pytest.raises(CorpusError, match="choose one of its splits, train, test; got 'dev'"):
        list(read_corpus(tmp_path / "two", split="dev"))
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(CorpusError, match="cannot be read as a saved data set"):
        list(read_corpus(tmp_path / "one"))


def test_a_folder_of_files_is_one_corpus(tmp_path: Path) -> None:
    write_lines(tmp_path / "1.jsonl", ROWS[:1])
    write_lines(tmp_path / "2.jsonl", ROWS[1:])
    assert list(read_corpus(tmp_path)) == ROWS


def test_paths_that_hold_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("id,text")
    for path, says in [
        (tmp_path / "none", "no corpus at"),
        (tmp_path, "neither"),
        (tmp_path / "c.csv", "got '.csv'"),
    ]:
        with pytest.raises(CorpusError, match=says):
            list(read_corpus(path))


def test_passages_without_a_word_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", [{"id": "1", "text": ""}, {"id": "2", "text": " ... the"}])
    assert main(["data", "index", str(corpus)]) == 1
    assert "2 passages without a word that can be searched" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_bytes("\ufeffid\ttext\n7\tVienna\n".encode())
    assert list(read_corpus(tmp_path / "c.tsv")) == [Passage(id="7", title="", text="Vienna")]
    (tmp_path / "d.tsv").write_bytes(b"id\ttext\n7\tCaf\xe9\n")
    with pytest.raises(CorpusError, match=r"d\.tsv, line 2: not UTF-8 .*save the file as UTF-8"):
        list(read_corpus(tmp_path / "d.tsv"))


def test_the_command_indexes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", ROWS)
    assert index_main([str(corpus)]) == 0
    assert "2 passages indexed in" in capsys.readouterr().out
    index = open_index(tmp_path / "c.jsonl.index")
    assert isinstance(index, Bm25Index) and index("danube", 1) == [ROWS[1]]
    assert index_main([str(corpus)]) == 0  # already there: opened
    assert index_main([str(corpus), "--dense", "hash", "--out", str(tmp_path / "dense")]) == 0
    dense = open_index(tmp_path / "dense")
    assert isinstance(dense, DenseIndex) and dense("Danube city", 1) == [ROWS[1]]
    with pytest.raises(RetrievalError, match="open it with `open_index`"):
        Bm25Index.open(tmp_path / "dense")


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([], [], "holds no passages"),
        (["{"], [], "line 1"),
        (ROWS, ["--dense", "/nowhere"], "no model at /nowhere: there is no such folder"),
        (ROWS, ["--stem", "klingon"], "no stemmer"),
    ],
)
def test_the_command_fails_clearly(tmp_path: Path, rows: list[Any], options: list[str], says: str) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", rows)
    with pytest.raises((RetrievalError, ValueError, FileNotFoundError), match=says):
        index_main([str(corpus), *options])
    assert [file.name for file in tmp_path.iterdir()] == ["c.jsonl"]
