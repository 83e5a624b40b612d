"""Records from local files: JSON, JSON Lines (also .gz and .zst), and Parquet.

Every fault of a file is a ``DataError`` with its place: an incomplete file, text that is not UTF-8, invalid JSON, a row that
is no object. The content of a file is never executed.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from ...agents.basics.json_types import JsonObject, JsonView
from .row_schemas import DataError, brief

LONGEST_LINE = 256 << 20  # bytes of one JSON line, also after decompression
SUFFIXES = (".json", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")


def records(path: str | Path) -> Iterator[tuple[str, JsonObject]]:
    """Yield each record of a file with its place, such as "train.jsonl, row 12". Rows count from 1."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    plain = path.name.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith(".parquet"):
        rows: Iterator[object] = _parquet(path)
    elif plain.endswith(".jsonl"):
        rows = _lines(path)
    elif plain.endswith(".json"):
        rows = iter(_document(path))
    else:
        raise DataError(f"{path}: cannot read this kind of file; wanted {', '.join(SUFFIXES)}")
    for number, record in enumerate(rows, 1):
        place = f"{path.name}, row {number}"
        if not isinstance(record, dict):
            raise DataError(f"{place}: wanted an object with fields, got {brief(record)}")
        yield place, record


def split_of_file(path: Path) -> str | None:
    """Return the split that a file's name stands for, or None. "dev_gold.jsonl" stands for validation."""
    stem = path.name.lower().partition(".")[0].replace("-", "_").split("_")
    for word, split in _SPLIT_WORDS.items():
        if word in stem:
            return split
    return None


_SPLIT_WORDS = {
    "train": "train",
    "dev": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed. A damaged archive raises a ``DataError``."""
    import zstandard

    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw))
            elif path.suffix == ".zst":
                yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
            else:
                yield raw
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read to the end ({error})") from error


def _lines(path: Path) -> Iterator[Any]:
    with _opened(path) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path.name}, line {number}: longer than {LONGEST_LINE >> 20} MB")
            if line.strip():
                yield parse(line, f"{path.name}, line {number}")


def _document(path: Path) -> list[object]:
    """Return the records of a JSON file: a list, or an object with a list under "data" or a similar name."""
    with _opened(path) as stream:
        content = stream.read()
    document = parse(content, path.name)
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list)]
        document = lists[0] if len(lists) == 1 else document
    if not isinstance(document, list):
        raise DataError(f"{path.name}: wanted a list of records, got {brief(document)}")
    return document


def parse(content: bytes, where: str) -> Any:
    """Parse JSON strictly: UTF-8, without NaN and Infinity. The error message contains ``where``."""
    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply") from error
    except ValueError as error:  # malformed, or a number of too many digits
        raise DataError(f"{where}: not JSON ({error})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _parquet(path: Path) -> Iterator[object]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install 'unitymas[train]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from error


class Lines(Sequence[JsonView]):
    """Sequence of the rows of a JSONL file. A row is parsed when it is read, so the file may be larger than the memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = [0]
        with path.open("rb") as stream:
            self._starts.extend(_positions(stream))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start, end = self._starts[number], self._starts[number + 1]
        with self._path.open("rb") as stream:
            stream.seek(start)
            return parse(stream.read(end - start), f"{self._path.name}, line {number + 1}")

    def __iter__(self) -> Iterator[JsonView]:
        return _lines(self._path)


def _positions(stream: IO[bytes]) -> Iterator[int]:
    end = 0
    for line in stream:
        end += len(line)
        yield end
