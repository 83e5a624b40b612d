"""Wrapper that pays rewards by rules: around an environment, as Gymnasium does it.

    env = RewardWrapper(unitymas.make("mask-hotpotqa", reward=None), TrajectoryReward(my_score), FormatReward(weight=0.1))

A wrapper attaches its rules to the ledger of the base environment, and passes all calls through. So `unwrapped`, forks,
pickles, `rollout` and `train` all use the rules. Two rules with the same component name are an error. The rules are in
`rewards.rules` and `rewards.shaping`. A function `(trace, task)` that returns a number is a rule, too.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

from pettingzoo.utils import BaseWrapper

from ..envs.core.drivers import Environment
from . import rules, shaping

if TYPE_CHECKING:
    from ..envs.faces.aec import WorkflowEnv


class RewardWrapper(BaseWrapper):  # type: ignore[misc]
    """Wrapper that attaches rules, of any kind, to the environment's ledger."""

    keeps_ledger = True  # rollout and train accept it

    def __init__(self, env: Environment, *rules: object) -> None:
        super().__init__(env)
        for rule in rules:
            env.unwrapped.arena.add_rule(rule)

    def fork(self, at: str | None = None, seed: int | None = None) -> WorkflowEnv:
        """Fork the base environment, with the ledger and all its rules."""
        twin: WorkflowEnv = self.env.fork(at, seed)
        return twin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)


_FORMER = {
    **dict.fromkeys(("TrajectoryReward", "RoleReward", "TurnReward", "FormatReward"), rules),
    **dict.fromkeys(("TurnDelta", "Mixed", "Influence", "Propagated"), shaping),
}


def __getattr__(name: str) -> type[RewardWrapper]:
    """Return the former wrapper of one rule: `TurnReward(env, score)` is `RewardWrapper(env, rules.TurnReward(score))`."""
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _FORMER[name].__name__
    warnings.warn(
        f"{__name__}.{name}(env, …) is now RewardWrapper(env, {name}(…)), with {name} of {home}",
        DeprecationWarning,
        stacklevel=2,
    )
    return _former(name)


@cache
def _former(name: str) -> type[RewardWrapper]:
    rule = getattr(_FORMER[name], name)

    def __init__(self: RewardWrapper, env: Environment, *args: object, **kwargs: object) -> None:
        RewardWrapper.__init__(self, env, rule(*args, **kwargs))

    return type(
        name, (RewardWrapper,), {"__init__": __init__, "__doc__": rule.__doc__, "__module__": __name__}
    )
