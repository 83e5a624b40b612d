"""The page of an entry's episodes: written by the guard's child, linked from the board."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ...envs.untrusted import json_value, open_regular, packed_lines
from ..pages import viewer

SHOWN_EPISODES = 2_000
"""Episodes of an entry that its page of traces carries."""


def write_traces(
    folder: Path, metadata: Mapping[str, Any], results: Mapping[str, Any], page_of: Path
) -> None:
    """The page of an entry's episodes."""
    with open_regular(folder / "traces.jsonl.zst") as file:
        lines = islice(packed_lines(file, "traces.jsonl.zst", whole=True), SHOWN_EPISODES)
        viewer.build(
            (json_value(line, "traces.jsonl.zst") for line in lines), page_of,
            title=f"{metadata['name']} on {results['env_id']}", headline=results["figures"]["headline"],
        )  # fmt: skip
