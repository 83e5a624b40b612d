"""Prepared data sets on this machine: their folders, their list, and their rows.

A prepared set is a folder ``<home>/data/<name>`` with ``<split>.jsonl`` files, an optional ``passages.jsonl``, and a
``manifest.json`` with sizes and checksums. The home is ``$UNITYMAS_HOME``, or else ``~/.cache/unitymas``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...agents.basics.json_types import JsonObject
from ...agents.fetch.home import home
from ..core.tasks import DataSet
from . import files
from .published import CATALOGUE, known
from .row_schemas import KINDS, DataError

SCHEMA = 1  # version of the format of a prepared folder


def folder(name: str) -> Path:
    """Return the folder of a prepared set. A name consists of letters, digits, dots, dashes and underscores."""
    if not name or not all(ch.isalnum() or ch in "-_." for ch in name) or name.startswith("."):
        raise DataError(f"{name!r} cannot be the name of a data set: use letters, digits, '-', '_' and '.'")
    return home() / "data" / name


def is_prepared(name: str) -> bool:
    """Tell whether a data set is prepared on this machine."""
    return _manifest(name) is not None


def splits(name: str) -> tuple[str, ...]:
    """Return the splits of a data set; empty if it is not prepared."""
    return tuple((_manifest(name) or {}).get("splits", ()))


def load(name: str, split: str) -> DataSet:
    """Return a split of a prepared set. Rows and passages are read from disk when they are needed."""
    manifest = _manifest(name)
    if manifest is None:
        known(name)  # raises for an unknown name, with the nearest ones
        raise DataError(f"{name} has not been prepared on this machine; run: unitymas data prepare {name}")
    if split not in manifest["splits"]:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(manifest['splits'])}")
    place, part = folder(name), manifest["splits"][split]
    rows = _lines(place / f"{split}.jsonl", part["bytes"])
    passages = manifest.get("passages")
    corpus = _lines(place / "passages.jsonl", passages["bytes"]) if passages else None
    return DataSet(name, split, rows, part["fingerprint"], corpus)


def _lines(path: Path, size: int) -> files.Lines:
    if not path.is_file() or path.stat().st_size != size:
        name = path.parent.name
        raise DataError(f"{path} is missing or damaged; run: unitymas data prepare {name} --again")
    return _indexed(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _indexed(path: Path, modified: int) -> files.Lines:
    return files.Lines(path)


def _manifest(name: str) -> JsonObject | None:
    path = folder(name) / "manifest.json"
    if not path.is_file():
        return None
    manifest = files.parse(path.read_bytes(), str(path))
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise DataError(f"{path}: made by another version; run: unitymas data prepare {name} --again")
    return manifest


@dataclass(frozen=True, slots=True)
class Listed:
    """Entry of ``unitymas data list``."""

    name: str
    kind: str
    about: str
    sources: tuple[str, ...]
    splits: dict[str, int]  # rows by split, empty until prepared
    origin: str = ""

    @property
    def prepared(self) -> bool:
        """Flag: the data set is prepared on this machine."""
        return bool(self.splits)


def list_data() -> list[Listed]:
    """List every data set of the catalogue and every other prepared one, sorted by kind and name."""
    prepared = sorted(path.parent.name for path in (home() / "data").glob("*/manifest.json"))
    listed = [_listed(name) for name in dict.fromkeys([*CATALOGUE, *prepared])]
    return sorted(listed, key=lambda one: (KINDS.index(one.kind) if one.kind in KINDS else 9, one.name))


def _listed(name: str) -> Listed:
    manifest = _manifest(name) or {}
    entry = CATALOGUE.get(name)
    sources = ("hub",) * bool(entry and entry.hub) + ("package",) * bool(entry and entry.package)
    return Listed(
        name,
        entry.kind if entry else manifest.get("kind", "?"),
        entry.about if entry else f"prepared from {manifest.get('origin', '?')}",
        sources,
        {split: part["rows"] for split, part in manifest.get("splits", {}).items()},
        manifest.get("origin", ""),
    )
