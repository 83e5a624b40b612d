"""Checks of what cannot overlap. The error names it before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....agents.team import is_player
from ...algorithms.algorithm import Plan
from ...config.reader import ConfigError
from ...config.schema import RunConfig

if TYPE_CHECKING:
    from ..step import Default


def check_overlap(config: RunConfig, recipe: Default, plan: Plan) -> None:
    """Refuse a run whose episodes cannot be played during its updates."""
    if config.overlap == "off":
        return
    if not vars(type(recipe)).get("overlaps", False):
        raise ConfigError(
            f"overlap={config.overlap}: recipe {config.recipe!r} may change who plays or learns from step to step, so episodes "
            "cannot begin before their step does; set overlap=off"
        )
    if plan.tree is not None:
        raise ConfigError(
            f"overlap={config.overlap}: trees choose by what was learned so far, and are synchronous; set overlap=off"
        )
    if plan.resample:
        raise ConfigError(
            f"overlap={config.overlap}: drawing other tasks in place of those that teach nothing is synchronous; set "
            "policies.*.algorithm.resample=0, or overlap=off"
        )
    if config.counterfactual:
        raise ConfigError(
            f"overlap={config.overlap}: counterfactual asks again with weights that may have changed; leave one of the two out"
        )
    for name, group in config.groups.items():
        if group.engine_options.get("enable_sleep_mode"):
            raise ConfigError(
                f"overlap={config.overlap}: groups.{name}.engine_options.enable_sleep_mode gives the engine's memory to the "
                "learner, and here both work at once; leave one of the two out"
            )


def check_replay(config: RunConfig) -> None:
    """Refuse to replay a run whose log does not determine the replies."""
    if config.overlap == "off":
        raise ConfigError(
            "--replay: the run was synchronous (overlap=off); the same config and seed give it again"
        )
    if not config.deterministic:
        raise ConfigError(
            "--replay: the run was not deterministic, so equal bits cannot be had; record runs with deterministic=true"
        )
    for name, group in config.groups.items():
        if group.engine != "torch":
            raise ConfigError(
                f"--replay: groups.{name}.engine is {group.engine!r}, and only torch draws the same bits again"
            )
    for seat, player in unsettled(config).items():
        raise ConfigError(
            f"--replay: map.{seat}: {player!r} may answer otherwise than in the run; only policies are replayed"
        )


def unsettled(config: RunConfig) -> Mapping[str, str]:
    """Return fixed players whose replies no log determines: models elsewhere, people."""
    return {
        seat: player
        for seat, player in config.map.items()
        if player not in config.policies and (player == "human" or not is_player(player))
    }
