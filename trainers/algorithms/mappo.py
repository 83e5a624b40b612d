"""MAPPO: PPO whose critic sees the whole trace.

Paper: Yu et al., The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games, 2103.01955.

    V_i = V(everything said and returned so far by everyone, and the tokens of this act up to i)

The actors stay decentralised: each sees its own prompt. The critic is only used in training. It sees the trace up to
the act (rendered by the group: `needs.values == "trace"`), and then the act's tokens. So it can tell a good act in a
lost episode from a bad act in a won one.

A critic that sees the actor's own prompt is PPO with a shared critic (IPPO), under whatever name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .algorithm import Needs
from .ppo import PPO


@dataclass(frozen=True, kw_only=True)
class MAPPO(PPO):
    name = "mappo"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, values="trace")
