"""Checks of what shards cannot play. The error names it before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from ....agents.team import is_player
from ....envs.core.arena import Arena
from ....envs.tools.tool import Tool
from ...algorithms.algorithm import Plan
from ...config.reader import ConfigError
from ...config.schema import RunConfig


def check_controllers(config: RunConfig, seats_by_name: bool, plan: Plan, arenas: Sequence[Arena]) -> None:
    """Refuse a run whose episodes several controllers cannot play. `seats_by_name` is the flag of its recipe."""
    if config.controllers == 1:
        return
    where = f"controllers={config.controllers}"
    if plan.tree is not None:
        raise ConfigError(
            f"{where}: trees choose by what the one table says, and are grown by one controller; set controllers=1"
        )
    if not seats_by_name:
        raise ConfigError(
            f"{where}: recipe {config.recipe!r} seats players of its own, which other controllers cannot seat by name; set "
            "controllers=1"
        )
    for seat, player in config.map.items():
        if player not in config.policies and (player == "human" or not is_player(player)):
            raise ConfigError(
                f"{where}: map.{seat}: {player!r} is one for the whole run, and each controller would have one of its own, with "
                "its own limits and budget; make it a policy (frozen: true), or set controllers=1"
            )
    for name, tool in config.env.tools.items():
        if holds_state(tool):
            raise ConfigError(
                f"{where}: env.tools.{name}: {tool!r:.60} may hold state, and each controller would have a copy of it; give a "
                "function of a module, or a session (kind='session'), or set controllers=1"
            )
    if config.runtime == "ray":
        for arena in arenas:
            packed(arena)


def holds_state(tool: object) -> bool:
    """Tell whether a user's tool may hold state between calls: an object, a bound method, a nested function."""
    if isinstance(tool, Tool):
        return tool.kind != "session" and holds_state(tool.fn)
    return not isinstance(tool, str) and not (inspect.isfunction(tool) and tool.__closure__ is None)


def packed(arena: Arena) -> bytes:
    """Pack an environment for another process. The error names the part that cannot be packed."""
    from ray import cloudpickle

    try:
        whole: bytes = cloudpickle.dumps(arena)
        return whole
    except Exception as error:
        obstacle = next((name for name, part in parts(arena) if not travels(part)), "one of its parts")
        raise ConfigError(
            f"controllers: {arena.env_id} cannot be sent to another process, because of {obstacle}: {error}; name it by an entry "
            "point (module:name), or set controllers=1"
        ) from error


def parts(arena: Arena) -> Iterator[tuple[str, object]]:
    """Return the parts of an environment by name."""
    yield from ((f"tool {name!r}", tool) for name, tool in arena.toolbox.tools.items())
    yield from ((f"reward rule {type(rule).__name__}", rule) for rule in arena.rules)
    yield from (("its workflow", arena.workflow), ("its tasks", arena.data), ("its expert", arena.expert))


def travels(part: object) -> bool:
    """Tell whether a part can be packed."""
    from ray import cloudpickle

    try:
        cloudpickle.dumps(part)
    except Exception:
        return False
    return True
