"""Dense index in memory or mapped from disk, with exact search over unit vectors.

    index = DenseIndex.build(passages, SentenceEncoder("models/all-MiniLM-L6-v2"), "wiki.dense")
    index = DenseIndex.open("wiki.dense")

faiss searches if it is installed, otherwise numpy, both over the same mapped file. The two sum in different orders. So each
proposes candidates only, whose scores are then computed again in one fixed way. Results are identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .....agents.basics.json_types import JsonObject
from ..retriever import (
    Hit,
    Index,
    IntArray,
    Passage,
    RetrievalError,
    batches,
    best_first,
    check_k,
    check_queries,
)
from .embedders import Embedder, Vectors, embedder_from
from .index_files import (
    Fingerprint,
    PassageFile,
    PassageWriter,
    as_told_by,
    check_files,
    check_same,
    encode,
    new_index,
    read_array,
    read_manifest,
)

UNIT = 1 << 20  # scores are compared in steps of a millionth, so that rounding does not change their order
SLACK = 1e-5  # largest difference between a proposed and a final score
SPARE = 16  # candidates beyond k
BLOCK = 1 << 14  # passages in one step of numpy's search


class DenseIndex(Index):
    """Dense index, made with `build` or `open`."""

    def __init__(
        self,
        passages: Sequence[Passage],
        vectors: Vectors,
        embedder: Embedder,
        fingerprint: str,
        path: Path | None = None,
        *,
        engine: str = "auto",
    ) -> None:
        self.fingerprint, self.path, self.embedder = fingerprint, path, embedder
        self.engine = _choose(engine)
        self._passages, self._vectors = passages, vectors

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        embedder: Embedder,
        path: str | Path | None = None,
        *,
        batch: int = 256,
        engine: str = "auto",
        overwrite: bool = False,
    ) -> DenseIndex:
        """Embed and index `passages`, in memory or as a directory at `path`."""
        settings = _settings(embedder)
        fingerprint = Fingerprint("dense", {"embedder": embedder.fingerprint})
        numbered = (encode(raw, position) for position, raw in enumerate(passages))
        if path is None:
            kept, rows = [], [np.zeros((0, embedder.dimensions), np.float32)]
            for some in batches(numbered, batch):
                kept += [passage for passage, _ in some]
                rows.append(_embed(embedder, some, fingerprint))
            return cls(kept, np.concatenate(rows), embedder, str(fingerprint), engine=engine)
        path = Path(path)
        if path.exists() and not overwrite:
            check_same(path, fingerprint, (line for _, line in numbered))
            return cls.open(path, embedder, engine=engine)
        manifest: JsonObject = {"kind": "dense", "settings": settings, "embedder": embedder.fingerprint}
        with new_index(path, manifest, overwrite=overwrite) as draft:
            writer, count = PassageWriter(draft), 0
            with draft.file("vectors") as file:
                for some in batches(numbered, batch):
                    for _, line in some:
                        writer.add(line)
                    file.write(_embed(embedder, some, fingerprint).data)
                    count += len(some)
            writer.close()
            manifest.update(fingerprint=str(fingerprint), passages=count, dimensions=embedder.dimensions)
        return cls.open(path, embedder, verify=False, engine=engine)

    @classmethod
    def open(
        cls, path: str | Path, embedder: Embedder | None = None, *, verify: bool = True, engine: str = "auto"
    ) -> DenseIndex:
        """Open the index at `path`. The embedder must be the one of the build; by default it is made from its settings."""
        path = Path(path)
        manifest = read_manifest(path)
        with as_told_by(path):
            if manifest["kind"] != "dense":
                raise RetrievalError(f"{path} is a {manifest['kind']} index; open it with `open_index`")
            check_files(path, manifest, contents=verify)
            embedder = embedder or embedder_from(manifest["settings"])
            if embedder.fingerprint != manifest["embedder"]:
                raise RetrievalError(
                    f"{path} was built with the embedder {manifest['embedder']}, not with "
                    f"{embedder.fingerprint}: queries and passages would not be comparable"
                )
            vectors = read_array(path / "vectors", np.float32).reshape(-1, manifest["dimensions"])
            passages = PassageFile(path)
            if len(vectors) != len(passages):
                raise ValueError(f"{len(vectors)} vectors of {len(passages)} passages")
            return cls(passages, vectors, embedder, manifest["fingerprint"], path, engine=engine)

    def search_many(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return up to `k` hits for each query, best first."""
        check_k(k)
        check_queries(queries)
        answers: list[list[Hit]] = [[] for _ in queries]
        asked = [place for place, query in enumerate(queries) if query.strip()]
        if not asked or not len(self):
            return answers
        vectors = self.embedder.embed([queries[place] for place in asked])
        count = min(k + SPARE, len(self))
        scores, positions = (_faiss if self.engine == "faiss" else _numpy)(self._vectors, vectors, count)
        for row, place in enumerate(asked):
            answers[place] = self._settle(vectors[row], scores[row], positions[row], k)
        return answers

    def _settle(self, query: Vectors, proposed: Vectors, positions: IntArray, k: int) -> list[Hit]:
        """Return the k best of the proposed passages, by their final scores.

        All passages are scored if one that was not proposed may be as good.
        """
        if len(positions) > k and len(positions) < len(self) and proposed[-1] >= proposed[k - 1] - 2 * SLACK:
            positions = np.flatnonzero(self._vectors @ query >= proposed[k - 1] - 2 * SLACK)
        exact = (self._vectors[positions].astype(np.float64) * query).sum(axis=1)
        best = best_first(np.rint(exact * UNIT).astype(np.int64), positions, k)
        return [Hit(position, score / UNIT) for position, score in best]

    def __reduce__(self) -> tuple[object, ...]:
        if self.path is not None:
            return _open_unverified, (self.path.absolute(), self.embedder, self.engine)
        return DenseIndex, (self._passages, self._vectors, self.embedder, self.fingerprint)


