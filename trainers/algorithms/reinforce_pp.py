"""REINFORCE++: no critic; a penalty per token, and one whitening over the whole batch.

Paper: Hu et al., REINFORCE++, 2501.03262.

    A_i = score - c * sum over tokens j >= i of (proximal_j - reference_j),     then whitened over all tokens

With `baseline` the mean score of the (task, agent) group is subtracted first (REINFORCE++-baseline). Samples without
others in their group then get 0 (plus their own penalty) and stay out of the whitening.

One whitening over everything is the paper's statistic and the default (`whiten="policy"`). Where a policy plays
several roles, the one with the largest rewards then sets the scale for all; `whiten="role"` avoids this.

How published code deviates: in MARTI the groups of the baseline come from reshaping a list of calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..config.choices import Amount, Positive
from ..controller.statistics import gae
from ..controller.statistics.table import Ints, Signal, Table
from .algorithm import AlgorithmState, GroupRelative, Needs


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(GroupRelative):
    name = "reinforce_pp"

    baseline: bool = False
    """Subtract the group's mean score first. Needs k >= 2."""
    kl_reward: Amount = 0.0
    """Penalty on each token for leaving the reference (k1), as part of its reward. Usual 0–0.01."""
    whiten: Literal["policy", "role", "agent"] = "policy"
    """Set of tokens within which advantages get mean 0 and deviation 1."""
    whiten_floor: Positive = 1e-6
    """Smallest deviation to divide by."""
    std: bool = False

    @property
    def needs(self) -> Needs:
        own = super().needs
        return replace(
            own,
            k=own.k if self.baseline else 1,
            kl_reward=self.kl_reward,
            reference=own.reference or self.kl_reward > 0,
        )

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        within, score, live = self.groups(table), self.scores(table), mine
        if self.baseline:
            live = mine[~within.still(score)[mine]]
            score = self.compare(within, score)
        columns = {"advantage": score}
        of = gae.flat_moments(table, score)
        if self.kl_reward:
            # a summary without a critic holds the penalties alone, so the score is the decision's tail
            columns = {"tail": score}
            of = gae.moments(table, mine, score, 1.0)
        shift, scale = gae.whiten(table, live, of, self.whiten, self.whiten_floor)
        return self.signals(table, mine, shift=shift, scale=scale, **columns)
