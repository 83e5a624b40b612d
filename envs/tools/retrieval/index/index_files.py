"""Files of an index on disk: a directory that is created in one step, with checksums.

    wiki.index/
      manifest.json      kind, settings, fingerprint, and size and SHA-256 of every other file
      passages.jsonl     the passages; passages.offsets says where each begins
      …                  other files, which depend on the kind of index

A build writes into a hidden directory beside the path, syncs it, and renames it at the end. So a crash or a full disk leaves
nothing at the path. A resumable build always uses the same hidden directory, which stays after a kill. Files are read through
memory maps, so processes on one machine share one copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from .....agents.basics.json_types import JsonObject
from ..retriever import IndexFormatError, Passage, RetrievalError, as_passage

FORMAT = 1
_DISK_TROUBLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would exceed the size limit",
    errno.EROFS: "the disk is read-only",
}


class Draft:
    """Directory of an index that is being built."""

    def __init__(self, directory: Path, resumable: bool = False) -> None:
        self.directory, self.resumable = directory, resumable
        self.worth_keeping = False
        """Flag: an interrupted build can continue from this draft."""

    def file(self, name: str, mode: Literal["wb", "ab"] = "wb") -> BinaryIO:
        """Open a file of the draft, to replace it ("wb") or to append to it ("ab")."""
        return open(self.directory / name, mode, buffering=1 << 20)

    def array(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return a writable array in the file `name`. Its disk space is reserved here, so that a full disk is an error now.

        Otherwise a later write into the memory map would end the process with a bus error.
        """
        path, kind = self.directory / name, np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        with open(path, "wb") as file:
            _reserve(file, size)
        return np.memmap(path, kind, "r+", shape=shape)

    def save(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Write an array as a file of the draft."""
        with self.file(name) as file:
            file.write(np.ascontiguousarray(values).data)


def _reserve(file: BinaryIO, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    file.writelines(bytes(min(1 << 20, size - start)) for start in range(0, size, 1 << 20))  # macOS


@contextmanager
def new_index(
    path: Path, manifest: JsonObject, *, overwrite: bool = False, resumable: bool = False
) -> Iterator[Draft]:
    """Yield a draft, which becomes the index at `path` if the block ends without an error, and is removed otherwise.

    With `resumable`, an interrupted build's draft is used again. It also stays if this build fails after it has saved a part: a
    bad row among millions, or a full disk, costs no more than a kill. The block may add to `manifest`, because the fingerprint is
    computed last.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _taken(path.with_name(f".{path.name}.building")) if resumable else None
    if lock is None:
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.building-", dir=path.parent))
    else:
        draft = path.with_name(f".{path.name}.building")
    files = Draft(draft, resumable=lock is not None)
    try:
        yield files
        _seal(draft, manifest)
        _move_into_place(draft, path, str(manifest["fingerprint"]), overwrite)
        files.worth_keeping = False
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        raise RetrievalError(
            f"cannot write the index {path}: {_DISK_TROUBLE[error.errno]}. "
            + (
                f"Free some space, and the same command continues from what is in {draft}"
                if files.worth_keeping
                else "What was written has been removed; free some space, or choose a path on another disk."
            )
        ) from error
    finally:
        if not files.worth_keeping:
            shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _taken(folder: Path) -> int | None:
    """Lock a folder. Return the descriptor to close, or None if another process builds in it."""
    import fcntl

    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except OSError:
        os.close(lock)
        return None


def _seal(draft: Path, manifest: JsonObject) -> None:
    """Write the manifest of the finished files, and sync everything to the disk."""
    manifest["files"] = {file.name: _file_facts(file) for file in sorted(draft.iterdir())}
    body = {"format": FORMAT, **manifest}
    text = json.dumps({**body, "checksum": _checksum(body)}, indent=1)
    (draft / "manifest.json").write_text(text, encoding="utf-8")
    for file in [*draft.iterdir(), draft]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _file_facts(file: Path) -> dict[str, object]:
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(_mapped(file)).hexdigest()}


