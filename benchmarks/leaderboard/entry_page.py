"""Page of an entry's episodes, which the guard's child process writes and the board links to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...envs.untrusted import json_value, open_regular, packed_lines
from ..evaluation.result_types import Metadata, Results
from ..pages import viewer

SHOWN_EPISODES = 2_000
"""Largest number of episodes on an entry's page."""
SHOWN_BYTES = 40_000_000
"""Largest number of bytes of these episodes, before compression."""


def write_traces(folder: Path, metadata: Metadata, results: Results, page_of: Path) -> None:
    """Write the page of an entry's episodes."""
    with open_regular(folder / "traces.jsonl.zst") as file:
        lines = _first(packed_lines(file, "traces.jsonl.zst", whole=True))
        viewer.build(
            (json_value(line, "traces.jsonl.zst") for line in lines), page_of,
            title=f"{metadata['name']} on {results['env_id']}", headline=results["figures"]["headline"],
        )  # fmt: skip


def _first(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the episodes that fit on the page."""
    size = 0
    for number, line in enumerate(lines):
        size += len(line)
        if number >= SHOWN_EPISODES or size > SHOWN_BYTES:
            return
        yield line
