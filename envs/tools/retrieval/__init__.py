"""Retrieval."""
from .base import Passage as Passage
from .bm25 import Bm25Index as Bm25Index
from .text import Analyzer as Analyzer
