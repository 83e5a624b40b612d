"""Inverted lists of a corpus, built with bounded memory: for each term a sorted list of (passage, impact).

Terms are collected in runs. A full run is sorted, counted and, for an index on disk, written to a file. At the end the runs
are merged; they are in the order of the corpus, so every list is sorted. An impact is the amount that a term adds to a
passage's BM25 score. It is computed at this time and stored as a fixed-point integer. Sums of integers do not depend on
their order, so scores and ties are exact, no matter which lists the search skips.

After each run file, `save` records the state of the build. A later build (`restored`) reads the same passages again, checks
that they are equal, and indexes the rest.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

UNIT = 1 << 16
"""Integer that stands for an impact of 1.0. Scores of a query of 1,000 words fit into 31 bits."""

RUN = 8_000_000
"""Number of words in a run. The sort takes about 40 bytes for each word."""

PROGRESS, TERMS, LENGTHS = "progress.json", "terms.part", "lengths.part"
"""Files of a build that is not finished."""

SortedRun = npt.NDArray[np.int32]  # rows: term, passage, count; sorted by term, then passage
Numbers = npt.NDArray[np.integer]
Weigh = Callable[[Numbers, Numbers, Numbers], npt.NDArray[np.float64]]
"""Function of (terms, passages, counts) that returns impacts."""
Allocate = Callable[[str, npt.DTypeLike, tuple[int, ...]], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Postings:
    """Postings of all terms. Those of term t are `passages[starts[t]:starts[t + 1]]`, ascending, and their impacts.

    `peaks[t]` is the term's largest impact.
    """

    starts: npt.NDArray[np.int64]
    passages: npt.NDArray[np.int32]
    impacts: npt.NDArray[np.int32]
    peaks: npt.NDArray[np.int32]


class PostingsBuilder:
    """Builder that collects the terms of passages and then inverts them."""

    def __init__(self, spill: Path | None = None, run: int = RUN) -> None:
        self._spill, self._run = spill, run
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__  # a new term gets the next number
        self._words = array("i")  # term numbers of the current run
        self._lengths = array("i")  # of all passages
        self._run_start = 0  # the first passage of the current run
        self._runs: list[SortedRun | Path] = []

    def add(self, terms: list[str]) -> bool:
        """Add the terms of the next passage. Tell whether a run ended with it."""
        self._words.extend(map(self._numbers.__getitem__, terms))
        self._lengths.append(len(terms))
        if len(self._words) < self._run:
            return False
        self._end_run()
        return True

    def since(self, terms: int, passages: int) -> tuple[list[str], array[int]]:
        """Return the terms and the lengths of passages after the first `terms` terms and `passages` passages."""
        return list(islice(self._numbers, terms, None)), self._lengths[passages:]

    def restore(self, terms: list[str], lengths: array[int], runs: list[Path]) -> None:
        """Restore the state after a run, from its terms, the lengths of its passages, and the run files."""
        self._numbers.update({term: number for number, term in enumerate(terms)})
        self._lengths, self._run_start, self._runs = lengths, len(lengths), [*runs]

    @property
    def words(self) -> int:
        """Number of different words so far."""
        return len(self._numbers)

    @property
    def runs(self) -> int:
        """Number of runs that have ended."""
        return len(self._runs)

    def finish(self, allocate: Allocate, *, k1: float, b: float) -> tuple[list[str], Postings]:
        """Return the sorted terms, and their postings in arrays from `allocate(name, dtype, shape)`."""
        self._end_run()
        terms = sorted(self._numbers)
        order = np.fromiter(map(self._numbers.__getitem__, terms), np.int64, len(terms))
        rank = np.empty(len(terms), np.int64)
        rank[order] = np.arange(len(terms))
        frequency = sum(
            (np.bincount(run[0], minlength=len(terms)) for run in self._load_runs()),
            np.zeros(len(terms), np.int64),
        )[order]
        postings = Postings(
            starts=allocate("starts", np.int64, (len(terms) + 1,)),
            passages=allocate("postings", np.int32, (int(frequency.sum()),)),
            impacts=allocate("impacts", np.int32, (int(frequency.sum()),)),
            peaks=allocate("peaks", np.int32, (len(terms),)),
        )
        postings.starts[0] = 0
        np.cumsum(frequency, out=postings.starts[1:])
        weigh = _bm25(frequency, np.frombuffer(self._lengths, np.int32), k1, b)
        self._deal(rank, weigh, postings)
        if len(terms):
            np.maximum.reduceat(postings.impacts, postings.starts[:-1], out=postings.peaks)
        return terms, postings

    def _end_run(self) -> None:
        """Sort and count the current run, store it, and start another."""
        lengths = np.array(self._lengths[self._run_start :], np.int32)
        passages = np.repeat(np.arange(self._run_start, len(self._lengths), dtype=np.int64), lengths)
        keys = np.frombuffer(self._words, np.int32).astype(np.int64) << 32 | passages
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.diff(first, append=len(keys))
        keys = keys[first]
        run = np.stack([keys >> 32, keys & 0xFFFFFFFF, counts]).astype(np.int32)
        self._words, self._run_start = array("i"), len(self._lengths)
        if self._spill is None:
            self._runs.append(run)
        else:
            file = run_file(self._spill, len(self._runs))
            # not np.save(path): a full disk must be an OSError with its errno
            with open(file, "wb") as handle:
                handle.write(run.data)
            self._runs.append(file)

    def _load_runs(self) -> Iterator[SortedRun]:
        for run in self._runs:
            yield np.fromfile(run, np.int32).reshape(3, -1) if isinstance(run, Path) else run

    def _deal(self, rank: npt.NDArray[np.int64], weigh: Weigh, postings: Postings) -> None:
        """Copy the postings of each run into place, for every term after those of earlier runs."""
        filled = np.array(postings.starts[:-1])
        for run in self._load_runs():
            terms, passages, counts = rank[run[0]], run[1], run[2]
            first = np.flatnonzero(np.diff(terms, prepend=-1))
            sizes = np.diff(first, append=len(terms))
            places = np.repeat(filled[terms[first]] - first, sizes) + np.arange(len(terms))
            postings.passages[places] = passages
            postings.impacts[places] = weigh(terms, passages, counts)
            filled[terms[first]] += sizes
        for run_file in self._runs:
            if isinstance(run_file, Path):
                run_file.unlink()


def run_file(folder: Path, number: int) -> Path:
    """Return the path of a run file."""
    return folder / f"run-{number}.npy"


def _bm25(frequency: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32], k1: float, b: float) -> Weigh:
    """Return the function of Lucene's BM25: idf * tf / (tf + k1 * (1 - b + b * length / mean length)), in 1 / UNIT."""
    idf = np.log1p((len(lengths) - frequency + 0.5) / (frequency + 0.5))
    saturation = k1 * (1 - b + b * lengths / max(float(lengths.mean()), 1e-9))

    def weigh(terms: Numbers, passages: Numbers, counts: Numbers) -> npt.NDArray[np.float64]:
        impact = idf[terms] * counts / (counts + saturation[passages])
        # a match always has a positive impact
        weight: npt.NDArray[np.float64] = np.maximum(np.rint(impact * UNIT), 1)
        return weight

    return weigh


