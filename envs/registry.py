"""Environments by name: `register`, `make`, `spec`, `list_envs`.

A spec holds entry-point strings (`"package.module:attribute"`), as Gymnasium's registry does, so that
listing loads nothing and `envs` never imports `rewards`. Ids carry versions (`mask-hotpotqa-v0`); a bare
id is the newest. Third parties register through the entry-point group `unitymas.envs`.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ..agents.hints import described, fits, say_once
from ..own import OwnCodeError, find, load, load_plugin, plugins, told
from .core.arena import Arena
from .core.execution import Budget
from .core.prompts import OWN, choose
from .core.tasks import SCHEMAS, DataSet, fingerprint
from .core.workflow import Workflow

if TYPE_CHECKING:
    from ..agents.roles import Role
    from .faces.aec import WorkflowEnv

ID = re.compile(r"(?P<name>[a-z0-9]+(?:[-_][a-z0-9]+)*?)(?:-v(?P<version>\d+))?")
PACKAGE = __package__.rpartition(".")[0]


class UnknownEnv(KeyError):
    """An id that nobody registered."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What is known about an environment before it is made."""

    id: str
    workflow: Any
    """A Workflow class (or its entry point), made with the configuration."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the workflow's own arguments."""
    reward: tuple[Any, ...] = ()
    """The default rules: rules, functions, or entry points to them (a class or function that makes them)."""
    kind: str = ""
    """Which tasks of the embedded mini world stand in: qa, code, math, …"""
    dataset: str = ""
    """The real data set of the id."""
    split: str = "train"
    """What `make` takes when no split is named; a data set that lacks it gives its first one, and says so."""
    tasks: Any = None
    """Rows, a DataSet, `(split, size) -> rows | DataSet`, or the name of the workflow's method that is one, where
    the tasks are the environment's own."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """By name: a tool, or an entry point to a factory `(data: DataSet) -> tool`."""
    expert: Any = None
    """`(call) -> str`: plays every role right; its call carries the whole task."""
    headline: str = "score"
    """The metric that a leaderboard ranks by."""
    success: str = ""
    """The 0/1 metric that counts as solved (pass@k); empty where the headline itself is 0/1."""
    budget: Budget = Budget()
    description: str = ""

    @property
    def name(self) -> str:
        """The id without its version."""
        return _parse(self.id)[0]

    @property
    def version(self) -> int:
        """The version in the id."""
        return _parse(self.id)[1] or 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles with their reply formats, under the default configuration."""
        return self.make_workflow().told_roles()

    def make_workflow(self, **config: Any) -> Workflow:
        """The workflow, configured; an unknown argument is answered with the nearest."""
        kind = resolve(self.workflow)
        settings = {**self.config, **config}
        lenient, prompts = settings.pop("lenient", None), settings.pop("prompts", None)
        if isinstance(kind, Workflow):
            raise TypeError(
                f"{self.id}: workflow={kind!r:.60} is made already; give its class, or what makes one"
            )
        for name, wanted in argument_hints(kind).items():
            if name in settings and wanted in (int, float, bool, str) and not fits(settings[name], wanted):
                raise TypeError(f"{self.id}: {name} must be {described(wanted)}, got {settings[name]!r:.60}")
        try:
            workflow: Workflow = kind(**settings)
        except TypeError as error:
            raise TypeError(f"{self.id}: {_argument_hint(kind, settings, error)}") from error
        if lenient is not None:
            workflow.lenient = _by_role(self.id, lenient, workflow)
        if isinstance(workflow, Workflow):
            workflow.prompt_set = choose(workflow, prompts)
        return workflow


_specs: dict[str, dict[int, EnvSpec]] = {}
_plugins_loaded = False


def register(id: str, workflow: Any, **fields: Any) -> EnvSpec:
    """Register an environment.

    `unitymas.register("my-env", workflow="my_pkg:MyWorkflow", reward="my_pkg:my_reward", tasks=rows)`
    """
    name, version = _parse(id)
    reward = fields.pop("reward", ())
    rules = tuple(reward) if isinstance(reward, list | tuple) else (reward,)
    spec = EnvSpec(id=f"{name}-v{version or 0}", workflow=workflow, reward=rules, **fields)
    _specs.setdefault(name, {})[spec.version] = spec
    _tell_others(spec.id)
    return spec


def unregister(id: str) -> None:
    """Forget an environment (for tests and notebooks)."""
    name, version = _parse(spec(id).id)
    _forget_elsewhere(spec(id).id)
    del _specs[name][version or 0]
    if not _specs[name]:
        del _specs[name]


def list_envs() -> list[str]:
    """The ids of all environments (newest versions), sorted."""
    _load_plugins()
    return sorted(_specs)


