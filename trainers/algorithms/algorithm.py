"""What an algorithm is, and the two things that most of them share.

    Algorithm        the contract: needs, collect, advantages, denominators, loss. A frozen dataclass: its fields
                     are its config, and what stands under a field is that field's documentation.
    PolicyGradient   + the clipped surrogate loss with KL, entropy and off-policy correction
    GroupRelative    + advantages by comparison within groups of samples (GRPO and its relatives)

Advantages are computed in the controller from the thin table; losses where the tensors are. Nothing here loads
torch before `loss` is called.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...agents.hints import nearest
from ..config.choices import POSITIVE, SHARE, Aggregation, Estimator, Importance, Range, check_ranges
from ..controller.statistics import gae
from ..controller.statistics.comparison import GROUPS, Groups, Score, partition, report, scores, zero_shares
from ..controller.statistics.table import Bools, Floats, Ints, Signal, Table, make_signals

if TYPE_CHECKING:
    from torch import Tensor

    from ..group.batch import Batch, Thin

RANGES: dict[str, Range] = {
    "gamma": SHARE,
    "lam": SHARE,
    "clip_low": SHARE,  # 1 - clip_low is the smallest ratio
    "clip_high": Range(),
    "dual_clip": Range(1.0, above=True),
    "importance_cap": POSITIVE,
    "kl_loss": Range(),
    "kl_reward": Range(),
    "entropy": Range(),
    "length": POSITIVE,
    "eps": Range(),
    "whiten_floor": POSITIVE,
    "value_clip": POSITIVE,
    "value_coefficient": Range(),
    "step_weight": Range(),
    "tree": Range(),
    "resample": Range(),
    "max_tokens": Range(),
    "overlong_buffer": Range(),
    "overlong_penalty": Range(),
}
"""What fits a field, by its name, in whichever algorithm it stands. Any other number must be finite."""

Metrics = dict[str, "Tensor"]
Unit = Literal["decision", "chain", "episode"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be there before anything starts. The trainer checks it against the run's config."""

    k: int = 1
    """Fewest trajectories per task."""
    values: Literal["", "prompt", "trace"] = ""
    """"prompt": a critic that sees what the actor sees. "trace": one that sees the whole trace so far."""
    gamma: float = 1.0
    """With `lam`: what the value summaries are computed with."""
    lam: float = 1.0
    kl_reward: float = 0.0
    """Coefficient of the per-token penalty -c * (proximal - reference) in the value summaries. Without a critic
    the summaries are made of this penalty alone, with all values 0."""
    reference: bool = False
    """Log-probs under a frozen reference."""
    entropy: bool = False
    """The batch's entropy, with its gradient."""
    tree: int = 0
    """Candidates drawn from the same state at every act; 0: none."""
    anchors: bool = False
    """The environment must name its states (`Decision.anchor`)."""

    @property
    def summaries(self) -> bool:
        """Whether every trained decision must come with a `ValueSummary`."""
        return bool(self.values) or self.kl_reward != 0.0

    def unmet(self, name: str, *, k: int, critic: bool, reference: bool, forks: bool = True) -> list[str]:
        """A sentence for each need that the run as configured does not meet."""
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
    """K candidates at every act, from the same state; the episode goes on with one of them (or all)."""

    width: int
    score: Literal["step", "rollout", "value"] = "step"
    continuation: Literal["greedy", "softmax", "random", "all"] = "greedy"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step's samples are drawn."""

    k: int = 1
    """Trajectories per task."""
    tree: Tree | None = None
    resample: int = 0
    """Rounds of drawing new tasks in place of those that `Algorithm.useful` leaves out."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """The contract. One object per policy; its fields are its config and never change during a run."""

    name: ClassVar[str] = ""

    unit: Unit = "decision"
    """What is never split over mini-batches, and what `unit-mean` averages over."""
    role_weights: Mapping[str, float] = field(default_factory=dict)
    """Role -> factor on its loss, where one policy plays several roles. Usual: none, so that all count 1."""
    mask_errors: str = ""
    """Name of a reward component. An act whose amount is negative there, and that was followed in its chain by one
    whose amount is not, is left out of the loss: a recovered trajectory should not teach the error that it
    recovered from (partial masking, as STeP, 2505.20023, does it in fine-tuning). Empty: off."""

    def __post_init__(self) -> None:
        check_ranges(self, RANGES, f"{self.name}: ")
        for role, weight in self.role_weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
                raise ValueError(f"{self.name}: role_weights.{role} is {weight!r}: expected a number from 0")

    @property
    def needs(self) -> Needs:
        return Needs()

    def collect(self, plan: Plan) -> Plan:
        """Change how samples are drawn."""
        return plan

    def useful(self, table: Table, mine: Ints) -> set[tuple[str, str]]:
        """(env_id, task) worth training on: the others are drawn anew where `Plan.resample` allows it."""
        return {(row.env_id, row.task) for row in table.rows}

    @abstractmethod
    def advantages(self, table: Table, mine: Ints, state: MutableMapping[str, Any]) -> list[Signal]:
        """One signal for each row of `mine`. `table` holds every policy's rows; `state` is kept in checkpoints."""

    def metrics(self, table: Table, mine: Ints, signals: list[Signal]) -> dict[str, float]:
        """What to log about the step's advantages."""
        shares = zero_shares(table, signals)
        return {f"zero_advantages/{role}": share for role, share in shares.items()}

    def denominators(self, thin: Iterable[Thin]) -> dict[str, float]:
        """Of one whole mini-batch, so that the loss does not depend on how it is cut into micro-batches."""
        from ..group.batch import count

        return count(thin)

    @abstractmethod
    def loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the mini-batch's loss, and of its metrics."""

    def signals(self, table: Table, mine: Ints, weight: Floats | None = None, **columns: Any) -> list[Signal]:
        """Signals from columns over the whole table, with this config's weights, masks and units."""
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
    """Acts with a negative amount of `component` that were followed in their chain by one without."""
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
    """The clipped surrogate of PPO, which nearly every algorithm here ends in."""

    clip_low: float = 0.2
    """A token whose probability fell below (1 - this) of its old one gets no more push down. Usual 0.1–0.3."""
    clip_high: float = 0.2
    """… or rose above (1 + this), no more push up. Greater than clip_low keeps exploration alive. Usual 0.2–0.3."""
    dual_clip: float | None = 3.0
    """Bounds the loss of a token with negative advantage whose ratio exploded. Greater than 1; null: off."""
    importance: Importance = "truncate"
    """Corrects samples drawn by an older version, or by an engine whose numbers differ."""
    importance_cap: float = 2.0
    """Largest correction. Usual 2–5."""
    kl_loss: float = 0.0
    """Coefficient of the divergence from the reference, in the loss. Usual 0–0.01; 0 needs no reference."""
    kl_estimator: Estimator = "k3"
    """The number shown and added; its gradient is the divergence's own (see losses.kl_loss)."""
    kl_own_gradient: bool = False
    """Differentiate the estimator itself instead, as most published code does."""
    entropy: float = 0.0
    """Reward for being undecided. Usual 0–0.01."""
    aggregation: Aggregation = "token-mean"
    """How tokens become one number: see losses.aggregate. token-mean lets long replies weigh more."""
    length: float = 1.0
    """For `sequence-sum`: the constant that replaces a reply's length. Usual: the token limit."""

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_loss > 0, entropy=self.entropy > 0)

    def log_ratio(self, batch: Batch) -> Tensor:
        """What is clipped: log(current / start of update), per token."""
        from ..group import losses

        return losses.log_ratio(batch.logp, batch.proximal)

    def loss(self, batch: Batch, denominators: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        from ..group import losses

        per_token, silenced = losses.clipped_policy_loss(
            self.log_ratio(batch), batch.advantage, self.clip_low, self.clip_high, self.dual_clip
        )
        per_token = per_token * losses.importance(batch, self.importance, self.importance_cap)
        metrics = losses.ratio_metrics(batch, denominators)
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
    """An advantage is how far a sample's score stands out of its group's."""

    group: str = "agent"
    """Whose samples are compared: a name of groups.GROUPS. "agent": the same agent on the same task. Narrower
    (agent-turn, prompt, siblings) means less noise and, without trees, mostly groups of one, which teach nothing."""
    each: Literal["", "trajectory", "call"] = ""
    """What counts once in a group's statistics: a trajectory, however often its agent spoke, or every call."""
    score: Score = "return"
    """What is compared: act, return, chain, mean, agent, episode (see groups.scores)."""
    gamma: float = 1.0
    """Discount per act of `score="return"`. Usual 0.95–1."""
    std: bool = True
    """Divide by the group's deviation. Makes roles and tasks with different reward scales alike, and weighs up
    tasks that are nearly always solved or nearly never."""
    eps: float = 1e-6
    """Added to the deviation."""
    task_wise: bool = False
    """Several environments in one run: afterwards whiten over all tokens of each environment, so that none sets
    the scale for the others (AgentRL, 2510.04206). Rows that compare with nothing stay at 0."""

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
        """Scores to advantages, over the whole table."""
        return within.relative(x, std=self.std, eps=self.eps)

    def advantages(self, table: Table, mine: Ints, state: MutableMapping[str, Any]) -> list[Signal]:
        within, x = self.groups(table), self.scores(table)
        return self.compared(table, mine, self.compare(within, x), within.still(x))

    def compared(
        self, table: Table, mine: Ints, advantage: Floats, still: Bools, weight: Floats | None = None
    ) -> list[Signal]:
        """Signals of advantages that are the same for all tokens of a decision; `still` rows teach nothing."""
        columns: dict[str, Floats] = {"advantage": advantage}
        if self.task_wise:
            live = mine[~still[mine]]
            of = gae.flat_moments(table, advantage)
            columns["shift"], columns["scale"] = gae.whiten(table, live, of, per="env_id", floor=self.eps)
        return self.signals(table, mine, weight, **columns)

    def metrics(self, table: Table, mine: Ints, signals: list[Signal]) -> dict[str, float]:
        comparison = report(table, mine, self.groups(table), self.scores(table))
        return {**comparison, **super().metrics(table, mine, signals)}
