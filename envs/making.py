"""Implementation of `make`: tasks, tools, rules and budget of an environment, from its spec and the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ..agents.basics.failures import RewardError
from ..agents.basics.hints import nearest, say_once
from ..agents.basics.json_types import JsonView
from ..agents.basics.named_parts import Registry, UnknownName, is_place
from ..own import at, defined
from .core.arena import Arena
from .core.execution import Budget
from .core.prompts import OWN
from .core.tasks import SCHEMAS, DataSet, Task, fingerprint
from .core.workflow import Workflow
from .env_spec import EnvSpec, resolve
from .tools.tool import Tool

PACKAGE = __package__.rpartition(".")[0]

DataLike: TypeAlias = str | Path | DataSet | None
"""Data set, or its name or file. None: the environment's own."""
BudgetLike: TypeAlias = Budget | JsonView | None
"""Budget, or the limits that differ from the environment's own."""

TOOLS: Registry[Any] = Registry(
    "tool",
    "unitymas.tools",
    __package__,
    {"retrieve": ".tools.defaults:retrieve", "verify": ".tools.defaults:verify"},
)
"""Tools by name: functions marked with `@tool`, or functions `(data: DataSet) -> tool`."""

REWARDS: Registry[Any] = Registry(
    "reward",
    "unitymas.rewards",
    PACKAGE,
    {
        "accuracy": ".rewards.outcome:Accuracy",
        "answer-em": ".rewards.outcome:AnswerEM",
        "answer-f1": ".rewards.outcome:AnswerF1",
        "call-cost": ".rewards.routing:CallCost",
        "code-credit": ".rewards.outcome:CodeCredit",
        "format": ".rewards.rules:FormatReward",
        "mask-credit": ".rewards.mask:MaskCredit",
        "routed-f1": ".rewards.routing:RoutedF1",
    },
)
"""Reward rules by name: rules, functions `(trace, task)`, or classes of rules."""


def arena_of_spec(
    known: EnvSpec,
    id: str,
    *,
    split: str | None,
    data: DataLike,
    tasks: object,
    size: int | None,
    reward: object,
    tools: Mapping[str, object],
    budget: BudgetLike,
    prompts: object,
    config: Mapping[str, object],
) -> Arena:
    """Make the arena of an environment from its spec and the arguments of `make`."""
    workflow = known.make_workflow(**config, prompts=prompts)
    if tasks is not None and (split is not None or data is not None):
        raise ValueError(f"{id}: give either tasks (your own) or split/data, not both")
    if isinstance(data, str) and data not in ("mini",) and known.tasks is not None:
        raise ValueError(f"{id} makes its own tasks; data={data!r} does not apply")
    chosen = _own(tasks, workflow) if tasks is not None else _data(known, split, data, size, workflow)
    usual = _is(reward, "default")
    rules = known.reward if usual else () if reward is None else reward
    changes = {"reward": not usual, "tasks": tasks is not None, "budget": budget is not None}
    changes["prompts"] = workflow.prompt_set is not None and workflow.prompt_set.name == OWN
    modified = sorted(
        [k for k, v in config.items() if known.config.get(k, _default(known, k)) != v]
        + [f"tools.{name}" for name in tools]
        + [name for name, changed in changes.items() if changed]
    )
    arena = Arena(
        workflow, chosen, env_id=known.id, tools=_tools(known, id, workflow, tools, chosen, tasks is not None),
        rules=[make_rule(rule) for rule in (rules if isinstance(rules, list | tuple) else (rules,))],
        budget=_budget(known, budget), expert=resolve(known.expert),
        headline=known.headline if usual else "score", score=known.headline,
        config={**known.config, **config, "modified": modified}, prompts_said=prompts is not None,
    )  # fmt: skip
    arena.made = {
        "id": id, "split": split, "data": data, "tasks": tasks, "size": size, "reward": reward, "tools": dict(tools),
        "budget": budget, "prompts": prompts, "args": dict(config), "rules": len(arena.rules),
    }  # fmt: skip
    return arena


def make_rule(rule: object) -> object:
    """Return a reward rule from a rule, a plain function, a class of rules, or the name or place of one of these."""
    if isinstance(rule, str) and not is_place(rule) and rule not in REWARDS:
        raise UnknownName(f"unknown reward {rule!r}: {nearest(rule, ['default', *REWARDS])}")
    thing = REWARDS.named(rule)
    if not isinstance(thing, type):
        return thing
    try:
        inspect.signature(thing).bind()
    except TypeError as error:
        where = defined(vars(thing).get("__init__", thing))
        raise RewardError(
            f"reward {thing.__name__} is made without arguments, and that cannot be: {error}; give defaults, or from Python "
            f"an object{at(where)}"
        ) from None
    return thing()


def _is(value: object, word: str) -> bool:
    return isinstance(value, str) and value == word


def _default(known: EnvSpec, name: str) -> object:
    parameter = inspect.signature(resolve(known.workflow)).parameters.get(name)
    return None if parameter is None else parameter.default


