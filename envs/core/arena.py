"""Arenas: all that an episode of an environment needs, in one picklable place.

An `Arena` is a workflow with its tasks, tools, reward rules and budget. The AEC face, `rollout` and the
trainer's collector all start their episodes here, so there is one way in which an episode begins.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import io
import itertools
import sys
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

from ...agents.basics.hints import counted
from ...agents.roles import Role
from ...agents.team import Expert
from ..tools.toolbox import Toolbox
from .execution import Budget, Execution
from .ledger import Rule, Scorer, as_rule, check_names
from .prompts import choose
from .tasks import DataSet, Task, TaskError
from .trace import Trace
from .workflow import Workflow, unknown


class UnknownTask(KeyError):
    """Raised for a task id that the data set does not hold."""

    def __str__(self) -> str:
        return str(self.args[0])


class Arena:
    """Workflow with its tasks, tools, rules and budget."""

    def __init__(
        self,
        workflow: Workflow,
        data: DataSet,
        *,
        env_id: str = "custom-v0",
        tools: Mapping[str, object] | None = None,
        rules: Iterable[object] = (),
        budget: Budget | None = None,
        config: Mapping[str, object] | None = None,
        expert: Expert | None = None,
        headline: str = "score",
        score: str = "",
        prompts_said: bool = False,
    ) -> None:
        if workflow.prompts is not None and workflow.prompt_set is None:
            workflow.prompt_set = choose(workflow)
        self.workflow = workflow.seal()
        self.env_id, self.data, self.budget = env_id, data, budget or Budget()
        self.config = {**(config or {}), **_provenance(workflow)}
        # the user has chosen the prompt set, so the team does not choose one
        self.prompts_said = prompts_said
        self.expert, self.headline = expert, headline
        self.score = score or headline  # the metric that becomes an episode's `score`, if a rule computes it
        self.roles: dict[str, Role] = workflow.agents()
        self.toolbox = Toolbox(tools or {})
        self.toolbox.check(workflow.tools, type(workflow).__name__)
        # the arguments of `make`, and the number of rules that they made: `train` makes the arena again
        self.made: dict[str, Any] = {}
        self.rules: list[Rule] = []
        for rule in rules:
            self.add_rule(rule)
        self._index: dict[str, int] = {}
        for i, row in enumerate(data.rows):
            if not isinstance(row, Mapping) or row.get("id") is None:
                raise TaskError(f"data set {data.name!r}: task number {i + 1} has no 'id': {row!r:.80}")
            if str(row.get("id")) in self._index:
                raise ValueError(f"data set {data.name!r}: two tasks have the id {row['id']!r}")
            self._index[str(row.get("id"))] = i
        if not self._index:
            raise ValueError(f"data set {data.name!r} ({data.split}) is empty; an environment needs a task")
        self._tasks: dict[str, Task] = {}
        self.code_hash = code_hash(type(workflow), *(type(r) for r in self.rules))

    def add_rule(self, rule: object) -> None:
        """Attach a reward rule. The same name twice is an error."""
        rules = [*self.rules, as_rule(rule)]
        check_names(rules)
        self.rules = rules

    def with_prompts(self, prompts: object) -> Arena:
        """Return the same arena with another prompt set."""
        twin = copy.copy(self)
        twin.workflow = self.workflow.with_prompts(prompts).seal()
        twin.roles = twin.workflow.agents()
        twin.config = {**self.config, **_provenance(twin.workflow)}
        return twin

    @property
    def task_ids(self) -> Sequence[str]:
        """List the ids of all tasks, in order."""
        return list(self._index)

    def task(self, id: str) -> Task:
        """Return a task by id, checked against the schema. The error for an unknown id names the nearest one."""
        task = self._tasks.get(id)
        if task is None:
            if id not in self._index:
                where = f"{self.data.name!r} ({self.data.split}, {counted(len(self._index), 'task')})"
                raise UnknownTask(f"{where}: {unknown('task', id, self._index)}")
            task = self._tasks[id] = Task.of(self.data.rows[self._index[id]], self.workflow.schema)
        return task

    def start(self, task: Task, seed: int) -> Execution:
        """Begin an episode."""
        return Execution(self.workflow, task, seed, budget=self.budget, roles=self.roles)

    def scorer(self, task: Task) -> Scorer:
        """Make the scorer of one episode."""
        return Scorer(self.rules, task, self.score)

    def label(self, trace: Trace, sample: int = 0) -> Trace:
        """Write the provenance into a trace."""
        data = self.data
        trace.env_id, trace.config, trace.code_hash = self.env_id, self.config, self.code_hash
        trace.data = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint}
        trace.sample = sample
        return trace

    def rescore(self, trace: Trace) -> Trace:
        """Apply the rules to a finished trace again. Nothing is generated, and a failed trace stays as it is."""
        if str(trace.ended) == "error":
            return trace
        trace.credits, trace.metrics = [], {}
        self.scorer(self.task(trace.task_id)).advance(trace)
        return trace

    def __deepcopy__(self, memo: object) -> Arena:
        return self  # shared by all episodes


def _provenance(workflow: Workflow) -> dict[str, object]:
    """Return the prompt set of the roles, for the provenance."""
    told = workflow.prompt_set
    return {} if told is None else {"prompts": told.choice, "prompts_hash": told.hash}


@lru_cache(maxsize=256)
def _source(module: str) -> bytes:
    try:
        return bare_code(inspect.getsource(sys.modules[module])).encode()
    except (OSError, TypeError, KeyError):  # defined at a prompt
        return module.encode()


def bare_code(source: str) -> str:
    """Strip docstrings, comments, imports and blank lines from a source. The rest is what can change an episode.

    The result is text, not a tree, because versions of Python print trees differently.
    """
    lines = [line.encode() for line in source.split("\n")]
    begin = [0, *itertools.accumulate(len(line) + 1 for line in lines)]  # bytes before each line
    spans, texts = [], set[int]()
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if _is_docstring(node)}
    for node in nodes:
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            spans.append((begin[first - 1] + node.col_offset, begin[last - 1] + (node.end_col_offset or 0)))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings:
            texts.update(range(first, last))  # lines that end inside a string constant are kept
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            start = begin[row - 1] + len(lines[row - 1].decode()[:column].encode())
            spans.append((start, start + len(token.string.encode())))
    code = bytearray(source.encode())
    for start, end in spans:
        code[start:end] = bytes(32 if byte != 10 else 10 for byte in code[start:end])
    kept = enumerate(code.decode().split("\n"), 1)
    return "\n".join(
        line if row in texts else line.rstrip() for row, line in kept if row in texts or line.strip()
    )


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def code_hash(*kinds: type) -> str:
    """Hash the code of the modules that define these classes, because episodes depend on it."""
    digest = hashlib.sha256()
    for module in dict.fromkeys(kind.__module__ for kind in kinds):
        digest.update(_source(module))
    return digest.hexdigest()[:16]
