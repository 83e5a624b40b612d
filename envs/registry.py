"""Environments by name: `register`, `make`, `spec`, `list_envs`.

Ids have versions (`mask-hotpotqa-v0`). An id without a version means the newest one. Third parties register environments
through the entry-point group `unitymas.envs`: with a function that registers them, or a module that does so on import.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..agents.basics.hints import nearest, say_once
from ..agents.basics.named_parts import Registry
from ..own import OwnCodeError, load, load_plugin, plugins, told
from .core.arena import Arena
from .env_spec import EnvSpec, UnknownEnv, argument_hints, parse_id, resolve
from .making import PACKAGE, BudgetLike, DataLike, arena_of_spec, make_rule

if TYPE_CHECKING:
    from .faces.aec import WorkflowEnv

__all__ = [
    "ENVIRONMENTS", "PACKAGE", "EnvSpec", "UnknownEnv", "argument_hints", "list_envs", "make", "make_arena", "make_rule",
    "register", "resolve", "spec", "unregister",
]  # fmt: skip

ENVIRONMENTS: Registry[EnvSpec] = Registry("environment")
"""Specs of environments, by id with version. `_load_plugins` loads the plug-ins, because one plug-in may register many
ids."""
_plugins_loaded = False


def register(id: str, workflow: object, **fields: Any) -> EnvSpec:
    """Register an environment.

    `unitymas.register("my-env", workflow="my_pkg:MyWorkflow", reward="my_pkg:my_reward", tasks=rows)`
    """
    name, version = parse_id(id)
    reward = fields.pop("reward", ())
    rules = tuple(reward) if isinstance(reward, list | tuple) else (reward,)
    spec = EnvSpec(id=f"{name}-v{version or 0}", workflow=workflow, reward=rules, **fields)
    ENVIRONMENTS.register(spec.id, spec, again=True)
    _tell_others(spec.id)
    return spec


def unregister(id: str) -> None:
    """Remove an environment from the registry, for tests and notebooks."""
    whole = spec(id).id
    _forget_elsewhere(whole)
    ENVIRONMENTS.unregister(whole)


def list_envs() -> list[str]:
    """List the ids of all environments (newest versions), sorted."""
    _load_plugins()
    return sorted({parse_id(id)[0] for id in ENVIRONMENTS})


def spec(id: str) -> EnvSpec:
    """Return the spec of an id. The error for an unknown id names the nearest ones.

    `my_pkg.my_mod:my-env` and `my_team.py:my-env` first import the module or file that registers the id.
    """
    _load_plugins()
    where, colon, id = id.rpartition(":")
    if colon:
        load(where)
    name, version = parse_id(id.removeprefix("unitymas/"))
    versions = sorted(known or 0 for other, known in map(parse_id, ENVIRONMENTS) if other == name)
    if not versions:
        names = list_envs()
        hint = nearest(name, names, most=3, alike=0.6, instead=f"unitymas list shows all {len(names)}")
        own = f"{where} registers none of this name" if colon else "your own: --import FILE.py, or module:id"
        raise UnknownEnv(f"unknown environment {id!r}; {hint} ({own})")
    if version is None:
        version = versions[-1]
    if version not in versions:
        known = ", ".join(f"{name}-v{v}" for v in versions)
        raise UnknownEnv(f"environment {name!r} has no version {version}; it has {known}")
    return ENVIRONMENTS.find(f"{name}-v{version}")


def make(
    id: str,
    *,
    split: str | None = None,
    data: DataLike = None,
    tasks: object = None,
    size: int | None = None,
    reward: object = "default",
    render_mode: str | None = None,
    tools: Mapping[str, object] | None = None,
    budget: BudgetLike = None,
    prompts: object = None,
    **config: object,
) -> WorkflowEnv:
    """Make an environment: `unitymas.make("mask-hotpotqa", split="validation", data="mini", max_turns=3)`.

    - `split`: part of the data set, such as "train", "validation" or "test".
    - `data`: "mini", the name of a prepared data set, or a file. None: the environment's real data set if it is prepared on
      this machine, else mini.
    - `tasks`: your own rows. They exclude `split` and `data`.
    - `size`: number of tasks to generate in the mini world.
    - `reward`: "default", None, a rule, a plain function, a registered name, or a list of these.
    - `tools`: tools by name (a tool, or a registered name). They replace the environment's.
    - `budget`: limits of an episode: requests, tokens, seconds.
    - `prompts`: the prompt set: "full" (the default), "few-shot", "short", a mapping from role to text, or a file (docs/prompts.md).
    - `lenient`: True, False, or a mapping by role: text that is allowed around a reply, as in `Role.lenient`.
    - All other keywords are arguments of the workflow.
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
    data: DataLike = None,
    tasks: object = None,
    size: int | None = None,
    reward: object = "default",
    tools: Mapping[str, object] | None = None,
    budget: BudgetLike = None,
    prompts: object = None,
    **config: object,
) -> Arena:
    """Make the arena of an environment, without the PettingZoo interface."""
    return arena_of_spec(
        spec(id), id, split=split, data=data, tasks=tasks, size=size, reward=reward, tools=tools or {}, budget=budget,
        prompts=prompts, config=config,
    )  # fmt: skip


def _load_plugins() -> None:
    """Load the environments of plug-ins. A broken plug-in is reported and does not affect the others."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    from . import catalogue  # ours

    catalogue.register_all(register)
    for point in plugins("unitymas.envs").values():
        try:
            plugin = load_plugin(point)
            if callable(plugin):  # otherwise it is a module that registers when it is imported
                plugin()
        except OwnCodeError as error:
            say_once(str(error))
        except Exception as error:
            say_once(f"the plug-in {point.name!r} ({point.value}) failed to register: {told(error)}")


def _tell_others(id: str) -> None:
    """Register `unitymas/ID` with PettingZoo and with Gymnasium. In Gymnasium, a team plays all roles except one."""
    import gymnasium
    import pettingzoo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a notebook, an id may be registered again
        gymnasium.register(
            f"unitymas/{id}", entry_point=f"{__package__}.faces.bridges:gym_role", kwargs={"env_id": id}
        )
        if hasattr(pettingzoo, "register"):  # an older PettingZoo has no registry
            pettingzoo.register("aec", f"unitymas/{id}", entry_point=_Maker(id))


def _forget_elsewhere(id: str) -> None:
    import gymnasium
    import pettingzoo

    gymnasium.registry.pop(f"unitymas/{id}", None)
    getattr(pettingzoo, "aec_registry", {}).pop(f"unitymas/{id}", None)


@dataclass(frozen=True)
class _Maker:
    """Entry point for PettingZoo's registry that can be pickled."""

    id: str

    def __call__(self, **how: Any) -> WorkflowEnv:
        return make(self.id, **how)