def _budget(known: EnvSpec, budget: BudgetLike) -> Budget:
    if budget is None:
        return known.budget
    return budget if isinstance(budget, Budget) else replace(known.budget, **budget)


def _own(tasks: object, workflow: Workflow) -> DataSet:
    if isinstance(tasks, DataSet):
        return tasks
    if (
        not isinstance(tasks, Sequence)
        or isinstance(tasks, str)
        or not all(isinstance(t, Mapping) for t in tasks)
    ):
        raise TypeError(
            f"tasks must be a list of dicts with {', '.join(workflow.schema.required)}; got {tasks!r:.80}"
        )
    rows = [dict(t) for t in tasks]
    for row in rows[:1]:  # a wrong field is mostly wrong in all of them; each is read when it is played
        Task.of(row, workflow.schema)
    return DataSet("own", "own", rows, fingerprint(tasks))


def _data(
    known: EnvSpec, named: str | None, data: DataLike, size: int | None, workflow: Workflow | None = None
) -> DataSet:
    """Return the data set: the environment's own, a real one, a file, or the embedded mini world."""
    if isinstance(data, DataSet):
        return data
    split = named or known.split
    if known.tasks is not None:
        own = known.tasks
        rows = getattr(workflow, own) if isinstance(own, str) and ":" not in own else resolve(own)
        rows = rows(split, size) if callable(rows) else rows
        if isinstance(rows, DataSet):
            return rows
        rows = list(rows)[:size]
        return DataSet(known.name, split, rows, fingerprint(rows))
    from .data import mini

    if data is None and known.dataset:
        from .data import sets

        if sets.is_prepared(known.dataset):
            rows = _prepared(known, known.dataset, named)
            say_once(f"{known.id}: tasks from {known.dataset} ({rows.split}), prepared on this machine")
            return rows
        say_once(
            f"{known.id}: {known.dataset} is not on this machine, so the embedded mini world stands in "
            f"(unitymas data prepare {known.dataset}; or data='mini' to say so)"
        )
        return mini.load(known.kind, split, size)
    if data is None or _is(data, "mini"):
        return mini.load(known.kind, split, size)
    from .data import sets

    if isinstance(data, Path) or "/" in str(data) or "." in str(data):
        return sets.load_file(data, SCHEMAS[known.kind.partition("-")[0]].name, split)
    return _prepared(known, str(data), named)


def _prepared(known: EnvSpec, name: str, named: str | None) -> DataSet:
    """Load a real data set.

    If the user names no split and the default split is missing, the first split is used. Many data sets have only a test
    split.
    """
    from .data import sets

    splits = sets.splits(name)
    if named is None and splits and known.split not in splits:
        say_once(
            f"{known.id}: {name} has no {known.split!r} split, so {splits[0]!r} it is "
            f"(it has {', '.join(splits)}; choose with split=…)"
        )
        named = splits[0]
    return sets.load(name, named or known.split)


def _tools(
    known: EnvSpec,
    id: str,
    workflow: Workflow,
    own: Mapping[str, object],
    data: DataSet,
    own_tasks: bool,
) -> dict[str, object]:
    """Return the tools of an environment by name: the user's tool, or else the spec's, or else the registered one."""
    for name in own:
        if name not in known.tools and name.partition(":")[0] not in workflow.tools:
            uses = f"it uses {', '.join(workflow.tools) or 'no tools'}"
            hint = nearest(name, [*known.tools, *workflow.tools], instead=uses)
            raise ValueError(f"{id} uses no tool {name!r}; {hint}")
    box = {}
    for name in (*workflow.tools, *(n for n in own if n not in workflow.tools)):
        if own.get(name) is not None:
            box[name] = _made(own[name], data)
        elif name in known.tools:
            box[name] = _usual(known, name, data, own_tasks)
        elif name in TOOLS:
            box[name] = _made(name, data)
    return {name: made for name, made in box.items() if made is not None}


def _made(tool: object, data: DataSet) -> object:
    """Return a tool from a tool, a name or a place. A function whose first parameter is `data` is called with the data set."""
    if not isinstance(tool, str):
        return tool
    thing = TOOLS.find(tool)
    if isinstance(thing, Tool) or next(iter(inspect.signature(thing).parameters), "") != "data":
        return thing
    return thing(data)


def _usual(known: EnvSpec, name: str, data: DataSet, own_tasks: bool) -> object:
    """Return a tool of the spec, for these tasks."""
    factory = known.tools[name]
    if own_tasks and data.passages is None and known.kind.startswith("qa"):
        say_once(
            f"{known.id}: your tasks come without passages, so `{name}` searches the embedded mini world"
        )
        data = _data(replace(known, dataset=""), "train", "mini", None)
    thing = TOOLS.named(factory)
    return thing(data) if isinstance(factory, str) and not isinstance(thing, Tool) else thing