def _settings(embedder: Embedder) -> dict[str, object]:
    """Return the settings that make the embedder again, or only the fingerprint of one that must be passed to `open`."""
    describe = getattr(embedder, "settings", None)
    return dict(describe()) if describe is not None else {"embedder": embedder.fingerprint}


def _embed(embedder: Embedder, some: list[tuple[Passage, bytes]], fingerprint: Fingerprint) -> Vectors:
    for _, line in some:
        fingerprint.add(line)
    vectors = embedder.embed([f"{passage['title']} {passage['text']}".strip() for passage, _ in some])
    if vectors.shape != (len(some), embedder.dimensions) or not np.isfinite(vectors).all():
        raise RetrievalError(
            f"the embedder {embedder.fingerprint} gave an array of shape {vectors.shape}, or with "
            f"values that are not finite, for {len(some)} texts of {embedder.dimensions} dimensions"
        )
    return np.ascontiguousarray(vectors, np.float32)


def _choose(engine: str) -> str:
    if engine not in {"auto", "faiss", "numpy"}:
        raise ValueError(f"engine must be 'auto', 'faiss' or 'numpy', got {engine!r}")
    if engine == "numpy":
        return engine
    try:
        import faiss  # noqa: F401
    except ImportError as error:
        if engine == "auto":
            return "numpy"
        raise ModuleNotFoundError("engine='faiss' needs the extra: pip install 'unitymas[dense]'") from error
    return "faiss"


def _faiss(vectors: Vectors, queries: Vectors, count: int) -> tuple[Vectors, IntArray]:
    import faiss

    scores, positions = faiss.knn(queries, vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, positions


def _numpy(vectors: Vectors, queries: Vectors, count: int) -> tuple[Vectors, IntArray]:
    """Return the `count` best inner products of every query, best first. Passages are searched in blocks."""
    scores = np.empty((len(queries), 0), np.float32)
    positions = np.empty((len(queries), 0), np.int64)
    for start in range(0, len(vectors), BLOCK):
        block = queries @ vectors[start : start + BLOCK].T
        best = np.argpartition(block, -min(count, block.shape[1]), axis=1)[:, -count:]
        scores = np.concatenate([scores, np.take_along_axis(block, best, 1)], axis=1)
        positions = np.concatenate([positions, best + start], axis=1)
        order = np.argsort(-scores, axis=1)[:, :count]
        scores, positions = np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)
    return scores, positions


def _open_unverified(path: Path, embedder: Embedder, engine: str) -> DenseIndex:
    return DenseIndex.open(path, embedder, verify=False, engine=engine)
