"""Retrieval: an embedded BM25 index, an embedded dense index, and a pool of servers over HTTP.

All three are callables `(query, k) -> [{id, title, text}]` (the pool's is awaitable), answer batches with
`aretrieve_many(queries, k)`, aligned with the queries, and name what they search by `.fingerprint`. See base.py.
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
