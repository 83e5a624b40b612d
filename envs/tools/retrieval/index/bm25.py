"""BM25 index in memory or mapped from disk, exact and deterministic.

    index = Bm25Index.build(passages)                       # in memory
    index = Bm25Index.build(passages, "wiki.index")         # on disk, built once
    index = Bm25Index.open("wiki.index")                    # mapped: processes share one copy
    index("who directed Metropolis", 5)                     # [{id, title, text}, …]

Every term has a list of its passages with their impacts (postings.py). The score of a passage is the sum of its impacts.
For a small corpus, all lists of a query are summed. For a large corpus, the lists of rare words are summed first, and the
impacts of common words are looked up only for passages that can still be among the best k (the MaxScore rule). The result
is the same.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from .....agents.basics.hints import counted
from .....agents.basics.json_types import JsonObject
from ..retriever import Hit, Index, IntArray, Passage, RetrievalError, best_first, check_k, check_queries
from .index_files import (
    Draft,
    Fingerprint,
    PassageFile,
    PassageWriter,
    Strings,
    as_told_by,
    check_files,
    check_same,
    encode,
    new_index,
    read_array,
    read_manifest,
)
from .postings import LENGTHS, PROGRESS, TERMS, UNIT, Postings, PostingsBuilder, restored, save
from .terms import Analyzer


class Bm25Settings(TypedDict):
    """Settings of an index in its manifest."""

    k1: float
    b: float
    stem: str
    stop_words: bool


SMALL = 4096
"""Number of passages up to which it is fastest to sum all lists."""

LONG = 4096
"""Smallest length of a list that the search tries to skip."""

MOST_WORDS = 1000
"""Largest number of words of a query. A longer query is cut there."""

MOST_CHARACTERS = 20_000
"""Largest number of characters of a query. A longer query is cut there, before words are counted."""


class _List(NamedTuple):
    """Postings of one term of a query, with the largest impact."""

    bound: int
    passages: IntArray
    impacts: IntArray

    def times(self, weight: int) -> _List:
        """Return the list of a word that the query contains `weight` times."""
        return _List(self.bound * weight, self.passages, self.impacts * weight)


class Bm25Index(Index):
    """BM25 index, made with `build` or `open`."""

    def __init__(
        self,
        passages: Sequence[Passage],
        terms: Mapping[str, int],
        postings: Postings,
        analyze: Analyzer,
        fingerprint: str,
        path: Path | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.path = path
        self.analyze = analyze
        self._passages, self._terms, self._postings = passages, terms, postings
        self._seen: dict[str, _List] = {}
        self._scratch = threading.local()

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        path: str | Path | None = None,
        *,
        analyze: Analyzer | None = None,
        k1: float = 1.5,
        b: float = 0.75,
        overwrite: bool = False,
        resumable: bool = False,
    ) -> Bm25Index:
        """Index `passages`, in memory or as a directory at `path`.

        If `path` already has an index of the same passages and settings, it is opened. With `resumable`, the same call
        continues an interrupted build, if `passages` begin with the same passages. `k1` (usually 0.9-2) limits the effect of
        repeated words, and `b` (0-1) sets the effect of a passage's length.
        """
        analyze = analyze or Analyzer()
        settings = Bm25Settings(k1=k1, b=b, stem=analyze.stem, stop_words=analyze.stop_words)
        if path is None:
            return cls._build_in_memory(passages, analyze, settings)
        path = Path(path)
        if path.exists() and not overwrite:
            lines = (encode(raw, position)[1] for position, raw in enumerate(passages))
            check_same(path, Fingerprint("bm25", settings), lines)
            return cls.open(path)
        manifest: JsonObject = {"kind": "bm25", "settings": settings}
        with new_index(path, manifest, overwrite=overwrite, resumable=resumable) as draft:
            manifest["fingerprint"], manifest["passages"] = _write(passages, draft, analyze, settings)
        return cls.open(path, verify=False)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Bm25Index:
        """Open the index at `path`. `verify` reads every file once and compares checksums (about 1 GB/s)."""
        path = Path(path)
        manifest = read_manifest(path)
        with as_told_by(path):
            if manifest["kind"] != "bm25":
                raise RetrievalError(f"{path} is a {manifest['kind']} index; open it with `open_index`")
            check_files(path, manifest, contents=verify)
            settings = manifest["settings"]
            postings = Postings(
                starts=read_array(path / "starts", np.int64),
                passages=read_array(path / "postings", np.int32),
                impacts=read_array(path / "impacts", np.int32),
                peaks=read_array(path / "peaks", np.int32),
            )
            analyze = Analyzer(stem=settings["stem"], stop_words=settings["stop_words"])
            return cls(PassageFile(path), _TermFile(path), postings, analyze, manifest["fingerprint"], path)

    @classmethod
    def _build_in_memory(
        cls, passages: Iterable[Passage], analyze: Analyzer, settings: Bm25Settings
    ) -> Bm25Index:
        kept: list[Passage] = []
        builder, fingerprint = PostingsBuilder(), Fingerprint("bm25", settings)
        for position, raw in enumerate(passages):
            passage, line = encode(raw, position)
            fingerprint.add(line)
            kept.append(passage)
            builder.add(analyze(f"{passage['title']} {passage['text']}"))
        terms, postings = builder.finish(
            lambda name, dtype, shape: np.empty(shape, dtype), k1=settings["k1"], b=settings["b"]
        )
        return cls(
            kept, {term: number for number, term in enumerate(terms)}, postings, analyze, str(fingerprint)
        )

    def __call__(self, query: str, k: int) -> list[Passage]:
        check_k(k)
        return [self.passage(position) for position, _ in self._search(query, k)]

    def search_many(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return up to `k` hits for each query, best first."""
        check_k(k)
        check_queries(queries)
        return [
            [Hit(position, score / UNIT) for position, score in self._search(query, k)] for query in queries
        ]

    async def aretrieve_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Retrieve without blocking the event loop: a large index is searched in a thread."""
        if len(self) <= SMALL:  # the search is quicker than the start of a thread
            return self.retrieve_many(queries, k)
        return await super().aretrieve_many(queries, k)

    def __reduce__(self) -> tuple[object, ...]:
        if self.path is not None:
            return _open_unverified, (self.path.absolute(), self.fingerprint)
        return Bm25Index, (self._passages, self._terms, self._postings, self.analyze, self.fingerprint)

    def _search(self, query: str, k: int) -> list[tuple[int, int]]:
        """Return (position, score in UNITs) of the `k` best passages that share a word with the query."""
        lists = self._lists(query)
        if not lists:
            return []
        if len(self) <= SMALL:
            return self._sum(lists, k)
        return self._skip(sorted(lists, key=lambda item: (-item.bound, len(item.passages))), k)

    def _lists(self, query: str) -> list[_List]:
        lists = []
        for word, weight in Counter(self.analyze(query[:MOST_CHARACTERS])[:MOST_WORDS]).items():
            item = self._seen.get(word) or self._find(word)
            if item is not None:
                lists.append(item if weight == 1 else item.times(weight))
        return lists

    def _find(self, word: str) -> _List | None:
        """Return a word's postings. Those of a small corpus are cached, because a slice takes longer than the sum."""
        term = self._terms.get(word)
        if term is None:
            return None
        postings = self._postings
        start, end = postings.starts[term : term + 2].tolist()
        item = _List(int(postings.peaks[term]), postings.passages[start:end], postings.impacts[start:end])
        if len(self) <= SMALL:
            self._seen[word] = item
        return item

    def _sum(self, lists: list[_List], k: int) -> list[tuple[int, int]]:
        passages = np.concatenate([item.passages for item in lists])
        scores = np.bincount(passages, np.concatenate([item.impacts for item in lists]))
        places = scores.nonzero()[0]
        return best_first(scores[places], places, k)

    def _skip(self, lists: list[_List], k: int) -> list[tuple[int, int]]:
        """Sum the lists, beginning with the largest impacts, until no other passage can be among the best k.

        Then complete the scores of these passages with look-ups in the remaining lists.
        """
        rest = [0]  # rest[i]: the most that all lists from i on can add
        for item in reversed(lists):
            rest.insert(0, rest[0] + item.bound)
        scores = self._take_zeros()
        floor, met = 0, 0
        while (
            met < len(lists) and rest[met] >= floor
        ):  # a passage with an equal score may still come first by its position
            passages = lists[met].passages
            scores[passages] += lists[met].impacts
            met += 1
            if met < len(lists) and len(lists[met].passages) > LONG:
                floor = max(floor, _floor(scores, passages, lists[met:], k))
        touched = [item.passages for item in lists[:met]]
        places, totals = self._collect(scores, touched, max(floor - rest[met], 1))
        for place in range(met, len(lists)):
            totals = totals + _look_up(lists[place], places)
            able = totals + rest[place + 1] >= floor
            places, totals = places[able], totals[able]
        return best_first(totals, places, k)

    def _collect(self, scores: IntArray, touched: list[IntArray], least: int) -> tuple[IntArray, IntArray]:
        """Return the passages with scores of at least `least`, and these scores. `scores` is set to zero for reuse."""
        many = sum(map(len, touched)) > len(self) // 32
        if many:  # one pass over the corpus costs less than several over the lists
            places = (scores >= least).nonzero()[0]
            totals = scores[places]
            scores.fill(0)
        else:
            union = np.unique(np.concatenate(touched))
            places = union[scores[union] >= least]
            totals = scores[places]
            scores[union] = 0
        self._scratch.zeros = scores
        return places, totals

    def _take_zeros(self) -> npt.NDArray[np.int32]:
        """Return an array of zeros over the corpus: this thread's own, which `_collect` has reset, or else a new one."""
        zeros: npt.NDArray[np.int32] | None = self._scratch.__dict__.pop("zeros", None)
        return np.zeros(len(self), np.int32) if zeros is None else zeros


