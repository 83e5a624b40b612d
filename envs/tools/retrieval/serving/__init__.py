"""Retrieval over HTTP: the server of an index, and the pool of clients that ask several servers."""
