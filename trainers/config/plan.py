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
    places = placed(config)
    return {
        name: GroupSpec(
            name=name,
            model=group.model,
            policies=policies[name],
            slots=group.slots,
            context=group.context,
            precision=group.precision,
            device=places[name][0],
            gpus=group.gpus if group.gpus is not None else places[name][1],
            engine=group.engine,
            engine_options=group.engine_options,
            deterministic=config.deterministic,
            seed=config.seed,
            threads=group.threads or (1 if config.deterministic else 0),
            folder=str(folder),
        )
        for name, group in config.groups.items()
    }


def placed(config: RunConfig) -> dict[str, tuple[str, float]]:
    """Each group's device, and its share of GPUs; auto takes the GPUs of this machine in turn."""
    import torch

    free = [
        name for name, group in config.groups.items() if group.device == "auto" and group.engine == "torch"
    ]
    there = torch.cuda.device_count() if free else 0
    found: dict[str, tuple[str, float]] = {}
    for name, group in config.groups.items():
        if group.device != "auto":
            found[name] = group.device, float(group.device.startswith("cuda"))
        elif name not in free or not there:
            found[name] = "cpu", 0.0
        elif config.runtime == "ray":  # an actor sees its own GPUs only
            found[name] = "cuda", min(1.0, there / len(free))
        else:
            found[name] = f"cuda:{free.index(name) % there}", 1.0
    return found


def described(
    config: RunConfig, directory: Path, arena: Arena, home: Mapping[str, str], sizes: Mapping[str, int],
    specs: Mapping[str, GroupSpec],
) -> str:  # fmt: skip
    """What begins: where it is written, on what tasks, with which models and how many parameters."""
    step = f"{config.tasks_per_step} tasks × {config.k} samples"
    lines = [
        f"run directory  {directory}",
        f"{arena.env_id}  {len(arena.task_ids):,} tasks of {arena.data.name}",
        f"steps  {config.steps} of {step}; recipe {config.recipe}; {config.runtime}",
    ]
    for name, group in config.groups.items():
        own = [f"{p} {sizes[p] / 1e6:,.1f}M" for p, where in home.items() if where == name]
        chosen = f" ({group.device})" if group.device == "auto" else ""
        lines.append(f"group {name}  {group.model} on {specs[name].device}{chosen}: {', '.join(own)}")
    return "\n".join(lines)


def check_roles(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """What is told by role names roles that are there."""
    for role in given:
        check_role(f"{where}.{role}", role, known)


def check_role(where: str, role: str, known: Sequence[str]) -> None:
    """A role that a setting names is there."""
    if role not in known:
        raise ConfigError(f"{where}: no role is called {role!r}; {nearest(role, known)}")