def _floor(scores: IntArray, passages: IntArray, remaining: list[_List], k: int) -> int:
    """Return a score that at least k passages reach: the k-th best full score among the best `passages` so far."""
    if len(passages) < k:
        return 0
    partial = scores[passages]
    if len(passages) > 4 * k:
        best = np.sort(np.argpartition(partial, -4 * k)[-4 * k :])
        partial, passages = partial[best], passages[best]
    for item in remaining:
        partial = partial + _look_up(item, passages)
    return int(np.partition(partial, len(partial) - k)[-k])


def _look_up(item: _List, passages: IntArray) -> IntArray:
    """Return the term's impact on each of `passages`; 0 for a passage without the term."""
    places = np.searchsorted(item.passages, passages)
    places[places == len(item.passages)] = 0
    impacts: IntArray = np.where(item.passages[places] == passages, item.impacts[places], 0)
    return impacts


class _TermFile(Mapping[str, int]):
    """Sorted terms of an index on disk, with a cache of the terms that were looked up."""

    def __init__(self, path: Path) -> None:
        self._terms = Strings(path / "terms", path / "terms.offsets")
        self._found: dict[str, int] = {}

    def get(self, term: str, default: object = None) -> Any:
        if term not in self._found:
            key = term.encode()
            place = bisect_left(self._terms, key)
            if place == len(self._terms) or self._terms[place] != key:
                return default
            self._found[term] = place
        return self._found[term]

    def __getitem__(self, term: str) -> int:
        number = self.get(term)
        if number is None:
            raise KeyError(term)
        return int(number)

    def __len__(self) -> int:
        return len(self._terms)

    def __iter__(self) -> Iterator[str]:
        return (term.decode() for term in self._terms)


