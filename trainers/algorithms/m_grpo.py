"""M-GRPO: a main agent, and sub-agents that it calls a varying number of times.

Paper: Hong et al., Multi-Agent Deep Research: Training Multi-Agent Systems with M-GRPO, 2511.13288.

    a sample is one *invocation*: a chain, or with `unit: decision, score: act` every single act, for agents that
    start afresh at each call; its score is all that it earned
    A = (score - mean) / (std + eps)         per (task, agent), so main and sub-agents are normalised apart
    every rollout counts the same for an agent, however often that agent was called in it

The paper aligns rollouts by drawing a fixed number of invocations from each, with repetition if there are too few.
Here each invocation has the weight (mean number of calls) / (number of calls in its rollout), in the statistics and
in the loss. This is the expectation of that drawing, with nothing dropped or repeated. As in the paper, a rollout
that never called an agent has no effect on it.

The authors' code was not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..controller.statistics.comparison import Groups, ScoreKind
from ..controller.statistics.table import Floats, Ints, Signal, Table, total
from .algorithm import AlgorithmState, GroupRelative, Unit


@dataclass(frozen=True, kw_only=True)
class MGRPO(GroupRelative):
    name = "m_grpo"

    score: ScoreKind = "chain"
    """Score of an invocation: all that it earned."""
    unit: Unit = "chain"
    """Unit of an invocation. It is not split over mini-batches."""

    def groups(self, table: Table) -> Groups:
        """Groups by (task, agent). Each trajectory counts once, and the invocations within a trajectory share
        its weight equally.
        """
        plain = super().groups(table)
        per_act, calls = invocations(table, plain.sample, self.unit)
        return replace(plain, share=per_act / calls)

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        within, x = self.groups(table), self.scores(table)
        calls = invocations(table, within.sample, self.unit)[1]
        weight = within.mean(calls)[within.code] / calls
        return self.compared(table, mine, self.compare(within, x), within.still(x), weight)


def invocations(table: Table, sample: Ints, unit: Unit) -> tuple[Floats, Floats]:
    """Compute for each row 1 / (acts in its invocation), and the number of invocations in its sample."""
    if unit == "decision":
        per_act = np.ones(len(table))
    else:
        chain = table.codes("chain")
        per_act = 1.0 / np.bincount(chain)[chain]
    return per_act, total(sample, per_act)
