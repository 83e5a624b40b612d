"""Cache of answers: bounded and thread-safe, by (index, query, k)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..retriever import Passage

MemoKey = tuple[str, str, int]


class AnswerCache:
    """Cache of the `capacity` most recently used answers. Callers get copies, so they cannot change the cache."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        self._answers: OrderedDict[MemoKey, list[Passage]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, fingerprint: str, query: str, k: int) -> list[Passage] | None:
        """Return the passages of a cached query, else None."""
        with self._lock:
            answer = self._answers.get((fingerprint, query, k))
            if answer is None:
                return None
            self._answers.move_to_end((fingerprint, query, k))
            return copied(answer)

    def put(self, fingerprint: str, query: str, k: int, answer: list[Passage]) -> None:
        """Store the passages of a query. The least recently used answers are dropped."""
        if not self.capacity:
            return
        with self._lock:
            self._answers[fingerprint, query, k] = copied(answer)
            self._answers.move_to_end((fingerprint, query, k))
            while len(self._answers) > self.capacity:
                self._answers.popitem(last=False)

    def __len__(self) -> int:
        return len(self._answers)

    def __reduce__(self) -> tuple[type[AnswerCache], tuple[int]]:
        return AnswerCache, (self.capacity,)  # a pickle holds no answers


def copied(passages: list[Passage]) -> list[Passage]:
    """Return copies of passages."""
    return [passage.copy() for passage in passages]
