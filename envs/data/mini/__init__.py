"""Mini world: a small, consistent, generated world, with questions, programming tasks and sums.

It replaces NQ, HotpotQA, DeepCoder and DeepScaleR if the real data is not on the machine. The rows depend only on (kind,
split, size, seed): they are the same in every process and every version of Python.

    >>> data = load("qa", "test")
    >>> data.rows[0]["question"]
    'Who made The Distant Lantern?'

Reference fields, which roles never see: `answers`, `supporting`, `hops` (QA); `hidden_tests`, `solution`, `steps`
(code); `answer`, `solution`, `steps` (math).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ...core.tasks import DataSet, TaskError, fingerprint
from .passages import passages
from .programs import programs
from .questions import MIXES, QUESTIONS_PER_BLOCK, questions
from .sums import sums
from .words import SPLITS
from .world import ENTITIES_PER_BLOCK

KINDS = (*MIXES, "code", "math")
SIZES = {"train": 2048, "validation": 256, "test": 512}
SMALLEST_CORPUS = 400
"""Smallest number of passages of a corpus, even for one question."""

__all__ = ["KINDS", "SIZES", "SPLITS", "load", "passages", "programs", "questions", "sums"]


def load(kind: str, split: str, size: int | None = None, seed: int = 0) -> DataSet:
    """Return the first `size` tasks of a kind: "qa", "qa-single", "qa-multi", "code" or "math". QA tasks have passages."""
    if kind not in KINDS:
        raise TaskError(f"the mini world has no tasks of kind {kind!r}; it has {', '.join(KINDS)}")
    if split not in SPLITS:
        raise TaskError(f"the mini world has no split {split!r}; its splits are {', '.join(SPLITS)}")
    if size is not None and size < 1:
        raise TaskError(f"a data set needs at least one task, not size={size}")
    return _load(kind, split, SIZES[split] if size is None else size, seed)


@lru_cache(maxsize=16)
def _load(kind: str, split: str, size: int, seed: int) -> DataSet:
    rows: tuple[Mapping[str, object], ...]
    if kind in ("code", "math"):
        rows = tuple((programs if kind == "code" else sums)(split, size, seed))
        return DataSet("mini", split, rows, fingerprint(rows))
    blocks = -(-size // QUESTIONS_PER_BLOCK)
    rows = tuple(questions(kind, split, size, seed))
    corpus = tuple(passages(split, max(blocks * ENTITIES_PER_BLOCK, SMALLEST_CORPUS), seed))
    return DataSet("mini", split, rows, fingerprint((*rows, *corpus)), corpus)
