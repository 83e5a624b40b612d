"""Specs of environments: what is known about one before it is made.

A spec holds places (`"package.module:attribute"`), as Gymnasium's registry does, so that listing loads nothing and
`envs` never imports `rewards`.
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
"""Arguments of `make` that are no workflow's own."""


class UnknownEnv(UnknownName):
    """Raised for an id that nobody registered."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Facts about an environment, known before it is made."""

    id: str
    workflow: object
    """A Workflow class (or its entry point), made with the configuration."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Defaults of the workflow's own arguments."""
    reward: tuple[object, ...] = ()
    """The default rules: rules, functions, or entry points to them (a class or function that makes them)."""
    kind: str = ""
    """Kind of tasks that the embedded mini world puts in their place: qa, code, math, …"""
    dataset: str = ""
    """The real data set of the id."""
    split: str = "train"
    """Split that `make` takes when none is named; a data set that lacks it gives its first one, and says so."""
    tasks: object = None
    """Rows, a DataSet, `(split, size) -> rows | DataSet`, or the name of the workflow's method that is one, where
    the tasks are the environment's own."""
    tools: Mapping[str, object] = field(default_factory=dict)
    """Tools by name: each a tool, or an entry point to a factory `(data: DataSet) -> tool`."""
    expert: Expert | str | None = None
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
        return parse_id(self.id)[0]

    @property
    def version(self) -> int:
        """The version in the id."""
        return parse_id(self.id)[1] or 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles with their reply formats, under the default configuration."""
        return self.make_workflow().told_roles()

    @property
    def role_names(self) -> tuple[str, ...]:
        """Names of the roles. Their prompts are not read, so listing is quick."""
        kind = resolve(self.workflow)
        settings = {name: value for name, value in self.config.items() if name not in ("lenient", "prompts")}
        return tuple(role.name for role in kind(**settings).roles)

    def make_workflow(self, **config: object) -> Workflow:
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


def parse_id(id: str) -> tuple[str, int | None]:
    """Split an id into its name and its version; None where it has none."""
    match = ID.fullmatch(id)
    if match is None:
        how = f"; an environment of a file is {id}:ID" if id.endswith(".py") else ""
        raise UnknownEnv(
            f"{id!r} is no environment id; ids look like 'mask-hotpotqa' or 'mask-hotpotqa-v0'{how}"
        )
    return match["name"], None if match["version"] is None else int(match["version"])


def resolve(target: object) -> Any:
    """`"package.module:name"` or `"file.py:name"` to what it names; others as they are."""
    if not isinstance(target, str):
        return target
    return find(target)


def _by_role(id: str, lenient: object, workflow: Workflow) -> dict[str, bool]:
    """`lenient=` as a mapping from roles; an unknown role is answered with the nearest."""
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
    """The annotated kinds of what makes a workflow, where they can be read."""
    made_by: Any = kind
    try:
        return get_type_hints(made_by.__init__ if isinstance(kind, type) else made_by)
    except (TypeError, NameError):
        return {}


def _argument_hint(kind: Callable[..., object], settings: Mapping[str, object], error: TypeError) -> str:
    names = [n for n in inspect.signature(kind).parameters if n not in ("args", "kwargs")]
    for key in settings:
        if key not in names:
            hint = nearest(key, [*names, *OF_MAKE], instead=f"it takes {', '.join(names) or 'none'}")
            return f"unknown argument {key!r}; {hint}"
    return str(error)
