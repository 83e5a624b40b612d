"""Record of a draw in the log: the successful attempt of each sample, the version of each token, and a checksum of the
episode.
"""

from __future__ import annotations

import hashlib
import json
from typing import TypedDict

from ....envs.core.trace import Trace
from ..collect import Harvest


class EpisodeRecord(TypedDict):
    """Record of one sample."""

    attempt: int
    versions: dict[str, list[list[int]]]
    """Versions that sampled the tokens of each act, as [first token, version] …"""
    checksum: str


class DrawRecord(TypedDict):
    """Record of a draw: its samples, and the number of failures by cause."""

    episodes: dict[str, EpisodeRecord]
    failures: dict[str, int]


def record_of(harvest: Harvest, number: int, size: int) -> DrawRecord:
    """Return the record of a draw. Failed samples are not among its episodes, but counted by cause."""
    prefix = f"{number // size}:{number % size}."
    episodes: dict[str, EpisodeRecord] = {}
    for name, trace in zip(harvest.episodes, harvest.traces, strict=True):
        sample, _, attempt = name.removeprefix(prefix).partition("~")
        episodes[sample] = {
            "attempt": int(attempt or 0), "versions": versions_of(trace), "checksum": checksum_of(trace),
        }  # fmt: skip
    return {"episodes": episodes, "failures": dict(harvest.failures)}


def versions_of(trace: Trace) -> dict[str, list[list[int]]]:
    """Return the versions that sampled the tokens of each act, as [first token, version] …"""
    return {
        node.id: [[0, node.meta.version], *(list(pair) for pair in node.meta.switches or ())]
        for node in trace.acts()
        if node.meta.version is not None
    }


def checksum_of(trace: Trace) -> str:
    """Return a checksum of replies and rewards, which two runs of the same episode share."""
    text = json.dumps(trace.to_dict(volatile=False), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