def _checksum(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _move_into_place(draft: Path, path: Path, fingerprint: str, overwrite: bool) -> None:
    replaced = draft.with_name(f"{draft.name}.replaced")
    if overwrite and path.exists():
        if not (path / "manifest.json").is_file():
            raise RetrievalError(
                f"{path} exists and is no index: it is not overwritten. Choose another path."
            )
        os.rename(path, replaced)
    try:
        os.rename(draft, path)
    except OSError:
        if replaced.exists():
            os.rename(replaced, path)
        # Another process may have finished the same index first; then its index is used.
        if not (path / "manifest.json").is_file() or read_manifest(path)["fingerprint"] != fingerprint:
            raise
    shutil.rmtree(replaced, ignore_errors=True)


def read_manifest(path: Path) -> JsonObject:
    """Return the manifest of the index at `path`, after a check of its own checksum."""
    file = path / "manifest.json"
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        checksum = body.pop("checksum")
        version = body["format"]
    except FileNotFoundError:
        raise IndexFormatError(
            f"{path} is no index: it has no manifest.json. Build one with `unitymas data index CORPUS`."
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise IndexFormatError(f"{file} is damaged ({error}); build the index again") from None
    if version != FORMAT:
        raise IndexFormatError(
            f"{file} has format {version!r}, this version reads {FORMAT}; build the index again"
        )
    if checksum != _checksum(body):
        raise IndexFormatError(f"{file} is damaged (its checksum does not match); build the index again")
    assert isinstance(body, dict)
    return body


@contextmanager
def as_told_by(path: Path) -> Iterator[None]:
    """Turn errors about missing or wrong entries of a manifest into an IndexFormatError that names the manifest."""
    try:
        yield
    except RetrievalError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IndexFormatError(
            f"{path / 'manifest.json'} does not fit this index ({type(error).__name__}: {error}); build it again"
        ) from None


def check_files(path: Path, manifest: JsonObject, *, contents: bool = True) -> None:
    """Raise IndexFormatError with the name of the file unless all files have the right size and content."""
    for name, facts in manifest["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise IndexFormatError(f"{file} is missing; build the index again")
        if size != facts["bytes"]:
            raise IndexFormatError(
                f"{file} has {size} bytes instead of {facts['bytes']}; build the index again"
            )
        if contents and hashlib.sha256(_mapped(file)).hexdigest() != facts["sha256"]:
            raise IndexFormatError(f"{file} is damaged (its checksum does not match); build the index again")


def _mapped(file: Path) -> mmap.mmap | bytes:
    with open(file, "rb") as handle:
        empty = os.fstat(handle.fileno()).st_size == 0  # an empty file cannot be mapped
        return b"" if empty else mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


def read_array(file: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a read-only array over the mapped file: a plain ndarray, because slices of np.memmap are slow."""
    return np.frombuffer(_mapped(file), dtype)


class Fingerprint:
    """Fingerprint of a corpus and the settings of its reader. It is equal for indexes in memory and on disk."""

    def __init__(self, kind: str, settings: Mapping[str, object]) -> None:
        self._digest = hashlib.sha256(json.dumps([kind, FORMAT, settings], sort_keys=True).encode())

    def add(self, line: bytes) -> None:
        """Add the line of the next passage."""
        self._digest.update(line)

    def __str__(self) -> str:
        return self._digest.hexdigest()[:32]


def check_same(path: Path, fingerprint: Fingerprint, lines: Iterable[bytes]) -> None:
    """Raise an error unless the index at `path` has exactly these passages (lines of passages.jsonl) and settings."""
    for line in lines:
        fingerprint.add(line)
    if read_manifest(path)["fingerprint"] != str(fingerprint):
        raise RetrievalError(
            f"{path} holds an index of other passages or settings: "
            "choose another path, or replace it (--overwrite, in Python overwrite=True)"
        )


def encode(passage: object, position: int) -> tuple[Passage, bytes]:
    """Return a checked passage and its line in passages.jsonl."""
    checked = as_passage(passage, position)
    try:
        return checked, json.dumps(checked, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise ValueError(
            f"passage {position} holds text that is not valid Unicode ({error.reason})"
        ) from None


class PassageWriter:
    """Writer of a draft's passages.jsonl."""

    def __init__(self, draft: Draft, kept: int = 0) -> None:
        """Begin after the first `kept` bytes, which an earlier build has written."""
        self._draft = draft
        if kept:
            os.truncate(draft.directory / "passages.jsonl", kept)
        self._file = draft.file("passages.jsonl", "ab" if kept else "wb")
        self._ends = array("q", [0])

    def add(self, line: bytes) -> None:
        """Append the line of a passage."""
        self._file.write(line)
        self.skip(line)

    def skip(self, line: bytes) -> None:
        """Count a line that an earlier build has written."""
        self._ends.append(self._ends[-1] + len(line))

    def sync(self) -> int:
        """Sync the file to the disk. Return its size."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._ends[-1]

    def close(self) -> None:
        """Write the offsets of the passages."""
        self._file.close()
        self._draft.save("passages.offsets", np.frombuffer(self._ends, np.int64))


class Strings(Sequence[bytes]):
    """Sequence of byte strings in a mapped file, with the offset of each."""

    def __init__(self, file: Path, offsets: Path) -> None:
        self._bytes = _mapped(file)
        self._offsets = read_array(offsets, np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, place: Any) -> Any:
        return self._bytes[self._offsets[place] : self._offsets[place + 1]]


class PassageFile(Sequence[Passage]):
    """Sequence of the passages of an index on disk."""

    def __init__(self, path: Path) -> None:
        self._lines = Strings(path / "passages.jsonl", path / "passages.offsets")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, position: object) -> Any:
        return json.loads(self._lines[position])
