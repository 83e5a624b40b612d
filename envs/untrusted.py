"""Readers for files from strangers, with bounds of size and depth. They never run any content.

A name may be a link, a pipe or a device. A small archive may unpack to terabytes. A short JSON text may nest so deep that
the interpreter ends. All of these are refused, with the name of the file and the bound that it breaks.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_LINE = 200_000_000
"""Largest number of bytes of one line of traces, unpacked."""
LARGEST_WINDOW = 1 << 27
"""Largest number of bytes that the decompression of one frame may hold in memory."""
DEEPEST = 200
"""Largest number of nested lists and objects in one JSON value."""


class Refused(ValueError):
    """Raised when a file breaks a bound or has the wrong kind."""


def open_regular(path: Path, most: int | None = None, *, links: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    Pipes, devices and files of more than `most` bytes are refused before anything is read. Links are refused unless
    `links` allows them.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags if links else flags | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink() and not links:
            raise Refused(f"{path.name} is a link; only regular files are read") from None
        raise Refused(f"{path.name} cannot be opened: {error.strerror or error}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise Refused(f"{path.name} is no regular file")
    if most is not None and status.st_size > most:
        os.close(handle)
        raise Refused(f"{path.name} is larger than {most:,} bytes")
    return os.fdopen(handle, "rb")


def read_text(path: Path, most: int) -> str:
    """Return the content of a UTF-8 file of at most `most` bytes."""
    with open_regular(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Refused(f"{path.name} is larger than {most:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path.name} is not UTF-8 at byte {error.start}") from None


def json_value(text: str | bytes, where: str, *, deepest: int = DEEPEST, twins: bool = False) -> Any:
    """Parse one JSON value. Deeper nesting than `deepest` is refused, and so are repeated keys unless `twins` allows them.

    NaN and infinities are accepted here, because a model may have written them. The schema of a file checks its numbers.
    """
    try:
        value = json.loads(text, object_pairs_hook=None if twins else _without_twins)
    except RecursionError:
        raise Refused(f"{where}: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{where}: not UTF-8 at byte {error.start}") from None
    except Refused as error:
        raise Refused(f"{where}: {error}") from None
    except ValueError as error:
        raise Refused(f"{where}: not JSON ({error})") from None
    if _deeper_than(value, deepest):
        raise Refused(f"{where}: nested more than {deepest} levels deep")
    return value


def packed_lines(file: BinaryIO, name: str, *, whole: bool) -> Iterator[bytes]:
    """Yield the lines of a JSONL file, which is decompressed if its name ends in ``.zst``.

    An incomplete last line, whose writer was killed, is skipped; with `whole` it is refused. Damaged files and lines of more than
    `LONGEST_LINE` bytes are refused.
    """
    import zstandard

    source: BinaryIO | io.BufferedReader = file
    if name.endswith(".zst"):
        unpack = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        source = io.BufferedReader(unpack.stream_reader(file, read_across_frames=True), 1 << 16)
    number = 0
    while True:
        number += 1
        try:
            line = source.readline(LONGEST_LINE + 1)
        except zstandard.ZstdError as error:
            raise Refused(f"{name}, line {number}: damaged, cannot be unpacked ({error})") from None
        if len(line) > LONGEST_LINE:
            raise Refused(f"{name}, line {number}: one episode has more than {LONGEST_LINE:,} bytes")
        if not line:
            return
        if not line.endswith(b"\n"):
            if whole:
                raise Refused(f"{name}, line {number}: cut off in the middle")
            return
        yield line


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twin = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Refused(f"the key {twin[:60]!r} stands there twice")
    return table


def _deeper_than(value: object, deepest: int) -> bool:
    level = [value]
    for _ in range(deepest):
        inner: list[object] = []
        for item in level:
            if type(item) is dict:
                inner.extend(v for v in item.values() if type(v) in (dict, list))
            elif type(item) is list:
                inner.extend(v for v in item if type(v) in (dict, list))
        if not inner:
            return False
        level = inner
    return True
