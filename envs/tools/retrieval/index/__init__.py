"""Indexes of a corpus: read the corpus, build an index on disk, and search it (BM25, dense)."""
