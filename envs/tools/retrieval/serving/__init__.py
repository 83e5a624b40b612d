"""Retrieval over HTTP: the server of an index, and a client of several servers."""
