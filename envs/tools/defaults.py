"""Default tools of environments, made for a data set: `retrieve` and `verify`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypedDict

from ...agents.basics.frozen import thaw
from ..core.tasks import DataSet, Task
from .tool import Result, Tool

if TYPE_CHECKING:
    from .retrieval import Bm25Index

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
    """Return a tool that searches the data set's passages with BM25. A process builds the index of a corpus once."""
    return Tool(_index(_Corpus(data)), name="retrieve", blocking=False, about=SEARCH)


class _Corpus:
    """Data set as a key of the cache, compared by fingerprint."""

    def __init__(self, data: DataSet) -> None:
        self.data = data

    def __hash__(self) -> int:
        return hash(self.data.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Corpus) and other.data.fingerprint == self.data.fingerprint


@lru_cache(maxsize=8)
def _index(corpus: _Corpus) -> Bm25Index:
    from .retrieval import Bm25Index

    data = corpus.data
    if not data.passages:
        raise ValueError(
            f"data set {data.name!r} ({data.split}) brings no passages to search; "
            "pass tools={'retrieve': your_retriever} to make, a callable (query, k) -> [{id, title, text}]"
        )
    return Bm25Index.build(data.passages)  # type: ignore[arg-type]  # rows are checked by the index


class _Counts(TypedDict):
    passed: int
    total: int
    verdicts: list[str]


class Checked(_Counts, total=False):
    """Results of a program on the visible tests, which roles may see."""

    first_failure: str


def verify(data: DataSet) -> Tool:
    """Return a tool that runs a program on the task's tests in the sandbox. Results of the hidden tests are private."""
    return Tool(_verify, name="verify", task=True)


def _verify(program: str, fn_name: str | None, task: Task, tests: object = None) -> Result:
    """Run a program on the tests of a task.

    The public result is that of the visible tests, or of `tests`, which a tester wrote. The private result is that of the
    task's hidden tests alone: tests of a role never affect it. A tester's test that is malformed, or that the task's own
    solution fails, lowers the tester's golden rate and changes nothing else.
    """
    from .code.cases import named_function, written_tests
    from .code.verify import verify_code

    judging = thaw(task.reference["hidden_tests"])
    hidden = verify_code(program, judging, fn_name=fn_name)
    private: dict[str, object] = {
        "passed": hidden.passed,
        "total": hidden.total,
        "pass_rate": hidden.pass_rate,
        "by": hidden.sandbox,
    }
    public = thaw(task.view["visible_tests"])
    if tests is not None:
        fn_name = fn_name or named_function(judging)
        tests = tests if isinstance(tests, list | tuple) else []
        public = written_tests(tests, fn_name)
        if task.reference.get("solution"):
            golden = verify_code(task.reference["solution"], public, fn_name=fn_name)
            private["golden"] = golden.passed / len(tests) if tests else 0.0
    shown = verify_code(program, public, fn_name=fn_name)
    failure = next((case for case in shown.cases if case.verdict != "accepted"), None)
    checked: Checked = {
        "passed": shown.passed,
        "total": shown.total,
        "verdicts": [str(verdict) for verdict in shown.verdicts],
        "first_failure": "" if failure is None else failure.explain(),
    }
    return Result(checked, private)
