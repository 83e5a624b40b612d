"""The parts of a loss: pure functions of flat tensors with one number per token.

An algorithm's `loss(batch, denominators)` chooses some parts and adds them up. All parts keep these rules:

- A part has shape (T,). Only `aggregate` turns it into one number, and only with *global* denominators.
  So the shares of micro-batches and ranks add up to the loss of the mini-batch.
- Metrics are aggregated in the same way, so they add up too. A metric named `max_…` is combined by maximum.
- Three log-probs have names: behaviour (of the engine that sampled), proximal (at the start of the update) and
  current (`logp`). The clip is measured from proximal. `importance` corrects from behaviour to proximal and carries
  no gradient.

References: PPO 1707.06347; dual clip 1912.09729; clip-higher (DAPO) 2503.14476; GSPO 2507.18071; Dr. GRPO
2503.20783; k1/k2/k3 after Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...config.choices import Aggregation, Estimator, Importance
from .batch import Batch

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log-ratio. exp() of a larger one overflows sums in bf16, and has no meaning long before
that.
"""


def aggregate(
    per_token: Tensor, batch: Batch, how: Aggregation, denominators: Mapping[str, float], length: float = 1.0
) -> Tensor:
    """Turn (T,) into this micro-batch's share of the mini-batch's loss. Weights apply here and nowhere else.

    token-mean     sum over tokens / all trained tokens            every token counts the same (DAPO)
    sequence-mean  mean over a decision's tokens / all decisions   every decision counts the same (GRPO)
    sequence-sum   sum over tokens / (all decisions * `length`)    no length in the gradient (Dr. GRPO)
    unit-mean      mean over a unit's tokens / all units           every unit (an episode …) counts the same
    """
    weighted = per_token * batch.weight
    if how == "token-mean":
        return weighted.sum() / denominators["tokens"]
    if how == "sequence-mean":
        return (weighted / batch.lengths.clamp(min=1)[batch.sequence]).sum() / denominators["sequences"]
    if how == "sequence-sum":
        return weighted.sum() / (denominators["sequences"] * length)
    if how == "unit-mean":
        return (weighted / batch.unit_tokens).sum() / denominators["units"]
    raise ValueError(
        f"unknown aggregation {how!r}: choose token-mean, sequence-mean, sequence-sum or unit-mean"
    )


