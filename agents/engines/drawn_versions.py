"""Versions that sampled the replies of an earlier run, for an engine that repeats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ReplayFailed(RuntimeError):
    """Raised when a replay differs from its original."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Versions that sampled the replies of a run."""

    versions: Mapping[str, Sequence[Sequence[int]]]
    """Versions by decision, `episode/node`: [first token, version] …"""
    keep: int
    """Number of older versions that are kept."""
