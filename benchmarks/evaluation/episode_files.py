"""Episodes of an evaluation on disk: each is appended when it ends, as one zstandard frame.

A kill at any moment loses at most the episode that is being written. When the file is opened again, an incomplete last frame
is cut off. If a key has several episodes, the newest one counts.
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
    """File of episodes with keys, written with `write` and read with `episodes`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._file: BinaryIO | None = None

    def episodes(self) -> Iterator[TraceJson]:
        """Yield the traces in the file as dicts, the oldest first."""
        if self.path.exists():
            yield from read_dicts(self.path)

    def write(self, trace: Trace, key: str) -> TraceJson:
        """Append one episode, and return the dict that was written. After the return, a kill does not lose it."""
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
        """Append a frame completely or not at all. On a full disk, a write may stop half-way without an error."""
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
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def mend(path: Path) -> None:
    """Cut off an incomplete last frame, so that later frames can be read."""
    if not path.exists():
        return
    whole = whole_frames(path)
    if whole < path.stat().st_size:
        with open(path, "r+b") as file:
            file.truncate(whole)


def whole_frames(path: Path) -> int:
    """Return the number of bytes of the file that are complete frames."""
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
