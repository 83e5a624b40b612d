"""Reader of a corpus, row by row: JSON lines or tab-separated values, plain or gzipped, Parquet, or a folder of `datasets`.

A row has a text, and may have a title and an id, under the usual names (wire.py) or under those of the argument `fields`.
The reader holds a few rows at a time and never runs any content. The first bad row is an error that names its place.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from .....agents.basics.hints import counted
from ..retriever import Passage, RetrievalError
from ..wire import ID_FIELDS, TEXT_FIELDS, BadAnswer, read_passage

LONGEST_LINE = 64 << 20
JSON_LINES = {".jsonl", ".ndjson", ".json"}
TABLES = {".tsv"}
GZIP = ".gz"
ProgressCallback = Callable[[int, int], None]
"""Function of (done, total), in bytes or rows, that shows the progress."""


class CorpusError(RetrievalError):
    """Raised when a corpus cannot be read. The message names the file and the row."""


def read_corpus(
    path: str | Path,
    *,
    split: str | None = None,
    fields: dict[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[Passage]:
    """Yield the passages of the corpus at `path`.

    `fields` names the columns if they are not the usual ones: {"text": "abstract", "title": "name"}. With "-" as the column
    of the id, rows are numbered.
    """
    path, rename, tell = Path(path), fields or {}, progress or (lambda done, total: None)
    seen, checked = array("q"), 10_000
    for place, (where, row) in enumerate(_rows(path, split, tell)):
        try:
            passage = _passage(row, rename, place)
        except BadAnswer as error:
            raise CorpusError(f"{where}: {error}") from None
        seen.append(hash(passage["id"]))
        if len(seen) == checked:  # of millions of rows, the first ones tell as a rule
            _check_ids(seen, path)
            checked *= 4
        yield passage
    _check_ids(seen, path)


def _passage(row: object, rename: dict[str, str], place: int) -> Passage:
    if not isinstance(row, dict):
        raise BadAnswer(f"a row must be an object with a text, not {type(row).__name__}")
    for name, column in rename.items():
        if column != "-" and column not in row:
            raise BadAnswer(
                f"there is no column {column!r} for the {name}; the row has {', '.join(map(str, row))}"
            )
    if rename.get("text"):
        row = {key: value for key, value in row.items() if key not in TEXT_FIELDS} | {
            "text": row[rename["text"]]
        }
    if rename.get("title"):
        row = row | {"title": row[rename["title"]]}
    passage = read_passage(row)
    if rename.get("id", "-") != "-":
        passage["id"] = str(row[rename["id"]])
    elif "id" in rename or not any(isinstance(row.get(field), (str, int)) for field in ID_FIELDS):
        passage["id"] = str(place)
    return passage


def _check_ids(seen: array[int], path: Path) -> None:
    """Raise an error if two rows have the same id."""
    hashes = np.frombuffer(seen, np.int64)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    if len(same):
        first, second = sorted(order[same[0] : same[0] + 2].tolist())
        raise CorpusError(
            f"{path}: rows {first + 1} and {second + 1} have the same id ({counted(len(same), 'repetition')}); "
            "name another id column, or '-' to number the rows"
        )


def _rows(path: Path, split: str | None, tell: ProgressCallback) -> Iterator[tuple[str, object]]:
    """Yield every row with its place."""
    if not path.exists():
        raise CorpusError(f"there is no corpus at {path}")
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        yield from _saved_dataset(path, split, tell)
        return
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _suffix(file) in JSON_LINES | TABLES | {".parquet"})
        if not files:
            raise CorpusError(
                f"{path} holds neither .jsonl, .tsv or .parquet files nor a data set saved by `datasets`"
            )
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        suffix = _suffix(file)
        read = _parquet if suffix == ".parquet" else _table if suffix in TABLES else _json_lines
        for where, row, done in read(file):
            tell(before + done, total)
            yield where, row
        before += file.stat().st_size


def _suffix(file: Path) -> str:
    """Return the suffix that selects the reader of a file, without `.gz`."""
    return Path(file.stem).suffix if file.suffix == GZIP else file.suffix


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file, decompressed. Yield its stream, and a function that returns the number of bytes read from the file."""
    with open(file, "rb") as raw:
        if file.suffix != GZIP:
            yield raw, raw.tell
            return
        try:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(IO[bytes], unpacked), raw.tell
        except (EOFError, OSError, zlib.error) as error:
            raise CorpusError(f"{file}: cannot be unpacked ({error}); was it downloaded whole?") from None


def _lines(file: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield the place, the line and the bytes read so far, for every line that is not blank."""
    with _opened(file) as (handle, done):
        number = 0
        while line := handle.readline(LONGEST_LINE + 1):
            number += 1
            where = f"{file}, line {number}"
            if len(line) > LONGEST_LINE:
                raise CorpusError(f"{where}: longer than {LONGEST_LINE >> 20} MB; is this one row per line?")
            if line.strip():
                yield where, line, done()


def _json_lines(file: Path) -> Iterator[tuple[str, object, int]]:
    if _suffix(file) not in JSON_LINES:
        raise CorpusError(
            f"{file}: a corpus is a .jsonl, .tsv or .parquet file, or a folder of such; got {file.suffix!r}"
        )
    for where, line, done in _lines(file):
        try:
            yield where, json.loads(line.decode("utf-8-sig")), done
        except UnicodeDecodeError as error:
            raise CorpusError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}: not a JSON object ({error})") from None


def _table(file: Path) -> Iterator[tuple[str, object, int]]:
    """Yield the rows of a table, one in a line, below a line of column names. Values may be quoted (DPR's `psgs_w100.tsv`)."""
    columns: list[str] = []
    for where, line, done in _lines(file):
        try:
            (cells,) = csv.reader([line.decode("utf-8-sig").rstrip("\r\n")], delimiter="\t", strict=True)
        except UnicodeDecodeError as error:
            raise CorpusError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from None
        except (csv.Error, ValueError) as error:
            raise CorpusError(f"{where}: not a row of tab-separated values ({error})") from None
        if not columns:
            columns = cells
            continue
        if len(cells) != len(columns):
            raise CorpusError(
                f"{where}: has {len(cells)} cells, and the first line names {len(columns)} columns"
            )
        yield where, dict(zip(columns, cells, strict=True)), done


def _parquet(file: Path) -> Iterator[tuple[str, object, int]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ModuleNotFoundError("reading Parquet needs the pyarrow package: pip install pyarrow") from error
    size, number = file.stat().st_size, 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        rows = max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=1000):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row, size * number // rows
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{file}: cannot be read as Parquet after row {number} ({error})") from None


def _saved_dataset(path: Path, split: str | None, tell: ProgressCallback) -> Iterator[tuple[str, object]]:
    try:
        import datasets
    except ImportError as error:
        raise ModuleNotFoundError(
            "reading this folder needs the datasets package: pip install datasets"
        ) from error
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:  # its readers raise many types of errors on a damaged folder
        raise CorpusError(f"{path}: cannot be read as a saved data set ({error})") from error
    if isinstance(rows, datasets.DatasetDict):
        if split is None and len(rows) == 1:
            split = next(iter(rows))
        if split not in rows:
            raise CorpusError(f"{path}: choose one of its splits, {', '.join(rows)}; got {split!r}")
        rows = rows[split]
    for number, row in enumerate(rows, 1):
        tell(number, len(rows))
        yield f"{path}, row {number}", row
