"""Recognition of tasks in the user's own records: their kind, and the adapter that reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..core.tasks import DataSet, fingerprint
from . import files
from .code_adapters import code
from .published import Known
from .qa_adapters import RowAdapter, TaskRow, math, multihop, paragraphs, qa
from .row_schemas import KINDS, DataError, FieldError, check_row
from .sources import LocalSource, Located

_GENERIC: dict[str, RowAdapter] = {"qa": qa, "code": code, "math": math}


_TESTS = {
    "tests", "test_cases", "visible_tests", "hidden_tests", "public_tests", "input_output", "verification_info", "test_list",
    "public_test_cases",
}  # fmt: skip


def entry_for(name: str, kind: str, record: Mapping[str, object]) -> Known:
    """Return a catalogue entry for the user's own data set. Paragraphs that come with questions become its corpus."""
    if kind not in KINDS:
        raise DataError(f"{kind!r} is no kind of task; there are {', '.join(KINDS)}")
    if kind == "qa" and any(
        isinstance(record.get(field), list | dict) for field in ("context", "paragraphs")
    ):
        return Known(name, kind, "", "", multihop, corpus=paragraphs)
    return Known(name, kind, "", "", _GENERIC[kind])


def records_of(path: Path) -> Located:
    """Yield all records of a file, or of the data files in a folder."""
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in paths:
        if file.name.endswith(files.SUFFIXES) or not path.is_dir():
            yield from files.records(file)


def guess_kind(record: Mapping[str, object], place: str) -> str:
    """Guess the kind of a task: tests mean code, a problem or a solution means mathematics."""
    worked = record.get("answer")
    if _TESTS & record.keys():
        return "code"
    if "problem" in record or (isinstance(worked, str) and ("####" in worked or "\\boxed" in worked)):
        return "math"
    if any(name in record for name in ("question", "query", "prompt", "Question")):
        return "qa"
    fields = ", ".join(sorted(map(str, record))[:12])
    raise DataError(
        f"{place}: cannot tell what kind of task this is (fields: {fields}); say it: --kind qa|code|math"
    )


def adapt(adapter: RowAdapter, kind: str, record: Mapping[str, object], place: str) -> TaskRow | None:
    """Return a record as a checked row, or None if it is no task. An error names the place and the field."""
    try:
        row = adapter(record)
        if row is not None:
            check_row(row, kind)
        return row
    except FieldError as error:
        raise DataError(f"{place}: {error}") from error


def unique(task_id: str, seen: set[str]) -> str:
    """Return an id that is unique in its split, with a number added if an earlier task has the same id."""
    candidate, number = task_id, 1
    while candidate in seen:
        number += 1
        candidate = f"{task_id}-{number}"
    seen.add(candidate)
    return candidate


def read_tasks(path: str | Path, kind: str | None = None) -> Iterator[TaskRow]:
    """Yield the checked rows of a file, without preparation: ``make(…, tasks=list(read_tasks(p)))``."""
    adapter: RowAdapter | None = None
    seen: set[str] = set()
    for place, record in records_of(Path(path)):
        if adapter is None:
            kind = kind or guess_kind(record, place)
            adapter = entry_for("read", kind, record).adapter
        row = adapt(adapter, kind or "", record, place)
        if row is not None:
            yield {**row, "id": unique(row["id"], seen)}


def load_file(path: str | Path, kind: str, split: str) -> DataSet:
    """Load a file as a data set, without preparation. In a folder, the files named after the split are read."""
    path = Path(path)
    source = LocalSource(path)
    part = split if split in source.splits() else source.splits()[0]
    if path.is_dir() and part not in (split, "all"):
        raise DataError(f"{path}: has no file for the split {split!r}, only for {', '.join(source.splits())}")
    rows, passages, seen = [], dict[str, dict[str, str]](), set[str]()
    entry: Known | None = None
    for place, record in source.records(part):
        entry = entry or entry_for(path.stem, kind, record)
        row = adapt(entry.adapter, kind, record, place)
        if row is not None:
            rows.append({**row, "id": unique(row["id"], seen)})
            for passage in passages_of(entry, record, place):
                passages[passage["id"]] = passage
    if not rows:
        raise DataError(f"{path}: holds no task")
    return DataSet(path.stem, split, rows, fingerprint(rows), list(passages.values()) or None)


def passages_of(entry: Known, record: Mapping[str, object], place: str) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of a record. An id is a hash of title and text, so it is the same in all splits."""
    if entry.corpus is None:
        return
    try:
        for passage in entry.corpus(record):
            content = f"{passage['title']}\0{passage['text']}".encode("utf-8", "surrogatepass")
            yield {"id": hashlib.sha256(content).hexdigest()[:16], **passage}
    except FieldError as error:
        raise DataError(f"{place}: {error}") from error
