"""Indexes: reading a corpus, building an index of it on disk, and searching it (BM25, dense)."""
