"""The tools environments come with, made for a data set."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..tasks import DataSet
from .base import Result, Tool

SEARCH = {
    "description": "Search the passages; gives those that fit the query best.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "k": {"type": "integer"}},
        "required": ["query", "k"],
        "additionalProperties": False,
    },
}


def retrieve(data: DataSet) -> Tool:
    """BM25 over the data set's passages, in memory; built once a process and corpus."""
    return Tool(_index(_Corpus(data)), name="retrieve", blocking=False, about=SEARCH)


class _Corpus:
    """A data set, compared by fingerprint."""

    def __init__(self, data: DataSet) -> None:
        self.data = data

    def __hash__(self) -> int:
        return hash(self.data.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Corpus) and other.data.fingerprint == self.data.fingerprint


@lru_cache(maxsize=8)
def _index(corpus: _Corpus) -> Any:
    from .retrieval import Bm25Index

    data = corpus.data
    if not data.passages:
        raise ValueError(
            f"data set {data.name!r} ({data.split}) brings no passages to search; "
            "pass tools={'retrieve': your_retriever} to make, a callable (query, k) -> [{id, title, text}]"
        )
    return Bm25Index.build(data.passages)  # type: ignore[arg-type]  # rows are checked by the index


def verify(data: DataSet) -> Tool:
    """Run a program on the task's tests in a sandbox: the visible results are public, the hidden private."""
    return Tool(_verify, name="verify", task=True)


def _verify(program: str, fn_name: str | None, task: Any, tests: Any = None) -> Result:
    """With `tests` (a tester's own) those are the public ones, and the task's solution is tried on them too."""
    from .code import verify_code

    public = list(task.view["visible_tests"] if tests is None else tests)
    hidden = list(task.reference["hidden_tests"])
    report = verify_code(program, public + hidden, fn_name=fn_name)
    shown, kept = report.cases[: len(public)], report.cases[len(public) :]
    passed = sum(case.verdict == "accepted" for case in kept)
    failure = next((case for case in shown if case.verdict != "accepted"), None)
    private = {
        "passed": passed,
        "total": len(kept),
        "pass_rate": passed / len(kept) if kept else 0.0,
        "by": report.sandbox,
    }
    if tests and task.reference.get("solution"):
        private["golden"] = verify_code(task.reference["solution"], public, fn_name=fn_name).pass_rate
    return Result(
        {
            "passed": sum(case.verdict == "accepted" for case in shown),
            "total": len(public),
            "verdicts": [str(case.verdict) for case in shown],
            "first_failure": "" if failure is None else failure.explain(),
        },
        private,
    )
