"""Check that an entry's files are exactly as `unitymas submit` writes them: the text, the order, one frame for each episode.

Everything that a file could contain besides its values is refused: another spelling of a number, blanks, comments, keys in
another order, empty frames, bytes after the last frame. So the checks cover the whole content of the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import yaml

from ...agents.basics.json_types import JsonView
from ...envs.core.trace import Trace, compressor, dumps
from ...envs.untrusted import LARGEST_WINDOW, Refused

_KEYS = ("schema", "name", "authors", "description", "url", "env_id", "files", "parameters")
_MAGIC = b"\x28\xb5\x2f\xfd"
_LONGEST_HEADER = 18
_RAW, _REPEATED, _COMPRESSED = 0, 1, 2
_LOOSER = 1.1
"""Largest ratio of sizes, besides `_MORE` bytes, because another version of zstd compresses slightly differently."""
_MORE = 64


def metadata_text(metadata: JsonView) -> str:
    """Return the text of ``metadata.yaml``. Every writer uses this form."""
    ordered = {
        key: metadata[key] for key in (*_KEYS, *sorted(metadata.keys() - set(_KEYS))) if key in metadata
    }
    ordered["files"] = dict(sorted(metadata["files"].items()))
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)


def unlike(name: str, text: str, ours: str) -> Iterator[str]:
    """Yield the places where a file's text differs from the text that we write for the same values."""
    if text == ours:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(text, ours, strict=False)) if a != b), min(len(text), len(ours))
    )
    yield (
        f"{name}: not as `unitymas submit` writes it, from character {at} on: {text[at : at + 40]!r}, "
        f"where it writes {ours[at : at + 40]!r}; pack the entry again"
    )


def respelled(trace: Mapping[str, object]) -> bytes:
    """Return the line of a recorded episode, written again from `Trace.to_dict`. Raise `ValueError` if it is no trace."""
    return dumps(Trace.from_dict(trace)) + b"\n"


def strangers(folder: Path, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the first file that does not belong to an entry."""
    with os.scandir(folder) as inside:
        for entry in inside:
            if entry.name not in known:
                yield f"{entry.name!r:.80} does not belong there: an entry holds {', '.join(known)} and nothing else"
                return


def frames(file: BinaryIO, name: str, *, most: int, longest: int) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines of a compressed file, with one zstd frame for each line, as `trace.write` writes it.

    With each line, yield whether the compressed bytes equal those of this machine's zstd.
    """
    import zstandard

    pack, unpack = compressor(), zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    number = total = 0
    while header := file.read(_LONGEST_HEADER):
        number += 1
        where = f"{name}, line {number}"
        file.seek(-len(header), os.SEEK_CUR)
        try:
            frame, size = _frame(file, header, where, longest)
            line = unpack.decompress(frame, max_output_size=size) if size else b""
        except zstandard.ZstdError as error:
            raise Refused(f"{where}: damaged, cannot be unpacked ({error})") from None
        total += len(line)
        if total > most:
            raise Refused(f"{name}: unfolds to more than {most:,} bytes")
        if line.find(b"\n") != len(line) - 1 or not line:
            raise Refused(f"{where}: a frame must hold one episode, which ends with a line break")
        ours = pack(line)
        if len(frame) > len(ours) * _LOOSER + _MORE:
            raise Refused(f"{where}: packed into {len(frame):,} bytes, where {len(ours):,} are enough")
        yield line, frame == ours


def _frame(file: BinaryIO, header: bytes, where: str, longest: int) -> tuple[bytes, int]:
    """Return the next frame of a file, and its declared number of bytes."""
    import zstandard

    if header[:4] != _MAGIC:
        raise Refused(f"{where}: no frame of zstd begins here ({header[:8]!r})")
    told = zstandard.get_frame_parameters(header)
    if told.content_size > longest:  # an unknown size is the largest number
        raise Refused(f"{where}: one episode has more than {longest:,} bytes, or does not say how many")
    if not told.has_checksum or told.dict_id or told.window_size > LARGEST_WINDOW:
        raise Refused(
            f"{where}: a frame must have a checksum, no dictionary, and a window of at most {LARGEST_WINDOW:,}"
        )
    parts = [file.read(zstandard.frame_header_size(header))]
    size, last = len(parts[0]), False
    while not last:
        parts.append(block := file.read(3))
        described = int.from_bytes(block, "little")
        last, kind, length = bool(described & 1), described >> 1 & 3, described >> 3
        if len(block) < 3 or kind > _COMPRESSED or (not length and not (last and kind == _RAW)):
            raise Refused(f"{where}: damaged, cut off or with an empty block")
        parts.append(file.read(1 if kind == _REPEATED else length))
        size += 3 + len(parts[-1])
        if size > longest + _MORE + 3 * len(parts):
            raise Refused(f"{where}: damaged, a frame longer than an episode")
    parts.append(file.read(4))
    return b"".join(parts), told.content_size
