"""Interface of a retriever: `(query, k) -> [{id, title, text}]`, best first.

Any callable of that shape, sync or async, serves as a workflow's `retrieve` tool. The back ends of this
package share a little more, so that they can stand in for one another:

- `retriever(query, k)` answers one query; `retriever.retrieve_many(queries, k)` a batch;
- `await retriever.aretrieve_many(queries, k)` does so without holding up the event loop;
- answers are aligned with the queries, always: a blank query, or one that matches nothing, has the answer `[]`;
- `retriever.fingerprint` names what is searched: equal fingerprints give equal answers;
- retrievers pickle (an index on disk travels as its path).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from ....agents.basics.threads import contained

T = TypeVar("T")
IntArray = npt.NDArray[np.integer]


class Passage(TypedDict):
    """One retrievable piece of text."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """One passage found: its position in the corpus, and its score (higher is better)."""

    position: int
    score: float


class RetrievalError(RuntimeError):
    """A retriever could not answer; the message says which one, why, and what to do."""


class IndexFormatError(RetrievalError):
    """An index on disk is damaged, incomplete or of another kind; the message names the file."""


class Index(ABC):
    """A searchable corpus in this process: what `Bm25Index` and `DenseIndex` have in common."""

    fingerprint: str
    _passages: Sequence[Passage]

    def __len__(self) -> int:
        return len(self._passages)

    def passage(self, position: int) -> Passage:
        """The passage at `position` of the corpus, as a fresh dict."""
        row = self._passages[position]
        return Passage(id=row["id"], title=row["title"], text=row["text"])

    @abstractmethod
    def search_many(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return up to `k` hits for each query, best first; equal scores in corpus order."""

    def __call__(self, query: str, k: int) -> list[Passage]:
        return self.retrieve_many([query], k)[0]

    def retrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages for each query, best first."""
        return [[self.passage(hit.position) for hit in hits] for hits in self.search_many(queries, k)]

    async def aretrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Retrieve in a thread, so that the event loop goes on."""
        return await asyncio.to_thread(contained(self.retrieve_many), queries, k)


def check_k(k: int) -> None:
    """Raise unless `k` is a sensible number of passages to ask for."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k, the number of passages to retrieve, must be a positive integer; got {k!r}")


def check_queries(queries: Sequence[str]) -> None:
    """Raise when one string is given for a batch, which Python would read as a batch of letters."""
    if isinstance(queries, str):
        raise TypeError(f"queries must be a list of strings, not one string: write [{queries!r}]")
    for place, query in enumerate(queries):
        if not isinstance(query, str):
            raise TypeError(f"queries[{place}] must be a string, got {type(query).__name__}")


def as_passage(raw: object, position: int) -> Passage:
    """`raw` as a passage, or a TypeError saying what it lacks. A missing id becomes the position."""
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
    """The `k` best (position, score) pairs of integer scores; equal scores in corpus order.

    Score and position are packed into one integer key, so keys are unique and a partial sort, which is not
    stable, cannot make the order of ties depend on the machine.
    """
    keys = (scores.astype(np.int64) << 32) - positions
    if len(keys) > k:
        keys = np.partition(keys, len(keys) - k)[-k:]
    keys.sort()
    return [(-key & 0xFFFFFFFF, (key + (-key & 0xFFFFFFFF)) >> 32) for key in keys[::-1].tolist()]


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """`items` in lists of `size`, the last one shorter."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
