"""The tools environments come with, made for a data set."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..tasks import DataSet
from .base import Tool


def retrieve(data: DataSet) -> Tool:
    """BM25 over the data set's passages, in memory; built once a process and corpus."""
    return Tool(_index(_Corpus(data)), name="retrieve", blocking=False)


class _Corpus:
    """A data set, compared by fingerprint."""

    def __init__(self, data: DataSet) -> None:
        self.data = data

    def __hash__(self) -> int:
        return hash(self.data.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Corpus) and other.data.fingerprint == self.data.fingerprint


@lru_cache(maxsize=8)
def _index(corpus: _Corpus) -> Any:
    from .retrieval import Bm25Index

    data = corpus.data
    if not data.passages:
        raise ValueError(
            f"data set {data.name!r} ({data.split}) brings no passages to search; "
            "pass tools={'retrieve': your_retriever} to make, a callable (query, k) -> [{id, title, text}]"
        )
    return Bm25Index.build(data.passages)
