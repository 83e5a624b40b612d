"""The page of an entry's episodes: written by the guard's child, linked from the board."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...envs.untrusted import json_value, open_regular, packed_lines
from ..evaluation.result_types import Metadata, Results
from ..pages import viewer

SHOWN_EPISODES = 2_000
"""Episodes of an entry that its page of traces carries."""
SHOWN_BYTES = 40_000_000
"""Bytes of them, unpacked; the page packs them."""


def write_traces(folder: Path, metadata: Metadata, results: Results, page_of: Path) -> None:
    """The page of an entry's episodes."""
    with open_regular(folder / "traces.jsonl.zst") as file:
        lines = _first(packed_lines(file, "traces.jsonl.zst", whole=True))
        viewer.build(
            (json_value(line, "traces.jsonl.zst") for line in lines), page_of,
            title=f"{metadata['name']} on {results['env_id']}", headline=results["figures"]["headline"],
        )  # fmt: skip


def _first(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Take as many episodes as a page carries."""
    size = 0
    for number, line in enumerate(lines):
        size += len(line)
        if number >= SHOWN_EPISODES or size > SHOWN_BYTES:
            return
        yield line