def log_ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    """Difference logp - anchor, clamped to a range in which exp() does not overflow."""
    return (logp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(batch: Batch) -> Tensor:
    """Log-ratio of GSPO: the mean over the decision, with each token carrying its own gradient (GSPO-token).

    With one advantage per decision the gradient is exactly that of GSPO. It is also well defined for advantages per token.
    """
    own = batch.logp - batch.logp.detach()  # (T,): 0 in value, and the only term with a gradient
    return own + batch.sequence_mean(log_ratio(batch.logp.detach(), batch.proximal))


def clipped_policy_loss(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic surrogate per token (T,), and which tokens the clip silenced (T,), bool.

    `clip_high` > `clip_low` is DAPO's clip-higher. `dual_clip` (> 1, usually 3) bounds the loss of a token with
    negative advantage whose ratio exploded.
    """
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    silenced = (
        clipped > plain
    )  # the clipped branch is constant in the ratio, so these tokens have no gradient
    if dual_clip is not None:
        if dual_clip <= 1.0:
            raise ValueError(
                f"dual_clip is {dual_clip}: it must be greater than 1 (usually 3), or null for off"
            )
        ceiling = -advantage * dual_clip
        bounded = (advantage < 0) & (loss > ceiling)
        loss = torch.where(bounded, ceiling, loss)
        silenced = silenced | bounded
    return loss, silenced


def importance(batch: Batch, mode: Importance = "truncate", cap: float = 2.0, floor: float = 0.5) -> Tensor:
    """Ratio proximal / behaviour (T,). It corrects samples drawn by an older version or another kernel. No gradient.

    truncate           min(w, cap) per token
    mask               w where floor <= w <= cap, else 0: the token does not count
    sequence-truncate  min(product of w over the decision, cap)
    sequence-mask      that product where floor <= product <= cap, else 0: the decision does not count
    off                1 everywhere
    """
    difference = log_ratio(batch.proximal, batch.behaviour).detach()
    if mode == "off":
        return torch.ones_like(difference)
    if mode in ("sequence-truncate", "sequence-mask"):
        # the sum of log-ratios over the decision, repeated for each of its tokens: (T,)
        difference = batch.sequence_mean(difference) * batch.lengths[batch.sequence]
        difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = difference.exp()
    if mode in ("truncate", "sequence-truncate"):
        return weight.clamp(max=cap)
    if mode in ("mask", "sequence-mask"):
        return torch.where((weight >= floor) & (weight <= cap), weight, torch.zeros_like(weight))
    raise ValueError(
        f"unknown importance mode {mode!r}: choose truncate, mask, sequence-truncate, sequence-mask or off"
    )


def accepted(batch: Batch, geometric: tuple[float, float] | None = None, veto: float = 0.0) -> Tensor:
    """Return for each token whether its decision counts (T,), bool. A decision that is too far from its behaviour does
    not count.

    geometric: the geometric mean of proximal / behaviour over the decision must lie within these two bounds.

    veto: no token of the decision may have a ratio below this; 0: off.
    """
    difference = log_ratio(batch.proximal, batch.behaviour).detach()
    counts = torch.ones_like(difference, dtype=torch.bool)
    if geometric is not None:
        ratio = batch.sequence_mean(difference).exp()
        counts &= (ratio >= geometric[0]) & (ratio <= geometric[1])
    if veto:
        below = (difference.exp() < veto).to(difference.dtype)
        counts &= batch.sequence_mean(below) == 0
    return counts


def kl_estimate(logp: Tensor, reference: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimate of KL(current || reference) per token (T,), from the sampled token alone.

    k1 is unbiased; k2 is biased, with low variance; k3 is unbiased, with low variance. Each of them can be reported or
    put into a reward. For a loss take `kl_loss`.
    """
    difference = log_ratio(logp, reference)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")


def kl_loss(
    logp: Tensor, reference: Tensor, estimator: Estimator = "k3", own_gradient: bool = False
) -> Tensor:
    """The KL estimate as a loss, with the gradient of the KL.

    The derivative of an estimator is not an estimate of the derivative. The gradient of k1 is zero in expectation, and
    that of k3 is the gradient of the *reverse* KL. On-policy, the gradient of k2 is the right one (log-ratio times the
    score). So the gradient is always that of k2, whatever number is shown. `own_gradient=True` gives the published
    GRPO loss instead.
    """
    estimate = kl_estimate(logp, reference, estimator)
    if own_gradient or estimator == "k2":
        return estimate
    right = kl_estimate(logp, reference, "k2")
    return right + (estimate - right).detach()


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None = 0.2) -> Tensor:
    """Half the squared error per token (T,). With `clip`, the larger of two errors: of the value, and of the
    value clipped around its old one.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (held - returns).square())


def value_after_loss(batch: Batch, denominators: Mapping[str, float]) -> Tensor:
    """Half the squared error of the values after the decisions, as a mean over decisions; 0 where none has a
    target.
    """
    if batch.after is None or batch.after_returns is None:
        return torch.zeros(())
    weight = batch.weight.new_zeros(batch.n_sequences)
    weight[batch.sequence] = batch.weight
    missed = torch.where(batch.after_returns.isnan(), 0.0, batch.after - batch.after_returns.nan_to_num())
    return 0.5 * (weight * missed.square()).sum() / denominators["sequences"]


def token_mean(per_token: Tensor, denominators: Mapping[str, float]) -> Tensor:
    """A metric's share: the unweighted sum over tokens / all tokens of the mini-batch that are computed. Detached."""
    return per_token.detach().sum() / denominators.get("computed", denominators["tokens"])


def ratio_metrics(batch: Batch, denominators: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the distance of current from proximal, and of proximal from behaviour."""
    moved = log_ratio(batch.logp.detach(), batch.proximal)
    stale = log_ratio(batch.proximal, batch.behaviour)
    metrics = {
        "approx_kl": token_mean(torch.expm1(moved) - moved, denominators),
        "mismatch_kl": token_mean(torch.expm1(stale) - stale, denominators),
        "max_log_ratio": moved.abs().amax(),
        "max_mismatch": stale.abs().amax(),
    }
    if batch.entropy is not None:
        metrics["entropy"] = token_mean(batch.entropy, denominators)
    return metrics
