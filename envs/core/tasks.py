"""Tasks and data sets. The gold answers of a task are kept apart.

A row is a plain dict of one of the schemas (QA, code, math) or of the user's own. The fields named as reference (gold
answers, hidden tests) are removed when a `Task` is made. So a workflow's `run` cannot read them: it gets `task.view`
only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...agents.basics.frozen import FrozenDict, View, freeze


@dataclass(frozen=True, slots=True)
class Schema:
    """Fields of a kind of task: the required ones, and those that a role may never see."""

    name: str
    required: tuple[str, ...]
    reference: tuple[str, ...]


QA = Schema("qa", ("id", "question", "answers"), ("answers", "supporting", "hops"))
CODE = Schema(
    "code", ("id", "problem", "visible_tests", "hidden_tests"), ("hidden_tests", "solution", "steps")
)
MATH = Schema("math", ("id", "problem", "answer"), ("answer", "solution", "steps"))
SCHEMAS = {schema.name: schema for schema in (QA, CODE, MATH)}


class TaskError(ValueError):
    """Raised when a task does not fit its schema."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its id, the fields that roles may see, and the reference."""

    id: str
    view: View
    reference: FrozenDict

    @classmethod
    def of(cls, row: Mapping[str, object], schema: Schema) -> Task:
        """Split a row into view and reference. The error for a missing field names the field and the task."""
        missing = [name for name in schema.required if row.get(name) is None]
        if missing:
            raise TaskError(
                f"task {row.get('id', '?')!r} lacks {', '.join(missing)}; "
                f"a {schema.name} task needs {', '.join(schema.required)}"
            )
        reference = {k: v for k, v in row.items() if k in schema.reference}
        view = {k: freeze(v) for k, v in row.items() if k not in schema.reference}
        return cls(str(row["id"]), View(view), freeze(reference))

    @property
    def row(self) -> dict[str, object]:
        """Return the task as one plain dict, reference included."""
        return {**self.view, **self.reference}


@dataclass(frozen=True, slots=True)
class DataSet:
    """Rows with a name, a split and a fingerprint. `passages` is the corpus that belongs to them."""

    name: str
    split: str
    rows: Sequence[Mapping[str, object]]
    fingerprint: str
    passages: Sequence[Mapping[str, object]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rows)


def fingerprint(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the first 16 hex digits of a SHA-256 over the rows as canonical JSON. The order of rows counts."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
        )
        digest.update(b"\n")
    return digest.hexdigest()[:16]
