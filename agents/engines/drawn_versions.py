"""Versions that drew the replies of an earlier run, for an engine that draws them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ReplayFailed(RuntimeError):
    """Raised when a replay comes to something else than its original."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Versions that drew the replies of a run."""

    versions: Mapping[str, Sequence[Sequence[int]]]
    """Decision, `episode/node` -> [first token, version] …"""
    keep: int
    """Number of older versions that are kept."""
