"""Several environments in one run: every step plays tasks of each, and all of them are one update.

    unitymas train mask-nq --preset shared recipe=several recipe_args.beside='[{id: math-deepscaler, data: mini}]' \\
        policies.team.algorithm.name=grpo policies.team.algorithm.task_wise=true

Tasks of different environments are never compared with each other; `task_wise` besides whitens the advantages of each,
so that none sets the scale for the others (AgentRL, 2510.04206). A role of an environment beside the run's own is
played by whom the map names for that role, else for "*". Validation is of the run's own environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...envs.core.arena import Arena
from ...envs.registry import make_arena
from ..config.choices import Whole
from ..controller.collect import Collector, Cursor, Harvest
from ..controller.step import Default

if TYPE_CHECKING:
    from ..controller.run import Run


@dataclass
class Several(Default):
    beside: tuple[Mapping[str, Any], ...]
    """The other environments: arguments of `make`, `id` among them. `split` is the run's own unless given."""
    tasks: Whole = 0
    """Tasks a step of each of them. 0: as many as of the run's own."""

    def __post_init__(self) -> None:
        if not self.beside:
            raise ValueError("recipe_args.beside: name at least one environment, as [{id: …}]")
