"""PPO with a critic: the reference algorithm of unitymas.

Paper: Schulman et al., Proximal Policy Optimization Algorithms, 1707.06347; GAE 1506.02438; dual clip 1912.09729.

    ratio_i = exp(logp_i - proximal_i)
    A_i     = GAE(gamma, lam) over the tokens of a chain; a decision's reward lies on its last token
    policy  = mean_i max(-A_i ratio_i, -A_i clip(ratio_i, 1 - clip_low, 1 + clip_high))
    value   = 1/2 mean_i max((V_i - R_i)^2, (clip(V_i, V_old,i ± value_clip) - R_i)^2)       R_i = A_i + V_old,i

A *chain* is one agent in one invocation. So what an agent's later acts earn reaches its earlier acts, and tokens of
other agents never count as steps of this one. gae.py shows how chains that lie in several decisions (and groups) are
computed exactly.

How published code deviates: UnityMAS-O ends every act with done=True (`horizon="act"` here) and whitens over all
roles of a model together (`whiten="policy"`), so that the role with the largest rewards sets the scale for the rest.
Most code averages the loss per micro-batch; here denominators are global.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..config.choices import Amount, Positive, Share
from ..controller.statistics import gae
from ..controller.statistics.table import Floats, Ints, Signal, Table
from .algorithm import AlgorithmState, Metrics, Needs, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.learning.batch import Batch


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    name = "ppo"

    gamma: Share = 1.0
    """Discount per step (a token, or an act with level="turn"). Usual: 1 for text, 0.95–0.99 for turns."""
    lam: Share = 1.0
    """Trade-off of GAE: 1 trusts the rewards (no bias), less trusts the critic (less noise). Usual 0.95–1."""
    level: Literal["token", "turn"] = "token"
    """Step of GAE: a token, or an act with one advantage for all its tokens."""
    horizon: gae.Horizon = "chain"
    """Reach of rewards. "act" ends every act as if it were the agent's last: later rewards never reach it."""
    whiten: Literal["role", "agent", "policy", "none"] = "role"
    """Set of tokens within which advantages get mean 0 and deviation 1."""
    whiten_floor: Positive = 0.1
    """Smallest deviation to divide by. It keeps noise small for a role that has nothing left to learn."""
    kl_reward: Amount = 0.0
    """Penalty on each token for leaving the reference (k1), as part of its reward. Usual 0–0.01."""
    value_clip: Positive | None = 0.2
    """Distance that the critic's value may move from its old one before it is clipped. Usual 0.2–0.5; null:
    off.
    """
    value_coefficient: Amount = 0.5
    """Weight of the critic's loss where actor and critic share parameters (`loss`)."""

    @property
    def needs(self) -> Needs:
        own = super().needs
        return replace(
            own,
            values="prompt",
            gamma=self.gamma,
            lam=self.lam,
            kl_reward=self.kl_reward,
            reference=own.reference or self.kl_reward > 0,
        )

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        if self.level == "turn":
            advantage, target = gae.turn_level(table, mine, self.gamma, self.lam, self.horizon)
            shift, scale = self.whitening(table, mine, gae.flat_moments(table, advantage))
            return self.signals(table, mine, advantage=advantage, target=target, shift=shift, scale=scale)
        tail = gae.tails(table, mine, self.gamma, self.lam, self.horizon)
        shift, scale = self.whitening(table, mine, gae.moments(table, mine, tail, self.gamma * self.lam))
        return self.signals(table, mine, tail=tail, shift=shift, scale=scale)

    def whitening(self, table: Table, mine: Ints, of: gae.Moments) -> tuple[Floats | None, Floats | None]:
        if self.whiten == "none":
            return None, None
        return gae.whiten(table, mine, of, self.whiten, self.whiten_floor)

    def loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """Loss of the policy. Where the batch holds values of the same parameters, the critic's loss is
        added.
        """
        loss, metrics = super().loss(batch, denominators)
        if batch.values is not None:
            value_loss, value_metrics = self.critic_loss(batch, denominators)
            loss, metrics = loss + self.value_coefficient * value_loss, {**metrics, **value_metrics}
        return loss, metrics

    def critic_loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """Loss of a critic with parameters and an optimizer of its own."""
        from ..group.learning import losses

        if batch.values is None or batch.returns is None or batch.old_values is None:
            raise ValueError(f"{self.name}: a critic's batch needs values, old_values and returns")
        per_token = losses.value_loss(batch.values, batch.returns, batch.old_values, self.value_clip)
        loss = losses.aggregate(per_token, batch, self.aggregation, denominators, self.length)
        return loss, {"value_loss": loss.detach()}
