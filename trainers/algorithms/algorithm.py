"""The contract of an algorithm, and two classes that most algorithms share.

    Algorithm        the contract: needs, collect, advantages, denominators, loss. It is a frozen dataclass: its fields
                     are its config, and the text under a field is that field's documentation.
    PolicyGradient   + the clipped surrogate loss with KL, entropy and off-policy correction
    GroupRelative    + advantages by comparison within groups of samples (GRPO and its relatives)

Advantages are computed in the controller, from the thin table. Losses are computed where the tensors are. Nothing here
loads torch before `loss` is called.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from ...agents.basics.hints import nearest
from ...agents.basics.renamed import renamed
from ..config.choices import (
    AboveOne,
    Aggregation,
    Amount,
    Estimator,
    Importance,
    Positive,
    Share,
    check_ranges,
)
from ..controller.statistics import gae
from ..controller.statistics.comparison import (
    GROUPS,
    Groups,
    ScoreKind,
    partition,
    report,
    scores,
    zero_shares,
)
from ..controller.statistics.table import Bools, Floats, Ints, Signal, Table, make_signals

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.learning.batch import Batch, Thin

Metrics = dict[str, "Tensor"]
Unit = Literal["decision", "chain", "episode"]


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of an algorithm. The trainer checks them against the run's config before anything starts."""

    k: int = 1
    """Fewest trajectories per task."""
    values: Literal["", "prompt", "trace"] = ""
    """Critic of the algorithm. "prompt": it sees what the actor sees. "trace": it sees the whole trace so
    far.
    """
    gamma: float = 1.0
    """Discount with which the value summaries are computed, together with `lam`."""
    lam: float = 1.0
    kl_reward: float = 0.0
    """Coefficient of the per-token penalty -c * (proximal - reference) in the value summaries. Without a
    critic the summaries hold this penalty alone, with all values 0.
    """
    reference: bool = False
    """Need of log-probs under a frozen reference."""
    entropy: bool = False
    """Need of the batch's entropy, with its gradient."""
    tree: int = 0
    """Number of candidates drawn from the same state at every act; 0: no tree."""
    anchors: bool = False
    """Need of an environment that names its states (`Decision.anchor`)."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Need of these roles, by the key that names each."""

    @property
    def summaries(self) -> bool:
        """Tell whether every trained decision must come with a `ValueSummary`."""
        return bool(self.values) or self.kl_reward != 0.0

    def unmet(self, name: str, *, k: int, critic: bool, reference: bool, forks: bool = True) -> list[str]:
        """Return a sentence for each need that the run as configured does not meet."""
        wrong = []
        if k < self.k and not self.tree:
            wrong.append(f"{name} compares trajectories of one task: it needs k >= {self.k}, and k is {k}")
        if self.values and not critic:
            wrong.append(f"{name} needs a critic, and no critic is configured for the policy")
        if (self.reference or self.kl_reward) and not reference:
            wrong.append(
                f"{name} penalises divergence from a reference, and the policy has none: set reference"
            )
        if self.tree and not forks:
            wrong.append(f"{name} samples trees, and the environment cannot fork")
        return wrong


@dataclass(frozen=True, slots=True)
class Tree:
    """Tree sampling: several candidates at every act, from the same state. The episode continues with one of them, or
    with all.
    """

    width: int
    score: Literal["step", "rollout", "value"] = "step"
    continuation: Literal["greedy", "softmax", "random", "all"] = "greedy"


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of how a step's samples are drawn."""

    k: int = 1
    """Number of trajectories per task."""
    tree: Tree | None = None
    resample: int = 0
    """Largest number of rounds in which new tasks replace those that `Algorithm.useful` leaves out."""


