"""Specs of environments, which are complete before an environment is made.

A spec names objects by their place (`"package.module:attribute"`), as in Gymnasium's registry. So listing imports nothing,
and `envs` never imports `rewards`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_type_hints

from ..agents.basics.hints import described, fits, nearest
from ..agents.basics.named_parts import UnknownName
from ..own import find
from .core.execution import Budget
from .core.prompts import choose
from .core.workflow import Workflow

if TYPE_CHECKING:
    from ..agents.roles import Role
    from ..agents.team import Expert

ID = re.compile(r"(?P<name>[a-z0-9]+(?:[-_][a-z0-9]+)*?)(?:-v(?P<version>\d+))?")


OF_MAKE = ("split", "data", "tasks", "reward", "tools", "budget", "lenient", "prompts")
"""Arguments of `make` that do not belong to the workflow."""


class UnknownEnv(UnknownName):
    """Raised for an id that is not registered."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Spec of an environment."""

    id: str
    workflow: object
    """Class of the workflow, or its entry point. The configuration is its arguments."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Default values of the workflow's own arguments."""
    reward: tuple[object, ...] = ()
    """Default reward rules: rules, functions, or entry points to them (a class or function that makes them)."""
    kind: str = ""
    """Kind of tasks that the embedded mini world supplies if the real data is missing: qa, code, math, …"""
    dataset: str = ""
    """Name of the real data set."""
    split: str = "train"
    """Default split. If a data set has no such split, its first split is used, and a message says so."""
    tasks: object = None
    """Tasks of an environment that makes its own: rows, a `DataSet`, a function `(split, size)` that returns either, or the
    name of such a method of the workflow. None: tasks come from a data set."""
    tools: Mapping[str, object] = field(default_factory=dict)
    """Tools by name: each is a tool, or an entry point to a function `(data: DataSet)` that returns one."""
    expert: Expert | str | None = None
    """Expert: a function that returns the right reply to a call of any role. The call holds the whole task."""
    headline: str = "score"
    """Main metric, by which a leaderboard ranks."""
    success: str = ""
    """Metric that is 1 for a solved task, for pass@k. Empty: the headline metric, which is then 0 or 1 itself."""
    budget: Budget = Budget()
    """Default limits of an episode."""
    description: str = ""
    """Description in one line."""

    @property
    def name(self) -> str:
        """Id without its version."""
        return parse_id(self.id)[0]

    @property
    def version(self) -> int:
        """Version of the id."""
        return parse_id(self.id)[1] or 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles with their prompts and reply formats, under the default configuration."""
        return self.make_workflow().told_roles()

    @property
    def role_names(self) -> tuple[str, ...]:
        """Names of the roles. Their prompts are not read, so listing is quick."""
        kind = resolve(self.workflow)
        settings = {name: value for name, value in self.config.items() if name not in ("lenient", "prompts")}
        return tuple(role.name for role in kind(**settings).roles)

    def make_workflow(self, **config: object) -> Workflow:
        """Make the workflow with its configuration. The error for an unknown argument names the nearest one."""
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


def parse_id(id: str) -> tuple[str, int | None]:
    """Split an id into its name and its version; the version is None if the id has none."""
    match = ID.fullmatch(id)
    if match is None:
        how = f"; an environment of a file is {id}:ID" if id.endswith(".py") else ""
        raise UnknownEnv(
            f"{id!r} is no environment id; ids look like 'mask-hotpotqa' or 'mask-hotpotqa-v0'{how}"
        )
    return match["name"], None if match["version"] is None else int(match["version"])


def resolve(target: object) -> Any:
    """Return the object at `"package.module:name"` or `"file.py:name"`. Anything else is returned unchanged."""
    if not isinstance(target, str):
        return target
    return find(target)


def _by_role(id: str, lenient: object, workflow: Workflow) -> dict[str, bool]:
    """Return `lenient=` as a mapping from roles. The error for an unknown role names the nearest one."""
    table: Mapping[str, object] = lenient if isinstance(lenient, Mapping) else {"*": lenient}
    checked: dict[str, bool] = {}
    names = [role.name for role in workflow.roles]
    for name, value in table.items():
        if name not in (*names, "*"):
            hint = nearest(str(name), names, "its roles are")
            raise ValueError(f"{id}: lenient: there is no role {name!r}; {hint}")
        if not isinstance(value, bool):
            raise TypeError(f"{id}: lenient of {name!r} must be true or false, got {value!r}")
        checked[name] = value
    return checked


def argument_hints(kind: object) -> Mapping[str, Any]:
    """Return the annotated types of a workflow's arguments; empty if they cannot be read."""
    factory: Any = kind
    try:
        return get_type_hints(factory.__init__ if isinstance(kind, type) else factory)
    except (TypeError, NameError):
        return {}


def _argument_hint(kind: Callable[..., object], settings: Mapping[str, object], error: TypeError) -> str:
    names = [n for n in inspect.signature(kind).parameters if n not in ("args", "kwargs")]
    for key in settings:
        if key not in names:
            hint = nearest(key, [*names, *OF_MAKE], instead=f"it takes {', '.join(names) or 'none'}")
            return f"unknown argument {key!r}; {hint}"
    return str(error)
