"""All that an episode of an environment needs, in one picklable place.

An `Arena` is a workflow with its tasks, tools, reward rules and budget. The AEC face, `rollout` and the
trainer's collector all start their episodes here, so there is one way an episode begins.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..agents.roles import Role
from ..hints import counted
from .execution import Budget, Execution
from .ledger import Rule, Scorer, as_rule, check_names
from .tasks import DataSet, Task
from .tools.base import Toolbox
from .trace import Trace
from .workflow import Workflow, unknown


class UnknownTask(KeyError):
    """A task id that the data set does not hold."""

    def __str__(self) -> str:
        return str(self.args[0])


class Arena:
    """A workflow with its tasks, tools, rules and budget."""

    def __init__(
        self,
        workflow: Workflow,
        data: DataSet,
        *,
        env_id: str = "custom-v0",
        tools: Mapping[str, Any] | None = None,
        rules: Iterable[Any] = (),
        budget: Budget | None = None,
        config: Mapping[str, Any] | None = None,
        expert: Any = None,
        headline: str = "score",
    ) -> None:
        self.workflow = workflow.seal()
        self.env_id, self.data, self.budget = env_id, data, budget or Budget()
        self.config = dict(config or {})
        self.expert, self.headline = expert, headline
        self.roles: dict[str, Role] = workflow.agents()
        self.toolbox = Toolbox(tools or {})
        self.toolbox.check(workflow.tools, type(workflow).__name__)
        self.rules: list[Rule] = []
        for rule in rules:
            self.add_rule(rule)
        self._index: dict[str, int] = {}
        for i, row in enumerate(data.rows):
            if str(row.get("id")) in self._index:
                raise ValueError(f"data set {data.name!r}: two tasks have the id {row['id']!r}")
            self._index[str(row.get("id"))] = i
        if not self._index:
            raise ValueError(f"data set {data.name!r} ({data.split}) is empty; an environment needs a task")
        self._tasks: dict[str, Task] = {}
        self.code_hash = code_hash(type(workflow), *(type(r) for r in self.rules))

    def add_rule(self, rule: Any) -> None:
        """Attach a reward rule; the same name twice is an error."""
        rules = [*self.rules, as_rule(rule)]
        check_names(rules)
        self.rules = rules

    @property
    def task_ids(self) -> Sequence[str]:
        """The ids of all tasks, in order."""
        return list(self._index)

    def task(self, id: str) -> Task:
        """A task by id, checked against the schema; an unknown id is answered with the nearest."""
        found = self._tasks.get(id)
        if found is None:
            if id not in self._index:
                where = f"{self.data.name!r} ({self.data.split}, {counted(len(self._index), 'task')})"
                raise UnknownTask(f"{where}: {unknown('task', id, self._index)}")
            found = self._tasks[id] = Task.of(self.data.rows[self._index[id]], self.workflow.schema)
        return found

    def start(self, task: Task, seed: int) -> Execution:
        """Begin an episode."""
        return Execution(self.workflow, task, seed, budget=self.budget, roles=self.roles)

    def scorer(self, task: Task) -> Scorer:
        """The ledger keeper of one episode."""
        return Scorer(self.rules, task)

    def label(self, trace: Trace, sample: int = 0) -> Trace:
        """Write the provenance onto a trace."""
        trace.env_id, trace.config, trace.code_hash, trace.sample = (
            self.env_id,
            self.config,
            self.code_hash,
            sample,
        )
        trace.data = {
            "name": self.data.name, "split": self.data.split, "fingerprint": self.data.fingerprint,
        }  # fmt: skip
        return trace

    def rescore(self, trace: Trace) -> Trace:
        """Apply the rules to a finished trace afresh; nothing is generated."""
        trace.credits, trace.metrics = [], {}
        self.scorer(self.task(trace.task_id)).advance(trace)
        return trace

    def __deepcopy__(self, memo: Any) -> Arena:
        return self  # shared: nothing in it belongs to one episode


@lru_cache(maxsize=256)
def _source(module: str) -> bytes:
    try:
        return inspect.getsource(sys.modules[module]).encode()
    except (OSError, TypeError, KeyError):  # defined at a prompt
        return module.encode()


def code_hash(*kinds: type) -> str:
    """A hash of the source of the modules that define these classes: what an episode is made by."""
    digest = hashlib.sha256()
    for module in dict.fromkeys(kind.__module__ for kind in kinds):
        digest.update(_source(module))
    return digest.hexdigest()[:16]