AlgorithmState: TypeAlias = MutableMapping[str, Any]
"""State of an algorithm, kept from step to step and in checkpoints."""
__getattr__ = renamed(__name__, {"State": "AlgorithmState"})


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """The contract. There is one object per policy. Its fields are its config, and never change during a run."""

    name: ClassVar[str] = ""

    unit: Unit = "decision"
    """Unit that is never split over mini-batches, and over which `unit-mean` averages."""
    role_weights: Mapping[str, float] = field(default_factory=dict)
    """Factors on the loss by role, where one policy plays several roles. Usual: none, so that all count 1."""
    mask_errors: str = ""
    """Name of a reward component. An act is left out of the loss if its amount there is negative and a later
    act of its chain has an amount that is not: a recovered trajectory should not teach the error that it
    recovered from (partial masking, as STeP, 2505.20023, does it in fine-tuning). Empty: off.
    """

    def __post_init__(self) -> None:
        check_ranges(self, f"{self.name}: ")
        for role, weight in self.role_weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
                raise ValueError(f"{self.name}: role_weights.{role} is {weight!r}: expected a number from 0")

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def skips_still(self) -> bool:
        """Tell whether a decision whose advantage is 0 has no gradient, so that its forward pass can be saved."""
        return False

    def collect(self, plan: Plan) -> Plan:
        """Change how samples are drawn."""
        return plan

    def useful(self, table: Table, mine: Ints) -> set[tuple[str, str]]:
        """Return the (env_id, task) pairs worth training on. `Plan.resample` rounds draw other tasks for the
        rest.
        """
        return {(row.env_id, row.task) for row in table.rows}

    @abstractmethod
    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        """Return one signal for each row of `mine`. `table` holds the rows of every policy; checkpoints keep
        `state`.
        """

    def metrics(self, table: Table, mine: Ints, signals: list[Signal]) -> dict[str, float]:
        """Return what to log about the step's advantages."""
        shares = zero_shares(table, signals)
        return {f"zero_advantages/{role}": share for role, share in shares.items()}

    def denominators(self, thin: Iterable[Thin]) -> dict[str, float]:
        """Compute the denominators of one whole mini-batch, so that the loss does not depend on how it is cut
        into micro-batches.
        """
        from ..group.learning.batch import count

        return count(thin)

    @abstractmethod
    def loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the mini-batch's loss, and of its metrics."""

    def signals(
        self, table: Table, mine: Ints, weight: Floats | None = None, **columns: Floats | None
    ) -> list[Signal]:
        """Make signals from columns over the whole table, with this config's weights, masks and units."""
        weight = np.ones(len(table)) if weight is None else weight
        if self.role_weights:
            weight = weight * np.array([self.role_weights.get(row.role, 1.0) for row in table.rows])
        if self.mask_errors:
            weight = np.where(recovered(table, self.mask_errors), 0.0, weight)
        unit = None
        if self.unit != "decision":
            unit = [f"{row.env_id}/{row.task}/{getattr(row, self.unit)}" for row in table.rows]
        return make_signals(table, mine, weight=weight, unit=unit, **columns)


