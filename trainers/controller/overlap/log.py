"""The log of an overlapped run: every admission, arrival, batch and version, one line of JSON each.

    begin     the settings of the run                        resume    the same, where it went on
    admit     a draw of a task begins, at which step         arrive    its episodes: who drew which token, a checksum
    discard   a draw was too old when its step came          batch     the draws that a step trains on
    publish   a step is done: versions, figures              end       the run is done

Each line ends with a checksum of itself and of all lines before it. So a line that is changed, added or left out is found, and
named by its number. A kill may tear the last line: it is left out, and a resume cuts the log to the checkpoint's mark.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TypedDict

from ....agents.basics.json_types import JsonObject
from ....agents.basics.manifest import Damaged

NAME = "overlap.jsonl"


class LogMark(TypedDict):
    """Position of the log's end, for a checkpoint."""

    bytes: int
    chain: str


class Log:
    """Writer of the log."""

    def __init__(self, path: Path) -> None:
        self.path, self.chain = path, ""

    def begin(self, mark: LogMark | None, **fields: object) -> None:
        """Open the log. A resumed run removes the lines after its checkpoint's `mark`, because those steps are
        repeated.
        """
        if mark is None:
            self.path.unlink(missing_ok=True)
        else:
            self._cut(mark)
        self.write("begin" if mark is None else "resume", **fields)

    def _cut(self, mark: LogMark) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < mark["bytes"]:
            raise Damaged(
                f"{self.path} is cut: the checkpoint was written beside {mark['bytes']} bytes of it"
            )
        os.truncate(self.path, mark["bytes"])
        records(self.path)
        self.chain = last_chain(self.path)
        if self.chain != mark["chain"]:
            raise Damaged(f"{self.path} is damaged: it is not what the checkpoint was written beside")

    def write(self, kind: str, **fields: object) -> None:
        """Append one line."""
        body = json.dumps({"kind": kind, **fields}, separators=(",", ":"))
        self.chain = chained(self.chain, body)
        with open(self.path, "a") as file:
            file.write(f'{body[:-1]},"chain":"{self.chain}"}}\n')

    def mark(self) -> LogMark:
        """Return the position of the log's end, for a checkpoint."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        return {"bytes": self.path.stat().st_size, "chain": self.chain}


def chained(before: str, body: str) -> str:
    """Return the checksum of a line and of all lines before it."""
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()[:16]


def last_chain(path: Path) -> str:
    """Return the checksum at the end of a log."""
    lines = path.read_text().splitlines()
    return str(json.loads(lines[-1])["chain"]) if lines else ""


def records(path: Path) -> list[JsonObject]:
    """Return the lines of a log. Damage is an error with the number of the line. A torn last line is left out."""
    if not path.is_file():
        raise Damaged(f"{path} is missing: a run with overlap=wait or drop writes it")
    found: list[JsonObject] = []
    chain = ""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        body, comma, tail = line.rstrip("\n").rpartition(',"chain":"')
        chain = chained(chain, body + "}")
        if not comma or tail != f'{chain}"}}':
            raise Damaged(
                f"{path}, line {number}: it was changed, or a line before it was added or left out "
                "(its checksum is not that of the lines so far); a log that was touched cannot be replayed"
            )
        found.append(json.loads(line))
    if not found or found[0]["kind"] != "begin":
        raise Damaged(f"{path} is cut: its first line does not say how the run began")
    return found
