"""Interface of a retriever: a function of `(query, k)` that returns `[{id, title, text}]`, best first.

Any such function, sync or async, can be the `retrieve` tool of a workflow. The retrievers of this package also have a
common interface, so that each can replace another:

- `retriever(query, k)` answers one query, `retriever.retrieve_many(queries, k)` a batch.
- `await retriever.aretrieve_many(queries, k)` answers a batch without blocking the event loop.
- A batch has one result for each query, in order. A blank query, or one without a match, has the result `[]`.
- `retriever.fingerprint` identifies corpus and index: equal fingerprints give equal results.
- Retrievers can be pickled. The pickle of an index on disk contains its path.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from ....agents.basics.threads import contained

T = TypeVar("T")
IntArray = npt.NDArray[np.integer]


class Passage(TypedDict):
    """Passage of a corpus."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """Result of a search: the passage's position in the corpus, and its score (higher is better)."""

    position: int
    score: float


class RetrievalError(RuntimeError):
    """Raised when a retriever cannot answer. The message names the retriever, the reason and a remedy."""


class IndexFormatError(RetrievalError):
    """Raised when an index on disk is damaged, incomplete or of another kind. The message names the file."""


class Index(ABC):
    """Base of the indexes in this process: `Bm25Index` and `DenseIndex`."""

    fingerprint: str
    _passages: Sequence[Passage]

    def __len__(self) -> int:
        return len(self._passages)

    def passage(self, position: int) -> Passage:
        """Return the passage at a position of the corpus, as a new dict."""
        row = self._passages[position]
        return Passage(id=row["id"], title=row["title"], text=row["text"])

    @abstractmethod
    def search_many(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return up to `k` hits for each query, best first. Hits with equal scores are in the order of the corpus."""

    def __call__(self, query: str, k: int) -> list[Passage]:
        return self.retrieve_many([query], k)[0]

    def retrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages for each query, best first."""
        return [[self.passage(hit.position) for hit in hits] for hits in self.search_many(queries, k)]

    async def aretrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Retrieve in a thread, without blocking the event loop."""
        return await asyncio.to_thread(contained(self.retrieve_many), queries, k)


def check_k(k: int) -> None:
    """Raise an error unless `k` is a valid number of passages."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k, the number of passages to retrieve, must be a positive integer; got {k!r}")


def check_queries(queries: Sequence[str]) -> None:
    """Raise an error if a batch is a single string, which Python would read as a sequence of letters."""
    if isinstance(queries, str):
        raise TypeError(f"queries must be a list of strings, not one string: write [{queries!r}]")
    for place, query in enumerate(queries):
        if not isinstance(query, str):
            raise TypeError(f"queries[{place}] must be a string, got {type(query).__name__}")


def as_passage(raw: object, position: int) -> Passage:
    """Return a value as a passage. A missing id becomes the position. A missing text raises a TypeError."""
    if not isinstance(raw, dict):
        raise TypeError(
            f"passage {position} must be a dict with id, title and text; got {type(raw).__name__}"
        )
    text, title = raw.get("text"), raw.get("title", "")
    if not isinstance(text, str) or not isinstance(title, str):
        raise TypeError(
            f"passage {position} needs a string 'text' and, if any, a string 'title'; "
            f"it has {sorted(map(str, raw))}"
        )
    return Passage(id=str(raw.get("id", position)), title=title, text=text)


def best_first(scores: IntArray, positions: IntArray, k: int) -> list[tuple[int, int]]:
    """Return the `k` best pairs (position, score) of integer scores. Equal scores are in the order of the corpus.

    A partial sort is not stable. So score and position are packed into one integer key, which is unique, and the order of
    equal scores is the same on every machine.
    """
    keys = (scores.astype(np.int64) << 32) - positions
    if len(keys) > k:
        keys = np.partition(keys, len(keys) - k)[-k:]
    keys.sort()
    return [(-key & 0xFFFFFFFF, (key + (-key & 0xFFFFFFFF)) >> 32) for key in keys[::-1].tolist()]


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield items in lists of `size`. The last list may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