def spec(id: str) -> EnvSpec:
    """The spec of an id; an unknown id is answered with the nearest ones.

    `my_pkg.my_mod:my-env` and `my_team.py:my-env` import the module or file that registers it first.
    """
    _load_plugins()
    where, colon, id = id.rpartition(":")
    if colon:
        load(where)
    name, version = _parse(id.removeprefix("unitymas/"))
    versions = _specs.get(name)
    if versions is None:
        near = difflib.get_close_matches(name, _specs, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"unitymas list shows all {len(_specs)}"
        own = f"{where} registers none of this name" if colon else "your own: --import FILE.py, or module:id"
        raise UnknownEnv(f"unknown environment {id!r}; {hint} ({own})")
    if version is None:
        return versions[max(versions)]
    if version not in versions:
        known = ", ".join(f"{name}-v{v}" for v in sorted(versions))
        raise UnknownEnv(f"environment {name!r} has no version {version}; it has {known}")
    return versions[version]


def make(
    id: str,
    *,
    split: str | None = None,
    data: Any = None,
    tasks: Any = None,
    size: int | None = None,
    reward: Any = "default",
    render_mode: str | None = None,
    tools: Mapping[str, Any] | None = None,
    budget: Budget | Mapping[str, Any] | None = None,
    prompts: Any = None,
    **config: Any,
) -> WorkflowEnv:
    """Make an environment: `unitymas.make("mask-hotpotqa", split="validation", data="mini", max_turns=3)`.

    `tasks` are one's own rows (then neither `split` nor `data`); `reward` is `"default"`, None, a rule, a
    plain function or a list of them; `tools` replace the default ones by name; `lenient` (True, False, or a mapping
    by role) says what may stand around a reply, as `Role.lenient`; `prompts` is what the roles are told: "full" (the
    default), "few-shot", "short", or one's own by role, as a mapping or a file (docs/prompts.md); whatever else is
    given configures the workflow.
    """
    from .faces.aec import WorkflowEnv

    return WorkflowEnv(
        make_arena(
            id, split=split, data=data, tasks=tasks, size=size, reward=reward, tools=tools, budget=budget, prompts=prompts,
            **config,
        ),
        render_mode,
    )  # fmt: skip


def make_arena(
    id: str,
    *,
    split: str | None = None,
    data: Any = None,
    tasks: Any = None,
    size: int | None = None,
    reward: Any = "default",
    tools: Mapping[str, Any] | None = None,
    budget: Budget | Mapping[str, Any] | None = None,
    prompts: Any = None,
    **config: Any,
) -> Arena:
    """What `make` puts behind the AEC face."""
    known = spec(id)
    workflow = known.make_workflow(**config, prompts=prompts)
    if tasks is not None and (split is not None or data is not None):
        raise ValueError(f"{id}: give either tasks (your own) or split/data, not both")
    if isinstance(data, str) and data not in ("mini",) and known.tasks is not None:
        raise ValueError(f"{id} makes its own tasks; data={data!r} does not apply")
    found = _own(tasks, workflow) if tasks is not None else _data(known, split, data, size, workflow)
    rules = known.reward if _is(reward, "default") else () if reward is None else reward
    rules = rules if isinstance(rules, list | tuple) else (rules,)
    given = dict(tools or {})
    for name in given:
        if name not in known.tools and name.partition(":")[0] not in workflow.tools:
            near = difflib.get_close_matches(name, [*known.tools, *workflow.tools], n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it uses {', '.join(workflow.tools) or 'no tools'}"
            )
            raise ValueError(f"{id} uses no tool {name!r}; {hint}")
    box = {
        name: made
        for name in (*workflow.tools, *(n for n in given if n not in workflow.tools))
        if (made := given.get(name) or _tool(known, name, found, tasks is not None)) is not None
    }
    modified = sorted(
        [k for k, v in config.items() if known.config.get(k, _default(known, k)) != v]
        + [f"tools.{name}" for name in given]
        + (["reward"] if not _is(reward, "default") else [])
        + (["tasks"] if tasks is not None else [])
        + (["budget"] if budget is not None else [])
        + (["prompts"] if workflow.prompt_set is not None and workflow.prompt_set.name == OWN else [])
    )
    arena = Arena(
        workflow, found, env_id=known.id, tools=box, rules=[make_rule(rule) for rule in rules],
        budget=_budget(known, budget), expert=resolve(known.expert),
        headline=known.headline if _is(reward, "default") else "score", score=known.headline,
        config={**known.config, **config, "modified": modified}, prompts_said=prompts is not None,
    )  # fmt: skip
    arena.made = {
        "id": id, "split": split, "data": data, "tasks": tasks, "size": size, "reward": reward, "tools": given,
        "budget": budget, "prompts": prompts, "args": config, "rules": len(arena.rules),
    }  # fmt: skip
    return arena


# the parts of make ------------------------------------------------------------------------------------


def resolve(target: Any) -> Any:
    """`"package.module:name"` or `"file.py:name"` to what it names; others as they are."""
    if not isinstance(target, str):
        return target
    return find(target)


def _by_role(id: str, lenient: Any, workflow: Workflow) -> dict[str, bool]:
    """`lenient=` as a mapping from roles; an unknown role is answered with the nearest."""
    table = dict(lenient) if isinstance(lenient, Mapping) else {"*": lenient}
    names = [role.name for role in workflow.roles]
    for name, value in table.items():
        if name not in (*names, "*"):
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its roles are {', '.join(names)}"
            raise ValueError(f"{id}: lenient: there is no role {name!r}; {hint}")
        if not isinstance(value, bool):
            raise TypeError(f"{id}: lenient of {name!r} must be true or false, got {value!r}")
    return table


def _parse(id: str) -> tuple[str, int | None]:
    match = ID.fullmatch(id)
    if match is None:
        raise UnknownEnv(f"{id!r} is no environment id; ids look like 'mask-hotpotqa' or 'mask-hotpotqa-v0'")
    return match["name"], None if match["version"] is None else int(match["version"])


def _is(value: Any, word: str) -> bool:
    return isinstance(value, str) and value == word


def make_rule(rule: Any) -> Any:
    """An entry point may name a rule, a class that makes one, or a plain function."""
    found = resolve(rule)
    return found() if isinstance(found, type) else found


def _default(known: EnvSpec, name: str) -> Any:
    import inspect

    parameter = inspect.signature(resolve(known.workflow)).parameters.get(name)
    return None if parameter is None else parameter.default


def _budget(known: EnvSpec, given: Budget | Mapping[str, Any] | None) -> Budget:
    if given is None:
        return known.budget
    return given if isinstance(given, Budget) else replace(known.budget, **given)


def _own(tasks: Any, workflow: Workflow) -> DataSet:
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
    return DataSet("own", "own", [dict(t) for t in tasks], fingerprint(tasks))


def _data(
    known: EnvSpec, named: str | None, data: Any, size: int | None, workflow: Workflow | None = None
) -> DataSet:
    """The tasks: the environment's own, a real data set, a file, or the embedded mini world."""
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
            found = _prepared(known, known.dataset, named)
            say_once(f"{known.id}: tasks from {known.dataset} ({found.split}), prepared on this machine")
            return found
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
    """A real data set. Where no split was named and it lacks the usual one (many are for testing only): its first."""
    from .data import sets

    there = sets.splits(name)
    if named is None and there and known.split not in there:
        say_once(
            f"{known.id}: {name} has no {known.split!r} split, so {there[0]!r} it is "
            f"(it has {', '.join(there)}; choose with split=…)"
        )
        named = there[0]
    return sets.load(name, named or known.split)


def _tool(known: EnvSpec, name: str, data: DataSet, own: bool) -> Any:
    factory = known.tools.get(name)
    if factory is None:
        return None
    if own and data.passages is None and known.kind.startswith("qa"):
        say_once(
            f"{known.id}: your tasks come without passages, so `{name}` searches the embedded mini world"
        )
        data = _data(replace(known, dataset=""), "train", "mini", None)
    found = resolve(factory)
    return found(data) if isinstance(factory, str) else found


def argument_hints(kind: Any) -> Mapping[str, Any]:
    """The annotated kinds of what makes a workflow, where they can be read."""
    made_by: Any = kind
    try:
        return get_type_hints(made_by.__init__ if isinstance(kind, type) else made_by)
    except (TypeError, NameError):
        return {}


def _argument_hint(kind: Any, settings: Mapping[str, Any], error: TypeError) -> str:
    import inspect

    names = [n for n in inspect.signature(kind).parameters if n not in ("args", "kwargs")]
    for key in settings:
        if key not in names:
            near = difflib.get_close_matches(
                key,
                [*names, "split", "data", "tasks", "reward", "tools", "budget", "lenient", "prompts"],
                n=1,
            )
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names) or 'none'}"
            return f"unknown argument {key!r}; {hint}"
    return str(error)


