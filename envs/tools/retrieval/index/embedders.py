"""Embedders, which turn texts into vectors for a dense index.

An embedder is any object with `dimensions`, `fingerprint` and `embed(texts)`, which returns float32 [len(texts),
dimensions] with rows of length one. `HashEmbedder` is quick and needs no model: it hashes words and letter trigrams, and so
finds common words and variants of spelling, but not meaning. `SentenceEncoder` is a transformer in a local folder (such as
all-MiniLM-L6-v2) with mean pooling. It needs the extra `dense`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from .....agents.basics.json_types import JsonView
from ..retriever import RetrievalError
from .terms import Analyzer

Vectors = npt.NDArray[np.float32]


class Embedder(Protocol):
    """Interface of an embedder."""

    @property
    def dimensions(self) -> int:
        """Length of a vector."""

    @property
    def fingerprint(self) -> str:
        """Name of the embedder, with all settings that change its vectors."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a vector for each text."""


class HashEmbedder:
    """Embedder that hashes each word and letter trigram to a signed coordinate. It is the same on every machine."""

    def __init__(self, dimensions: int = 1024) -> None:
        if dimensions < 1:
            raise ValueError(f"dimensions must be positive, got {dimensions}")
        self.dimensions = dimensions
        self.fingerprint = f"hash-{dimensions}"
        self._analyze = Analyzer()

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a vector for each text."""
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for row, text in enumerate(texts):
            for feature, weight in self._features(text).items():
                code = crc32(feature.encode())
                vectors[row, (code >> 1) % self.dimensions] += weight if code & 1 else -weight
        return _unit_rows(vectors)

    def settings(self) -> dict[str, object]:
        """Return the settings that make the embedder again."""
        return {"embedder": "hash", "dimensions": self.dimensions}

    def _features(self, text: str) -> dict[str, float]:
        features: dict[str, float] = {}
        for word, count in Counter(self._analyze(text)).items():
            weight = 1 + math.log(count)
            features[word] = features.get(word, 0.0) + weight
            padded = f"<{word}>"
            for start in range(len(padded) - 2):
                trigram = "#" + padded[start : start + 3]
                features[trigram] = features.get(trigram, 0.0) + weight / len(word)
        return features


class SentenceEncoder:
    """Embedder with a sentence transformer from a local folder, and mean pooling over the tokens."""

    def __init__(
        self, path: str | Path, *, device: str = "cpu", max_tokens: int = 256, batch: int = 64
    ) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise RetrievalError(
                f"{self.path} holds no sentence encoder: it has no config.json. Give the folder of a "
                "Hugging Face model, such as a copy of sentence-transformers/all-MiniLM-L6-v2."
            )
        self.device, self.max_tokens, self.batch = device, max_tokens, batch
        self.fingerprint = f"encoder-{_digest(self.path)}-{max_tokens}"
        self._loaded: tuple[Any, Any] | None = None

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        return int(self._load()[1].config.hidden_size)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a vector for each text."""
        import torch

        tokenizer, model = self._load()
        rows: list[Vectors] = []
        with torch.inference_mode():
            for start in range(0, len(texts), self.batch):
                inputs = tokenizer(
                    list(texts[start : start + self.batch]),
                    padding=True,
                    truncation=True,
                    max_length=self.max_tokens,
                    return_tensors="pt",
                ).to(self.device)
                states = model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1)
                rows.append(((states * mask).sum(1) / mask.sum(1)).float().cpu().numpy())
        return _unit_rows(np.concatenate(rows)) if rows else np.zeros((0, self.dimensions), np.float32)

    def settings(self) -> dict[str, object]:
        """Return the settings that make the embedder again."""
        return {"embedder": "encoder", "path": str(self.path.absolute()), "max_tokens": self.max_tokens}

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            try:
                from transformers import AutoModel, AutoTokenizer
            except ImportError as error:
                raise ModuleNotFoundError(
                    "a sentence encoder needs the extra: pip install 'unitymas[dense]'"
                ) from error
            tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
            model = AutoModel.from_pretrained(self.path, local_files_only=True).to(self.device).eval()
            self._loaded = tokenizer, model
        return self._loaded

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_loaded": None}  # the weights stay on disk


def embedder_from(settings: JsonView) -> Embedder:
    """Make the embedder of an index from the settings in its manifest."""
    if settings["embedder"] == "hash":
        return HashEmbedder(settings["dimensions"])
    if settings["embedder"] == "encoder":
        return SentenceEncoder(settings["path"], max_tokens=settings["max_tokens"])
    raise RetrievalError(
        f"the index was built with an embedder of your own ({settings['embedder']!r}): "
        "open it with DenseIndex.open(path, embedder)"
    )


def _unit_rows(vectors: npt.NDArray[np.floating]) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def _digest(folder: Path) -> str:
    """Return a hash of a model's configuration, tokenizer and weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        if file.suffix in {".json", ".safetensors", ".bin", ".txt"}:
            digest.update(file.name.encode())
            with open(file, "rb") as handle:
                while block := handle.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()[:16]
