"""Preparation of a data set: download it, read it, check every row, and put the complete set in its place.

The set is built in a temporary folder, split by split. So an interrupted run continues with the next split, and the data
set gets its name only when it is complete. Only ``prepare`` downloads data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...agents.basics.hints import counted
from ...agents.basics.json_types import JsonObject
from ...agents.basics.manifest import checksum
from ...agents.fetch.home import home
from ..core.tasks import fingerprint
from . import files
from .local import SCHEMA, folder, is_prepared
from .published import CATALOGUE, SPLITS, Known, known
from .recognise import adapt, entry_for, guess_kind, passages_of, records_of, unique
from .row_schemas import DataError
from .sources import Say, Source, cut_by_id, source_for, write_json


def prepare(
    name: str, source: str = "", *, kind: str | None = None, again: bool = False, say: Say | None = None
) -> Path:
    """Prepare a data set on this machine, and return its folder. A set that is already prepared stays, unless ``again``.

    ``source`` is "hub", "package" or a path. The default is the hub, or the package if only a package has the data set.
    A data set outside the catalogue needs a path. Its ``kind`` is "qa", "code" or "math"; by default the fields of the first
    record decide.
    """
    say = say or _quiet
    place = folder(name)
    if kind and name in CATALOGUE and kind != CATALOGUE[name].kind:
        raise DataError(
            f"{name} has tasks of kind {CATALOGUE[name].kind}, not {kind}: leave --kind out, or choose another name"
        )
    if is_prepared(name) and not again:
        say(f"{name} is prepared already: {place}")
        return place
    entry = CATALOGUE.get(name) or _own(name, source or "hub", kind)
    source = source or ("hub" if entry.hub or not entry.package else "package")
    aside = place.with_name(f".{name}.part")
    if again:
        shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True, exist_ok=True)
    _build(entry, source_for(entry, source, home() / "downloads", say), aside, say)
    old = place.with_name(f".{name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    aside.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    return place


def _quiet(message: str) -> None:
    """Ignore a message. Calls from Python are silent; the command line prints."""


def _own(name: str, source: str, kind: str | None) -> Known:
    """Return a catalogue entry for a data set that the catalogue does not have."""
    if source in ("hub", "package"):
        known(name)  # raises, with the nearest names
    first = next(records_of(Path(source)), None)
    if first is None:
        raise DataError(f"{source}: holds no record")
    place, record = first
    return entry_for(name, kind or guess_kind(record, place), record)


def _build(entry: Known, source: Source, aside: Path, say: Say) -> None:
    """Write the missing splits, then the passages, then the manifest."""
    progress = aside / "progress.json"
    done = _progress(progress, source.origin, aside)
    for split in source.splits():
        if split in done["finished"]:
            say(f"{entry.name}/{split}: already there")
            continue
        written = _write_split(entry, source, split, aside, say)
        done["finished"].append(split)
        done["splits"].update(written)
        write_json(progress, done)
    written = {split: done["splits"][split] for split in SPLITS if split in done["splits"]}
    _check_pins(entry, source, written)
    manifest = {
        "schema": SCHEMA, "name": entry.name, "kind": entry.kind, "origin": source.origin, "licence": entry.licence,
        "splits": written,
    }  # fmt: skip
    if note := _note(entry, source):
        manifest["note"] = note
        say(f"{entry.name}: {note}")
    if entry.corpus:
        manifest["passages"] = _join_passages(aside)
    write_json(aside / "manifest.json", manifest)
    progress.unlink()


def _check_pins(entry: Known, source: Source, written: Mapping[str, Mapping[str, object]]) -> None:
    """Raise an error if the rows of a package differ from those whose checksums the catalogue holds."""
    pins = entry.package.fingerprints if entry.package and source.origin.startswith("package:") else {}
    for split, pin in pins.items():
        got = written.get(split, {}).get("fingerprint", "none")
        if got != pin:
            raise DataError(
                f"{entry.name}/{split} has fingerprint {got}, not the pinned {pin}: another release of unitymas read the "
                "package otherwise; scores on these rows would compare with nobody's. Report it, or take --from PATH"
            )


def _progress(path: Path, origin: str, aside: Path) -> JsonObject:
    """Return the splits that an interrupted run finished. Their origin must be the same and their files complete."""
    fresh: JsonObject = {"origin": origin, "finished": [], "splits": {}}
    if not path.is_file():
        return fresh
    progress: JsonObject = json.loads(path.read_text("utf-8"))
    whole = all(
        (aside / f"{split}.jsonl").is_file() and checksum(aside / f"{split}.jsonl") == part["sha256"]
        for split, part in progress["splits"].items()
    )
    return progress if progress["origin"] == origin and whole else fresh


def _write_split(
    entry: Known, source: Source, split: str, aside: Path, say: Say
) -> dict[str, dict[str, object]]:
    """Write one split of the source: one file, or three if the source has only one split."""
    parts = _parts(split, source)
    streams = {part: (aside / f"{part}.jsonl").open("wb") for part in parts}
    counts = dict.fromkeys(parts, 0)
    left_out, seen = 0, set[str]()
    held_out = _ids(entry, source) if split == "all" else set[str]()
    corpus = _PassageFile(aside / f"passages-{split}.jsonl") if entry.corpus else None
    try:
        for place, record in source.records(split):
            row = adapt(entry.adapter, entry.kind, record, place)
            if row is None:
                left_out += 1
                continue
            row["id"] = unique(row["id"], seen)
            part = "test" if row["id"] in held_out else _part(_cut_key(entry, record, row), parts)
            streams[part].write(_line(row))
            counts[part] += 1
            if corpus:
                corpus.extend(passages_of(entry, record, place))
            if sum(counts.values()) % 10_000 == 0:
                say(f"{entry.name}/{split}: {counted(sum(counts.values()), 'row')}")
    finally:
        for stream in streams.values():
            stream.close()
        if corpus:
            corpus.close()
    if not any(counts.values()):
        raise DataError(f"{source.origin}: no usable record for {entry.name}/{split}")
    if left_out:
        say(
            f"{entry.name}/{split}: {counted(left_out, 'record')} left out (unanswerable, or not to be graded)"
        )
    for part in parts:
        say(f"{entry.name}/{part}: {counted(counts[part], 'row')}")
    return {part: _summary(aside / f"{part}.jsonl", counts[part]) for part in parts if counts[part]}


def _note(entry: Known, source: Source) -> str:
    """Return a note on the splits that the source does not have."""
    key = entry.together or "id"
    if "all" in source.splits():
        return f"The source has one split; it was cut by {key} hash: 80% train, 10% validation, 10% test."
    if "train" in source.splits() and "validation" not in source.splits():
        return f"The source has no validation split; a tenth of train, by {key} hash, became one."
    return ""


def _ids(entry: Known, source: Source) -> set[str]:
    rows = (adapt(entry.adapter, entry.kind, record, place) for place, record in source.held_out())
    return {row["id"] for row in rows if row}


def _parts(split: str, source: Source) -> tuple[str, ...]:
    """Return the splits that one split of the source becomes."""
    if split == "all":
        return SPLITS
    without_validation = split == "train" and "validation" not in source.splits()
    return ("train", "validation") if without_validation else (split,)


def _cut_key(entry: Known, record: Mapping[str, object], row: Mapping[str, object]) -> str:
    """Return the key that decides a task's split: its id, or the field that it shares with tasks of the same split."""
    return str(record.get(entry.together) or row["id"]) if entry.together else str(row["id"])