def _load_plugins() -> None:
    """Third-party environments; a broken one is reported and never breaks the others."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    from . import catalogue  # ours

    catalogue.register_all(register)
    for point in plugins("unitymas.envs").values():
        try:
            found = load_plugin(point)
            if callable(found):  # else a module, whose import registers
                found()
        except OwnCodeError as error:
            say_once(str(error))
        except Exception as error:
            say_once(f"the plug-in {point.name!r} ({point.value}) failed to register: {told(error)}")


def _tell_others(id: str) -> None:
    """Register `unitymas/ID` with PettingZoo and with Gymnasium (there: one role, the others played by a team)."""
    import gymnasium
    import pettingzoo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # registering anew, in a notebook, is no mistake
        gymnasium.register(
            f"unitymas/{id}", entry_point=f"{__package__}.faces.bridges:gym_role", kwargs={"env_id": id}
        )
        if hasattr(pettingzoo, "register"):  # an older PettingZoo has no registry; ours works without it
            pettingzoo.register("aec", f"unitymas/{id}", entry_point=_Maker(id))


def _forget_elsewhere(id: str) -> None:
    import gymnasium
    import pettingzoo

    gymnasium.registry.pop(f"unitymas/{id}", None)
    getattr(pettingzoo, "aec_registry", {}).pop(f"unitymas/{id}", None)


@dataclass(frozen=True)
class _Maker:
    """A picklable entry point for PettingZoo's registry."""

    id: str

    def __call__(self, **how: Any) -> WorkflowEnv:
        return make(self.id, **how)
