"""Reward rules as wrappers of environments.

    env = TrajectoryReward(unitymas.make("mask-hotpotqa", reward=None), my_score)

A wrapper attaches its rule to the ledger of the base environment, and passes all calls through. So `unwrapped`, forks,
pickles, `rollout` and `train` all use the rule. Two rules with the same component name are an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pettingzoo.utils import BaseWrapper

from ..envs.core.drivers import Environment
from . import rules, shaping

if TYPE_CHECKING:
    from ..envs.faces.aec import WorkflowEnv


class RewardWrapper(BaseWrapper):  # type: ignore[misc]
    """Wrapper that attaches one rule, of any kind, to the environment's ledger."""

    keeps_ledger = True  # rollout and train accept it

    def __init__(self, env: Environment, rule: object) -> None:
        super().__init__(env)
        env.unwrapped.arena.add_rule(rule)
        self.rule = rule

    def fork(self, at: str | None = None, seed: int | None = None) -> WorkflowEnv:
        """Fork the base environment, with the ledger and all its rules."""
        twin: WorkflowEnv = self.env.fork(at, seed)
        return twin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)


def _wrapper(rule: type) -> type[RewardWrapper]:
    def __init__(self: RewardWrapper, env: Environment, *args: object, **kwargs: object) -> None:
        RewardWrapper.__init__(self, env, rule(*args, **kwargs))

    body = {
        "__init__": __init__,
        "__doc__": f"An environment with the rule.\n\n{rule.__doc__}",
        "__module__": __name__,
    }
    return type(rule.__name__, (RewardWrapper,), body)


TrajectoryReward = _wrapper(rules.TrajectoryReward)
RoleReward = _wrapper(rules.RoleReward)
TurnReward = _wrapper(rules.TurnReward)
FormatReward = _wrapper(rules.FormatReward)
TurnDelta = _wrapper(shaping.TurnDelta)
Mixed = _wrapper(shaping.Mixed)
Influence = _wrapper(shaping.Influence)
Propagated = _wrapper(shaping.Propagated)
