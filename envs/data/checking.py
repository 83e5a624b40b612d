"""Checks of data before use: every row of a file, or a prepared folder against its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...agents.basics.manifest import checksum
from . import files
from .qa_adapters import RowAdapter
from .recognise import adapt, entry_for, guess_kind, records_of
from .row_schemas import DataError, FieldError, check_row

MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class FileReport:
    """Result of ``check`` on a file of tasks or on a prepared folder."""

    path: str
    kind: str
    rows: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Flag: every row is valid."""
        return self.rows > 0 and not self.problems


def check(path: str | Path, kind: str | None = None) -> FileReport:
    """Read a file of tasks or the folder of a prepared set, and report every invalid row."""
    path = Path(path)
    if (path / "manifest.json").is_file():
        return _check_prepared(path)
    rows, problems = 0, []
    seen: dict[str, str] = {}
    adapter: RowAdapter | None = None
    try:
        for place, record in records_of(path):
            if adapter is None:
                kind = kind or guess_kind(record, place)
                adapter = entry_for("checked", kind, record).adapter
            rows += 1
            try:
                row = adapt(adapter, kind or "", record, place)
                if row is not None and row["id"] in seen:
                    problems.append(f"{place}: field 'id': {row['id']!r} is also the id of {seen[row['id']]}")
                elif row is not None:
                    seen[row["id"]] = place
            except DataError as error:
                problems.append(str(error))
            if len(problems) >= MOST_PROBLEMS:
                break
    except DataError as error:  # a fault of the file itself: no further row can be read
        problems.append(str(error))
    if not rows and not problems:
        problems.append(f"{path}: holds no record")
    return FileReport(str(path), kind or "?", rows, tuple(problems))


def _check_prepared(path: Path) -> FileReport:
    manifest = files.parse((path / "manifest.json").read_bytes(), str(path / "manifest.json"))
    parts = {f"{split}.jsonl": part for split, part in manifest["splits"].items()}
    if "passages" in manifest:
        parts["passages.jsonl"] = manifest["passages"]
    problems = [
        f"{path / name}: missing, or its checksum differs from the manifest's"
        for name, part in parts.items()
        if not (path / name).is_file() or checksum(path / name) != part["sha256"]
    ]
    for split in [] if problems else manifest["splits"]:
        for number, row in enumerate(files.Lines(path / f"{split}.jsonl"), 1):
            try:
                check_row(row, manifest["kind"])
            except FieldError as error:
                problems.append(f"{split}.jsonl, row {number}: {error}")
    rows = sum(part["rows"] for part in manifest["splits"].values())
    return FileReport(str(path), manifest["kind"], rows, tuple(problems[:MOST_PROBLEMS]))