def _write(
    passages: Iterable[Passage], draft: Draft, analyze: Analyzer, settings: Bm25Settings
) -> tuple[str, int]:
    """Write all files of an index. Return its fingerprint and its number of passages."""
    builder, fingerprint = PostingsBuilder(draft.directory), Fingerprint("bm25", settings)
    saved = restored(draft.directory, builder, settings)
    draft.worth_keeping = saved.passages > 0
    kept, position = PassageWriter(draft, saved.bytes), -1
    for position, raw in enumerate(passages):
        passage, line = encode(raw, position)
        fingerprint.add(line)
        if position < saved.passages:
            kept.skip(line)
            if position + 1 == saved.passages and str(fingerprint) != saved.fingerprint:
                raise _others(draft)
            continue
        kept.add(line)
        ended = builder.add(analyze(f"{passage['title']} {passage['text']}"))
        if ended and draft.resumable:
            saved = save(draft.directory, builder, saved, kept.sync(), position + 1, str(fingerprint))
            draft.worth_keeping = True
    if position + 1 < saved.passages:
        raise _others(draft)
    kept.close()
    if not builder.words:
        raise RetrievalError(
            f"{counted(position + 1, 'passage')} without a word that can be searched: the texts are empty, or have only "
            "signs and stop words; is this the right column? (--text COLUMN)"
        )
    terms, _ = builder.finish(draft.array, k1=settings["k1"], b=settings["b"])
    ends = [0]
    with draft.file("terms") as file:
        for term in terms:
            ends.append(ends[-1] + file.write(term.encode()))
    draft.save("terms.offsets", np.array(ends, np.int64))
    for part in (PROGRESS, TERMS, LENGTHS):
        (draft.directory / part).unlink(missing_ok=True)
    return str(fingerprint), position + 1


def _others(draft: Draft) -> RetrievalError:
    draft.worth_keeping = False
    return RetrievalError(
        f"{draft.directory} held part of an index of other passages: the corpus has changed since. It has been removed; "
        "run the same command again"
    )


def _open_unverified(path: Path, fingerprint: str) -> Bm25Index:
    """Open an index from a pickle. Only its fingerprint is checked, because the sender has verified the files."""
    index = Bm25Index.open(path, verify=False)
    if index.fingerprint != fingerprint:
        raise RetrievalError(f"{path} was replaced by another index since this retriever was pickled")
    return index
