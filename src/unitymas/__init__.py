"""unitymas: Gymnasium for teams of language models, and the trainer that goes with it.

    import unitymas

    env = unitymas.make("mask-hotpotqa", data="mini")   # a PettingZoo AEC environment
    traces = unitymas.rollout(env, "scripted", tasks=8)
    print(traces[0].metrics)

Names are loaded at first use: importing this package loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import sys

from . import _moved as _moved  # old names of modules go on working

TYPE_CHECKING = False  # typing's own takes 5 ms to import
if TYPE_CHECKING:
    from typing import Any

    from .agents.roles import Boxed as Boxed
    from .agents.roles import Choice as Choice
    from .agents.roles import Custom as Custom
    from .agents.roles import FormatError as FormatError
    from .agents.roles import Json as Json
    from .agents.roles import Raw as Raw
    from .agents.roles import Reply as Reply
    from .agents.roles import Role as Role
    from .agents.roles import Tags as Tags
    from .agents.team import Team as Team
    from .agents.text.calls import ToolCalls as ToolCalls
    from .benchmarks.evaluation.evaluate import evaluate as evaluate
    from .envs.conformance import check_env as check_env
    from .envs.core.drivers import arollout as arollout
    from .envs.core.drivers import rollout as rollout
    from .envs.core.execution import Budget as Budget
    from .envs.core.ledger import Credit as Credit
    from .envs.core.tasks import Task as Task
    from .envs.core.trace import Trace as Trace
    from .envs.core.workflow import Episode as Episode
    from .envs.core.workflow import Outcome as Outcome
    from .envs.core.workflow import ToolError as ToolError
    from .envs.core.workflow import Workflow as Workflow
    from .envs.registry import list_envs as list_envs
    from .envs.registry import make as make
    from .envs.registry import register as register
    from .envs.registry import spec as spec
    from .envs.tool_loop import tool_loop as tool_loop
    from .envs.tools.tool import Infrastructure as Infrastructure
    from .envs.tools.tool import Result as Result
    from .envs.tools.tool import Tool as Tool
    from .envs.tools.tool import tool as tool
    from .trainers.controller.run import train as train
    from .trainers.rows import to_hf_dataset as to_hf_dataset

__version__ = "0.1.0"

_HOME = {
    "agents.text.calls": ("ToolCalls",),
    "agents.roles": ("Boxed", "Choice", "Custom", "FormatError", "Json", "Raw", "Reply", "Role", "Tags"),
    "agents.team": ("Team",),
    "benchmarks.evaluation.evaluate": ("evaluate",),
    "envs.conformance": ("check_env",),
    "envs.core.drivers": ("arollout", "rollout"),
    "envs.core.execution": ("Budget",),
    "envs.graph": ("GraphWorkflow",),
    "envs.faces.bridges": ("AECWorkflow", "single_role"),
    "envs.core.ledger": ("Credit",),
    "envs.registry": ("list_envs", "make", "register", "spec"),
    "envs.core.tasks": ("Task",),
    "envs.tool_loop": ("tool_loop",),
    "envs.tools.tool": ("Infrastructure", "Result", "Tool", "tool"),
    "envs.core.trace": ("Trace",),
    "envs.core.workflow": ("Episode", "Outcome", "ToolError", "Workflow"),
    "trainers.rows": ("to_hf_dataset",),
    "trainers.controller.run": ("train",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'unitymas' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _join_registries() -> None:
    """Load our registry if Gymnasium or PettingZoo is loaded already, so that their `make` knows our names.

    Otherwise they learn our names at the first use of our registry, because importing this package must be fast.
    """
    if "gymnasium" in sys.modules or "pettingzoo" in sys.modules:
        importlib.import_module(".envs.registry", __name__).list_envs()


_join_registries()