@dataclass(frozen=True)
class SavedBuild:
    """State of a build at the end of a run."""

    settings: Mapping[str, object]
    fingerprint: str = ""
    """Fingerprint of the passages so far."""
    passages: int = 0
    bytes: int = 0
    """Size of these passages' lines."""
    runs: int = 0
    terms: int = 0
    term_bytes: int = 0


def save(
    folder: Path, builder: PostingsBuilder, before: SavedBuild, size: int, passages: int, fingerprint: str
) -> SavedBuild:
    """Append everything new since `before`, sync it to the disk, then record the new state."""
    terms, lengths = builder.since(before.terms, before.passages)
    words = "".join(f"{term}\n" for term in terms).encode()
    _append(folder / TERMS, before.term_bytes, words)
    _append(folder / LENGTHS, before.passages * lengths.itemsize, lengths.tobytes())
    _sync(run_file(folder, builder.runs - 1))
    saved = SavedBuild(
        before.settings, fingerprint, passages, size, builder.runs, before.terms + len(terms), before.term_bytes + len(words)
    )  # fmt: skip
    part = folder / f"{PROGRESS}.part"
    part.write_text(json.dumps(asdict(saved)))
    _sync(part)
    part.replace(folder / PROGRESS)
    return saved


def _append(file: Path, size: int, more: bytes) -> None:
    """Write after the first `size` bytes. The rest, which an interrupted save has left, is replaced."""
    with open(file, "r+b" if size else "wb") as handle:
        handle.truncate(size)
        handle.seek(size)
        handle.write(more)
    _sync(file)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restored(folder: Path, builder: PostingsBuilder, settings: Mapping[str, object]) -> SavedBuild:
    """Load the state of an interrupted build into the builder, and return it. Without one of these settings, return a new one."""
    fresh = SavedBuild(settings)
    try:
        saved = SavedBuild(**json.loads((folder / PROGRESS).read_text()))
        runs = [run_file(folder, number) for number in range(saved.runs)]
        words = (folder / TERMS).read_bytes()[: saved.term_bytes].decode().split("\n")[:-1]
        lengths = array("i")
        lengths.frombytes((folder / LENGTHS).read_bytes()[: saved.passages * lengths.itemsize])
        whole = (folder / "passages.jsonl").stat().st_size >= saved.bytes and all(
            run.is_file() for run in runs
        )
        whole = whole and (len(words), len(lengths)) == (saved.terms, saved.passages)
    except (OSError, ValueError, TypeError):
        whole = False
    if whole and saved.settings == settings:
        builder.restore(words, lengths, runs)
        return saved
    for file in folder.iterdir():
        file.unlink()
    return fresh
