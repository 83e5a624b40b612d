"""DAPO: GRPO with four changes for long reasoning.

Paper: Yu et al., DAPO, 2503.14476.

    clip-higher        clip_high > clip_low, so that unlikely tokens can still grow
    dynamic sampling   tasks all of whose groups are without variance are drawn anew, up to `resample` rounds
    token-level loss   mean over all tokens of the mini-batch
    overlong shaping   score -= overlong_penalty * (tokens beyond max_tokens - overlong_buffer) / overlong_buffer,
                       at most overlong_penalty: a soft edge instead of a cliff at the token limit

With several agents a task is kept if *any* group that this policy trains on has variance. A task that could not be
replaced in `resample` rounds is left out, and the step is smaller.

How published code deviates: MARTI drops all of an agent's samples when its pass rate is not filled in, and never
looks at the reward range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..config.choices import Amount, Whole
from ..controller.statistics.table import Floats, Ints, Table
from .algorithm import GroupRelative, Plan


@dataclass(frozen=True, kw_only=True)
class DAPO(GroupRelative):
    name = "dapo"

    clip_high: Amount = 0.28
    """Upper clip: how far above its old probability a token is pushed. The paper's value; clip_low stays at
    0.2.
    """
    resample: Whole = 3
    """Rounds of drawing other tasks in place of those that teach nothing. 0: off. Usual 3–10."""
    max_tokens: Whole = 0
    """Token limit of a decision, for overlong shaping. 0: no shaping."""
    overlong_buffer: Whole = 0
    """Tokens before the limit in which the penalty grows from 0 to its full size. Usual: a fifth of
    max_tokens.
    """
    overlong_penalty: Amount = 1.0
    """Size of the full penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens and not 0 < self.overlong_buffer <= self.max_tokens:
            raise ValueError(
                f"dapo: overlong_buffer is {self.overlong_buffer}: with max_tokens={self.max_tokens} it must lie in "
                f"1 … {self.max_tokens}"
            )

    def collect(self, plan: Plan) -> Plan:
        return replace(plan, resample=max(plan.resample, self.resample))

    def useful(self, table: Table, mine: Ints) -> set[tuple[str, str]]:
        still = self.groups(table).still(self.scores(table))
        return {(table.rows[i].env_id, table.rows[i].task) for i in mine[~still[mine]].tolist()}

    def scores(self, table: Table) -> Floats:
        return super().scores(table) - self.overlong(table)

    def overlong(self, table: Table) -> Floats:
        """Penalty of each decision for being close to the token limit."""
        if not self.max_tokens:
            return np.zeros(len(table))
        beyond = table.numbers("n_tokens") - (self.max_tokens - self.overlong_buffer)
        penalty: Floats = self.overlong_penalty * np.clip(beyond / self.overlong_buffer, 0.0, 1.0)
        return penalty
