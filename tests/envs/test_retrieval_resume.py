"""Indexing a large corpus: tab-separated and gzipped files, and builds that go on after a kill."""

import errno
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unitymas.envs.tools.retrieval import Bm25Index, Passage
from unitymas.envs.tools.retrieval.index import bm25
from unitymas.envs.tools.retrieval.index.build import index_corpus, index_main
from unitymas.envs.tools.retrieval.index.corpus import CorpusError, read_corpus
from unitymas.envs.tools.retrieval.index.index_files import read_manifest
from unitymas.envs.tools.retrieval.index.postings import PostingsBuilder
from unitymas.envs.tools.retrieval.index.terms import Analyzer
from unitymas.envs.tools.retrieval.retriever import RetrievalError

ROWS = [
    Passage(
        id=str(n), title=f"Town {n % 7}", text=f"The mill of place{n % 13} opened in {1700 + n}. Zü{n}rich"
    )
    for n in range(120)
]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of postings ends after a dozen passages."""
    monkeypatch.setattr(bm25, "PostingsBuilder", partial(PostingsBuilder, run=90))


def until(stop: int) -> Iterator[Passage]:
    """The rows, interrupted before one of them."""
    for n, row in enumerate(ROWS):
        if n == stop:
            raise KeyboardInterrupt
        yield row


def built(path: Path) -> dict[str, Any]:
    """What an index consists of, every file with its checksum."""
    manifest = read_manifest(path)
    return {name: manifest[name] for name in ("fingerprint", "passages", "files", "settings")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("whole") / "index"
    Bm25Index.build(ROWS, path)
    return built(path)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 119), min_size=1, max_size=3))
def test_whatever_interrupts_a_build_the_index_is_the_same(
    stops: list[int], whole: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("stops") / "index"
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            Bm25Index.build(until(stop), path, resumable=True)
        assert not path.exists()
    index = Bm25Index.build(iter(ROWS), path, resumable=True)
    assert built(path) == whole and [p.name for p in path.parent.iterdir()] == ["index"]
    assert index("place3 mill 1703", 1)[0]["id"] == "3"


def test_what_was_indexed_before_is_not_analysed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Bm25Index.build(until(100), tmp_path / "index", resumable=True)
    seen: list[str] = []
    analyse = Analyzer.__call__
    monkeypatch.setattr(Analyzer, "__call__", lambda self, text: (seen.append(text), analyse(self, text))[1])
    Bm25Index.build(iter(ROWS), tmp_path / "index", resumable=True)
    assert 20 <= len(seen) < 40


def test_a_killed_command_goes_on(tmp_path: Path, whole: dict[str, Any]) -> None:
    """SIGKILL in the middle of the real command: it leaves a part, and the same command makes the index of it."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    script = textwrap.dedent("""
        import os, signal, sys
        from functools import partial
        from unitymas.envs.tools.retrieval.index import build
        from unitymas.envs.tools.retrieval.index import bm25
        from unitymas.envs.tools.retrieval.index.postings import PostingsBuilder
        bm25.PostingsBuilder = partial(PostingsBuilder, run=90)
        def dying(done, total, calls=[]):
            calls.append(done)
            if len(calls) == 100:
                os.kill(os.getpid(), signal.SIGKILL)
        build.index_corpus(sys.argv[1], sys.argv[2], progress=dying)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(corpus), str(tmp_path / "index")], capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    part = tmp_path / ".index.building"
    told = json.loads((part / "progress.json").read_text())
    assert 0 < told["passages"] < 100 and not (tmp_path / "index").exists()
    assert index_main([str(corpus), "--out", str(tmp_path / "index")]) == 0
    assert built(tmp_path / "index") == whole and not part.exists()


PARTS = ("progress.json", "terms.part", "lengths.part", "passages.jsonl")


