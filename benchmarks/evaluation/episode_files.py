"""The episodes of an evaluation on disk: appended as they end, each a zstandard frame of its own.

A kill at any moment loses at most the episode being written: opening the store again cuts a torn last frame
off and goes on behind the last whole one. The newest episode under a key counts.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ...envs.core.trace import Trace, dumps, read_dicts
from .result_types import TraceJson

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj

FILE = "traces.jsonl.zst"


class Store:
    """One file of episodes with keys. `write` is the only way in, `episodes` the way out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._file: BinaryIO | None = None

    def episodes(self) -> Iterator[TraceJson]:
        """The trace dicts in the file, oldest first."""
        if self.path.exists():
            yield from read_dicts(self.path)

    def write(self, trace: Trace, key: str) -> TraceJson:
        """Append one episode; when this returns, a kill no longer loses it. Gives the dict that was
        written.
        """
        import zstandard

        trace.tags["key"] = key
        line = dumps(trace) + b"\n"
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            mend(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (held until `close`)
        self._append(zstandard.ZstdCompressor(level=3).compress(line))
        plain: TraceJson = json.loads(line)
        return plain

    def _append(self, frame: bytes) -> None:
        """Append a frame whole or not at all: on a disk that is nearly full, a write may end half way and say nothing."""
        assert self._file is not None
        before = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(frame) < len(frame):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(before)
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def mend(path: Path) -> None:
    """Cut off a torn last frame, so that what is appended next can be read."""
    if not path.exists():
        return
    whole = whole_frames(path)
    if whole < path.stat().st_size:
        with open(path, "r+b") as file:
            file.truncate(whole)


def whole_frames(path: Path) -> int:
    """Number of bytes of the file that are whole frames."""
    import zstandard

    whole = seen = 0
    frame: ZstdDecompressionObj | None = None
    with open(path, "rb") as file:
        rest = b""
        while rest := rest or file.read(1 << 16):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                frame.decompress(rest)
            except zstandard.ZstdError:
                break
            left = frame.unused_data if frame.eof else b""
            seen += len(rest) - len(left)
            if frame.eof:
                whole, frame = seen, None
            rest = left
    return whole
