"""From a run's config to its model groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..hints import nearest
from .config import ConfigError, RunConfig
from .settings import GroupSpec, PolicySpec


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


def check_roles(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """What is told by role names roles that are there."""
    for role in given:
        if role not in known:
            raise ConfigError(f"{where}.{role}: no role is called {role!r}; {nearest(role, known)}")