@pytest.mark.parametrize(
    ("file", "harm"),
    [("run-0.npy", "gone"), *((file, harm) for file in PARTS for harm in ("cut", "gone", "longer"))],
)
def test_a_part_that_was_torn_is_not_built_upon(
    tmp_path: Path, file: str, harm: str, whole: dict[str, Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Bm25Index.build(until(90), tmp_path / "index", resumable=True)
    torn = tmp_path / ".index.building" / file
    if harm == "gone":
        torn.unlink()
    elif harm == "cut":
        os.truncate(torn, torn.stat().st_size // 3)
    elif file != "progress.json":  # what an unfinished save left behind the rest
        with torn.open("ab") as handle:
            handle.write(b"half a li")
    Bm25Index.build(iter(ROWS), tmp_path / "index", resumable=True)
    assert built(tmp_path / "index") == whole


def test_a_bad_row_and_a_full_disk_cost_no_more_than_a_kill(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part stays. When the row is mended, and the disk has room, the same command continues."""
    corpus, index, part = tmp_path / "corpus.jsonl", tmp_path / "index", tmp_path / ".index.building"
    lines = [json.dumps(row) + "\n" for row in ROWS]
    corpus.write_text("".join([*lines[:100], '{"id": "100", "text": \n', *lines[101:]]))
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 101: not a JSON object"):
        index_corpus(corpus, index)
    saved = json.loads((part / "progress.json").read_text())["passages"]
    assert 0 < saved <= 100 and not index.exists()
    corpus.write_text("".join(lines))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as later:
        later.setattr(os, "fsync", full)
        with pytest.raises(
            RetrievalError, match=r"the disk is full. Free some space, and the same command continues from"
        ):
            index_corpus(corpus, index)
    assert json.loads((part / "progress.json").read_text())["passages"] == saved
    index_corpus(corpus, index)
    assert built(index) == whole and not part.exists()


def test_what_fails_before_anything_is_saved_leaves_nothing(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps(ROWS[0]) + "\n[]\n")
    with pytest.raises(CorpusError, match="line 2"):
        index_corpus(corpus, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_ids_that_repeat_are_told_early(tmp_path: Path) -> None:
    """Not after hours, when all of 21 million rows are read."""
    corpus, seen = tmp_path / "corpus.jsonl", 0
    rows = ({"id": str(n // 2), "text": "x"} for n in range(30_000))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CorpusError, match=r"have the same id \(5,000 repetitions\)"):
        for _ in read_corpus(corpus):
            seen += 1
    assert seen < 10_000


def test_another_corpus_or_other_settings_begin_anew(tmp_path: Path) -> None:
    def leave() -> None:
        with pytest.raises(KeyboardInterrupt):
            Bm25Index.build(until(90), tmp_path / "index", resumable=True)

    leave()
    changed = [{**ROWS[0], "text": "Another."}, *ROWS[1:]]
    for others in (changed, ROWS[:20]):
        with pytest.raises(
            RetrievalError, match="part of an index of other passages: the corpus has changed since"
        ):
            Bm25Index.build(others, tmp_path / "index", resumable=True)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []
        leave()
    Bm25Index.build(ROWS, tmp_path / "index", analyze=Analyzer(stop_words=False), resumable=True)
    Bm25Index.build(ROWS, tmp_path / "fresh", analyze=Analyzer(stop_words=False))
    assert built(tmp_path / "index") == built(tmp_path / "fresh")


def test_a_build_beside_another_takes_a_place_of_its_own(tmp_path: Path, whole: dict[str, Any]) -> None:
    held = tmp_path / ".index.building"
    held.mkdir()
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    Bm25Index.build(ROWS, tmp_path / "index", resumable=True)
    os.close(lock)
    assert built(tmp_path / "index") == whole and list(held.iterdir()) == []


# -- files ---------------------------------------------------------------------------------------------------------

PSGS = (
    "id\ttext\ttitle\n"
    '1\t"Aaron ( or ; ""Ahärôn"") is a prophet, high priest, and the brother of Moses."\tAaron\n'
    "2\tGod at Sinai granted Aaron the priesthood.\tAaron\n"
)


@pytest.mark.parametrize("pack", [False, True])
def test_passages_as_dpr_has_them(tmp_path: Path, pack: bool) -> None:
    file = tmp_path / ("psgs_w100.tsv" + ".gz" * pack)
    file.write_bytes(gzip.compress(PSGS.encode()) if pack else PSGS.encode())
    seen: list[tuple[int, int]] = []
    first, second = read_corpus(file, progress=lambda done, total: seen.append((done, total)))
    assert first["text"] == 'Aaron ( or ; "Ahärôn") is a prophet, high priest, and the brother of Moses.'
    assert (second["id"], second["title"]) == ("2", "Aaron") and all(done <= total for done, total in seen)
    assert [p["id"] for p in read_corpus(tmp_path)] == ["1", "2"]
    index = index_corpus(file, tmp_path / "index")
    assert index("who is the brother of Moses", 1) == [first]


def test_gzipped_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "wiki.jsonl.gz"
    file.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))
    assert list(read_corpus(file)) == ROWS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id\ttext\ttitle\n1\tonly a text\n", "line 2: has 2 cells, and the first line names 3 columns"),
        ('id\ttext\ttitle\n1\t"never closed\tT\n', "line 2: not a row of tab-separated values"),
        ("1\tNo head.\tT\n2\tNone.\tT\n", "line 2: .*text"),
        ("id\ttext\ttitle\n1\t" + "x" * 200_000 + "\tT\n", "line 2: not a row .*field larger than field limit"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(CorpusError, match=says):
        list(read_corpus(tmp_path / "a.tsv"))


@pytest.mark.parametrize(
    "harm",
    [lambda data: data[:-20], lambda data: b"no gzip at all", lambda data: data[:40] + b"\0" + data[41:]],
)
def test_a_damaged_gzip_is_said(tmp_path: Path, harm: Any) -> None:
    file = tmp_path / "a.tsv.gz"
    file.write_bytes(harm(gzip.compress(PSGS.encode() * 3)))
    with pytest.raises(CorpusError, match="cannot be unpacked|not a row|cells"):
        list(read_corpus(file))
