"""Record of a draw in the log: which attempt of each sample ended, who drew which token, and a checksum of the episode."""

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
    """Version that drew the tokens of each act, as [first token, version] …"""
    checksum: str


class DrawRecord(TypedDict):
    """Record of a draw: its samples, and what failed by cause."""

    episodes: dict[str, EpisodeRecord]
    failures: dict[str, int]


def record_of(harvest: Harvest, number: int, size: int) -> DrawRecord:
    """Return the record: samples that failed are not among its episodes, and counted by cause."""
    prefix = f"{number // size}:{number % size}."
    episodes: dict[str, EpisodeRecord] = {}
    for name, trace in zip(harvest.episodes, harvest.traces, strict=True):
        sample, _, attempt = name.removeprefix(prefix).partition("~")
        episodes[sample] = {
            "attempt": int(attempt or 0), "versions": versions_of(trace), "checksum": checksum_of(trace),
        }  # fmt: skip
    return {"episodes": episodes, "failures": dict(harvest.failures)}


def versions_of(trace: Trace) -> dict[str, list[list[int]]]:
    """Version that drew the tokens of each act, as [first token, version] …"""
    return {
        node.id: [[0, node.meta.version], *(list(pair) for pair in node.meta.switches or ())]
        for node in trace.acts()
        if node.meta.version is not None
    }


def checksum_of(trace: Trace) -> str:
    """Checksum of what two runs of the same episode share: what was said, and what it earned."""
    text = json.dumps(trace.to_dict(volatile=False), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