def _part(key: str, parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return parts[0]
    part = cut_by_id(key)
    return part if part in parts else "train"


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _summary(path: Path, rows: int) -> dict[str, object]:
    return {
        "rows": rows, "bytes": path.stat().st_size, "sha256": checksum(path), "fingerprint": fingerprint(files.Lines(path)),
    }  # fmt: skip


class _PassageFile:
    """File of the distinct paragraphs of a split."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._seen: set[str] = set()

    def extend(self, passages: Iterable[Mapping[str, str]]) -> None:
        for passage in passages:
            if passage["id"] not in self._seen:
                self._seen.add(passage["id"])
                self._stream.write(_line(passage))

    def close(self) -> None:
        self._stream.close()


def _join_passages(aside: Path) -> dict[str, object]:
    """Merge the paragraphs of all splits into one corpus."""
    seen: set[str] = set()
    parts = sorted(aside.glob("passages-*.jsonl"))
    with (aside / "passages.jsonl").open("wb") as joined:
        for part in parts:
            for passage in files.Lines(part):
                if passage["id"] not in seen:
                    seen.add(passage["id"])
                    joined.write(_line(passage))
    for part in parts:
        part.unlink()
    path = aside / "passages.jsonl"
    return {"rows": len(seen), "bytes": path.stat().st_size, "sha256": checksum(path)}