def recovered(table: Table, component: str) -> Bools:
    """Mark acts with a negative amount of `component` that were followed in their chain by one without."""
    wrong = (table.component(component) < 0).tolist()
    right_later = [False] * len(table)
    following = table.following.tolist()
    for row in table.backwards:
        after = following[row]
        if after >= 0:
            right_later[row] = right_later[after] or not wrong[after]
    return np.array([w and r for w, r in zip(wrong, right_later, strict=True)], np.bool_)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Algorithm):
    """The clipped surrogate loss of PPO, which nearly all algorithms here use."""

    clip_low: Share = 0.2
    """Lower clip: a token whose probability is below (1 - this) of its old one is pushed down no further.
    Usual 0.1–0.3.
    """
    clip_high: Amount = 0.2
    """Upper clip: a token whose probability is above (1 + this) of its old one is pushed up no further.
    Greater than clip_low keeps exploration alive. Usual 0.2–0.3.
    """
    dual_clip: AboveOne | None = 3.0
    """Bound on the loss of a token with negative advantage whose ratio exploded. Greater than 1; null: off."""
    importance: Importance = "truncate"
    """Correction of samples drawn by an older version, or by an engine whose numbers differ."""
    importance_cap: Positive = 2.0
    """Largest correction. Usual 2–5."""
    importance_floor: Share = 0.5
    """Smallest correction with `mask` and `sequence-mask`; what lies below does not count. Usual 0.2–0.5."""
    geometric: tuple[Positive, Positive] | None = None
    """Bounds of the geometric mean of a decision's ratios proximal / behaviour. A decision outside of them does not
    count. Usual [0.99, 1.01] for long replies; null: off.
    """
    veto: Share = 0.0
    """Ratio below which one token takes its whole decision out of the loss. Usual 1e-4; 0: off."""
    kl_loss: Amount = 0.0
    """Coefficient of the divergence from the reference, in the loss. Usual 0–0.01; 0 needs no reference."""
    kl_estimator: Estimator = "k3"
    """Estimator of the divergence that is shown and added. Its gradient is that of the divergence (see
    losses.kl_loss).
    """
    kl_own_gradient: bool = False
    """Differentiate the estimator itself instead, as most published code does."""
    entropy: Amount = 0.0
    """Coefficient of the entropy, which rewards uncertain choices. Usual 0–0.01."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of tokens into one number (see losses.aggregate). With token-mean, long replies weigh more.
    """
    length: Positive = 1.0
    """Constant that replaces a reply's length in `sequence-sum`. Usual: the token limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = {
            "geometric": self.geometric,
            "importance_floor": (self.importance_floor, self.importance_cap),
        }
        for name, pair in bounds.items():
            if pair is not None and not (len(pair) == 2 and pair[0] <= pair[1]):
                raise ValueError(f"{self.name}: {name}: {pair}: expected two bounds, the lower one first")

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_loss > 0, entropy=self.entropy > 0)

    @property
    def skips_still(self) -> bool:
        plain = type(self).loss is PolicyGradient.loss  # a loss of one's own may have terms of its own
        return plain and not self.kl_loss and not self.entropy

    def log_ratio(self, batch: Batch) -> Tensor:
        """Log-ratio (T,) that is clipped: current over start of the update, per token."""
        from ..group.learning import losses

        return losses.log_ratio(batch.logp, batch.proximal)

    def loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        from ..group.learning import losses

        per_token, silenced = losses.clipped_policy_loss(
            self.log_ratio(batch), batch.advantage, self.clip_low, self.clip_high, self.dual_clip
        )
        correction = losses.importance(batch, self.importance, self.importance_cap, self.importance_floor)
        metrics = losses.ratio_metrics(batch, denominators)
        if self.geometric is not None or self.veto:
            counts = losses.accepted(batch, self.geometric, self.veto)
            correction = correction * counts
            metrics["rejected"] = losses.token_mean((~counts).to(per_token.dtype), denominators)
        per_token = per_token * correction
        metrics["clipped"] = losses.token_mean(silenced.to(per_token.dtype), denominators)
        if self.entropy:
            per_token = per_token - self.entropy * _given(batch.entropy, self.name, "entropy")
        if self.kl_loss:
            reference = _given(batch.reference, self.name, "reference log-probs")
            kl = losses.kl_loss(batch.logp, reference, self.kl_estimator, self.kl_own_gradient)
            per_token = per_token + self.kl_loss * kl
            metrics["kl"] = losses.token_mean(kl, denominators)
        loss = losses.aggregate(per_token, batch, self.aggregation, denominators, self.length)
        metrics["policy_loss"] = loss.detach()
        return loss, metrics


def _given(tensor: Tensor | None, name: str, what: str) -> Tensor:
    if tensor is None:
        raise ValueError(
            f"{name} is configured to use the {what}, but the batch has none: the group did not fill in what `needs` asks for"
        )
    return tensor


@dataclass(frozen=True, kw_only=True)
class GroupRelative(PolicyGradient):
    """Advantages by comparison: how far a sample's score differs from the other scores of its group."""

    group: str = "agent"
    """Group whose samples are compared: a name of comparison.GROUPS. "agent": the same agent on the same
    task. Narrower groups (agent-turn, prompt, siblings) mean less noise. Without trees most of them hold one
    sample, which teaches nothing.
    """
    each: Literal["", "trajectory", "call"] = ""
    """Unit that counts once in a group's statistics: a trajectory, however many acts it has, or every call."""
    score: ScoreKind = "return"
    """Score that is compared: act, return, chain, mean, agent, episode (see comparison.scores)."""
    gamma: Share = 1.0
    """Discount per act of `score="return"`. Usual 0.95–1."""
    std: bool = True
    """Divide by the group's deviation. This puts roles and tasks on one scale, and gives more weight to tasks
    that are nearly always or nearly never solved.
    """
    eps: Amount = 1e-6
    """Constant added to the deviation."""
    task_wise: bool = False
    """Whiten the advantages of each environment over all its tokens, where a run has several, so that none
    sets the scale for the others (AgentRL, 2510.04206). Rows without comparison stay at 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in GROUPS:
            raise ValueError(f"{self.name}: unknown group {self.group!r}: {nearest(self.group, GROUPS)}")

    @property
    def needs(self) -> Needs:
        tree_groups = self.group in ("prompt", "siblings")
        own = super().needs
        return replace(
            own, k=1 if tree_groups or self.group == "global" else 2, anchors=self.group == "anchor"
        )

    def groups(self, table: Table) -> Groups:
        return partition(table, self.group, self.each)

    def scores(self, table: Table) -> Floats:
        return scores(table, self.score, self.gamma)

    def compare(self, within: Groups, x: Floats) -> Floats:
        """Turn scores into advantages, over the whole table."""
        return within.relative(x, std=self.std, eps=self.eps)

    def advantages(self, table: Table, mine: Ints, state: AlgorithmState) -> list[Signal]:
        within, x = self.groups(table), self.scores(table)
        return self.compared(table, mine, self.compare(within, x), within.still(x))

    def compared(
        self, table: Table, mine: Ints, advantage: Floats, still: Bools, weight: Floats | None = None
    ) -> list[Signal]:
        """Make signals of advantages that are the same for all tokens of a decision. Rows in `still` get no
        signal to learn from.
        """
        columns: dict[str, Floats] = {"advantage": advantage}
        if self.task_wise:
            live = mine[~still[mine]]
            of = gae.flat_moments(table, advantage)
            columns["shift"], columns["scale"] = gae.whiten(table, live, of, per="env_id", floor=self.eps)
        return self.signals(table, mine, weight, **columns)

    def metrics(self, table: Table, mine: Ints, signals: list[Signal]) -> dict[str, float]:
        comparison = report(table, mine, self.groups(table), self.scores(table))
        return {**comparison, **super().metrics(table, mine, signals)}
