"""From a run's config to its model groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...agents.hints import nearest
from ...envs.core.arena import Arena
from .group_settings import GroupSpec, PolicySpec
from .schema import ConfigError, RunConfig


def group_specs(
    config: RunConfig, policies: Mapping[str, dict[str, PolicySpec]], folder: Path
) -> dict[str, GroupSpec]:
    """What each group holds, and how it is served; `folder` takes batches of failed updates."""
    return {
        name: GroupSpec(
            name=name,
            model=group.model,
            policies=policies[name],
            slots=group.slots,
            context=group.context,
            precision=group.precision,
            device=group.device,
            gpus=group.gpus if group.gpus is not None else float(group.device.startswith("cuda")),
            engine=group.engine,
            engine_options=group.engine_options,
            deterministic=config.deterministic,
            seed=config.seed,
            threads=group.threads or (1 if config.deterministic else 0),
            folder=str(folder),
        )
        for name, group in config.groups.items()
    }


def described(
    config: RunConfig, directory: Path, arena: Arena, home: Mapping[str, str], sizes: Mapping[str, int]
) -> str:
    """What begins: where it is written, on what tasks, with which models and how many parameters."""
    step = f"{config.tasks_per_step} tasks × {config.k} samples"
    lines = [
        f"run directory  {directory}",
        f"{arena.env_id}  {len(arena.task_ids):,} tasks of {arena.data.name}",
        f"steps  {config.steps} of {step}; recipe {config.recipe}; {config.runtime}",
    ]
    for name, group in config.groups.items():
        own = [f"{p} {sizes[p] / 1e6:,.1f}M" for p, where in home.items() if where == name]
        lines.append(f"group {name}  {group.model} on {group.device}: {', '.join(own)}")
    return "\n".join(lines)


def check_roles(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """What is told by role names roles that are there."""
    for role in given:
        if role not in known:
            raise ConfigError(f"{where}.{role}: no role is called {role!r}; {nearest(role, known)}")
