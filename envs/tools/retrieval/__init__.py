"""Retrieval: an embedded BM25 index, an embedded dense index, and a pool of servers over HTTP.

All three are functions of `(query, k)` that return `[{id, title, text}]`; the pool's is async. `aretrieve_many(queries, k)`
answers a batch, with one result for each query in order. `.fingerprint` identifies the corpus and the index
(`retriever.py`).
"""

from .index.bm25 import Bm25Index
from .index.build import index_corpus, index_main, open_index
from .index.corpus import CorpusError, read_corpus
from .index.dense import DenseIndex
from .index.embedders import Embedder, HashEmbedder, SentenceEncoder
from .index.terms import Analyzer
from .retriever import Hit, Index, IndexFormatError, Passage, RetrievalError
from .serving.memo import AnswerCache
from .serving.pool import RetrieverPool, RetrieverUnavailable
from .serving.server import make_app, serve, serve_main

__all__ = [
    "Analyzer",
    "AnswerCache",
    "Bm25Index",
    "CorpusError",
    "DenseIndex",
    "Embedder",
    "HashEmbedder",
    "Hit",
    "Index",
    "IndexFormatError",
    "Passage",
    "RetrievalError",
    "RetrieverPool",
    "RetrieverUnavailable",
    "SentenceEncoder",
    "index_corpus",
    "index_main",
    "make_app",
    "open_index",
    "read_corpus",
    "serve",
    "serve_main",
]
