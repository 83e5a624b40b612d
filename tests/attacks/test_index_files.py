"""An index that was damaged, or whose manifest was written by somebody else: refused by name, or it answers as before.

pytest tests/attacks/test_index_files.py --fuzz 100000
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from unitymas.envs.tools.retrieval.index.bm25 import Bm25Index
from unitymas.envs.tools.retrieval.index.build import open_index
from unitymas.envs.tools.retrieval.index.dense import DenseIndex
from unitymas.envs.tools.retrieval.index.embedders import HashEmbedder
from unitymas.envs.tools.retrieval.index.index_files import _checksum
from unitymas.envs.tools.retrieval.retriever import Passage, RetrievalError

PASSAGES: list[Passage] = [
    {"id": str(i), "title": f"T{i}", "text": f"word{i % 7} river lake {i} {'x' * (i % 5)}"} for i in range(40)
]
QUERIES = ["river lake 3", "word2 x", "nothing", "T7 word0"]
VALUES: list[Any] = [None, -1, 0, 1.5, 8, 10**30, True, "x", "../../etc/passwd", [], {}, {"a": 1}]


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("indexes")
    Bm25Index.build(PASSAGES, folder / "bm25")
    DenseIndex.build(PASSAGES, HashEmbedder(16), folder / "dense")
    return [folder / "bm25", folder / "dense"]


def answers(path: Path) -> list[list[str]]:
    return [[hit["id"] for hit in row] for row in open_index(path).retrieve_many(QUERIES, 5)]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flipped bits, cuts, growth, lost blocks, a half that was never written."""
    at, changed = rng.randrange(len(data) + 1), bytearray(data)
    if at < len(data):
        changed[at] ^= 1 << rng.randrange(8)
    half = len(data) // 2
    return rng.choice((
        bytes(changed), bytes(changed), data[:at], data + rng.randbytes(3),
        data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :], data[:half] + bytes(len(data) - half),
    ))  # fmt: skip


def rewritten(manifest: Any, rng: random.Random) -> Any:
    """One value of a manifest exchanged, or gone."""
    at = manifest
    while True:
        key = rng.choice(list(at))
        if isinstance(at[key], dict) and at[key] and rng.random() < 0.7:
            at = at[key]
        elif rng.random() < 0.2:
            del at[key]
            return manifest
        else:
            at[key] = rng.choice(VALUES)
            return manifest


def test_damage_is_refused_by_name(indexes: list[Path], tmp_path: Path, fuzz: int) -> None:
    rng, refused = random.Random(16), 0
    truth = {path: answers(path) for path in indexes}
    for _ in range(fuzz):
        source = rng.choice(indexes)
        copy = Path(shutil.copytree(source, tmp_path / "copy"))
        victim = rng.choice(sorted(copy.iterdir()))
        victim.write_bytes(damaged(victim.read_bytes(), rng))
        try:
            assert answers(copy) == truth[source]
        except RetrievalError as error:
            assert victim.name in str(error)
            refused += 1
        shutil.rmtree(copy)
    assert refused > fuzz / 2


def test_a_manifest_of_somebody_elses_is_refused_by_name(
    indexes: list[Path], tmp_path: Path, fuzz: int
) -> None:
    """Signed again, so that only what it says can be wrong."""
    rng, refused = random.Random(17), 0
    for _ in range(fuzz):
        source = rng.choice(indexes)
        copy = Path(shutil.copytree(source, tmp_path / "copy"))
        manifest = json.loads((source / "manifest.json").read_text())
        del manifest["checksum"]
        manifest = rewritten(manifest, rng)
        (copy / "manifest.json").write_text(json.dumps({**manifest, "checksum": _checksum(manifest)}))
        try:
            answers(copy)
        except RetrievalError as error:
            assert str(copy) in str(error)
            refused += 1
        shutil.rmtree(copy)
    assert refused > fuzz / 2
