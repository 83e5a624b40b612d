"""The pieces losses are made of: pure functions of flat per-token tensors.

An algorithm's `loss(batch, denominators)` picks from here and adds up. The rules they all keep:

- A per-token piece has shape (T,); only `aggregate` makes a number of it, and only with *global* denominators.
  So the contributions of micro-batches and ranks add up to the loss of the mini-batch.
- Metrics are aggregated the same way, so they add up too. A name that starts with `max_` is combined by maximum.
- Three log-probs have names: behaviour (what sampled), proximal (start of the update), current (`logp`).
  The clip is measured from proximal; `importance` corrects behaviour -> proximal and carries no gradient.

References: PPO 1707.06347; dual clip 1912.09729; clip-higher (DAPO) 2503.14476; GSPO 2507.18071; Dr. GRPO
2503.20783; k1/k2/k3 after Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config.choices import Aggregation, Estimator, Importance
from .batch import Batch

LOG_RATIO_LIMIT = 20.0
"""exp() of more than this overflows bf16 sums long before it means anything."""


def aggregate(
    per_token: Tensor, batch: Batch, how: Aggregation, denominators: Mapping[str, float], length: float = 1.0
) -> Tensor:
    """Turn (T,) into this micro-batch's share of the mini-batch's loss. Weights apply here and nowhere else.

    token-mean     sum over tokens / all trained tokens            every token counts the same (DAPO)
    sequence-mean  mean over a decision's tokens / all decisions   every decision counts the same (GRPO)
    sequence-sum   sum over tokens / (all decisions * `length`)    no length in the gradient (Dr. GRPO)
    unit-mean      mean over a unit's tokens / all units           every episode (or whatever a unit is) the same
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
    """log(current / anchor), kept within what exp() can carry."""
    return (logp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(batch: Batch) -> Tensor:
    """GSPO's ratio: the geometric mean over the decision, each token carrying its own gradient (GSPO-token).

    With one advantage per decision the gradient is exactly GSPO's; with token advantages it stays well defined.
    """
    own = batch.logp - batch.logp.detach()
    return own + batch.sequence_mean(log_ratio(batch.logp.detach(), batch.proximal))


def clipped_policy_loss(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate per token, and which tokens the clip silenced (bool).

    `clip_high` > `clip_low` is DAPO's clip-higher. `dual_clip` (> 1, usually 3) bounds the loss of a token with
    negative advantage whose ratio exploded.
    """
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    silenced = clipped > plain
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
    """proximal / behaviour: corrects samples that an older version or another kernel drew. No gradient.

    truncate           min(w, cap) per token
    mask               w where floor <= w <= cap, else 0: the token is left out
    sequence-truncate  min(product of w over the decision, cap)
    off                1 everywhere
    """
    difference = log_ratio(batch.proximal, batch.behaviour).detach()
    if mode == "off":
        return torch.ones_like(difference)
    if mode == "sequence-truncate":
        total = batch.sequence_mean(difference) * batch.lengths[batch.sequence]
        return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    weight = difference.exp()
    if mode == "truncate":
        return weight.clamp(max=cap)
    if mode == "mask":
        return torch.where((weight >= floor) & (weight <= cap), weight, torch.zeros_like(weight))
    raise ValueError(f"unknown importance mode {mode!r}: choose truncate, mask, sequence-truncate or off")


def kl_estimate(logp: Tensor, reference: Tensor, estimator: Estimator = "k3") -> Tensor:
    """KL(current || reference) per token, from the sampled token alone: k1 unbiased, k2 biased, k3 both low-variance
    and unbiased. As a number to report or to put in a reward, any of them; as a loss see `kl_loss`."""
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

    Differentiating an estimator does not give an estimate of the derivative: k1's own gradient is zero in
    expectation and k3's is that of the *reverse* KL. On-policy, k2's is right (log-ratio times the score), so
    whatever number is shown, k2's gradient flows. `own_gradient=True` gives the published GRPO loss instead.
    """
    estimate = kl_estimate(logp, reference, estimator)
    if own_gradient or estimator == "k2":
        return estimate
    right = kl_estimate(logp, reference, "k2")
    return right + (estimate - right).detach()


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None = 0.2) -> Tensor:
    """Half the squared error per token; with `clip`, the worse of it and that of the value held near its old self."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (held - returns).square())


def value_after_loss(batch: Batch, denominators: Mapping[str, float]) -> Tensor:
    """Half the squared error of the values after the decisions, as a mean over decisions; 0 where none has a target."""
    if batch.after is None or batch.after_returns is None:
        return torch.zeros(())
    weight = batch.weight.new_zeros(batch.n_sequences)
    weight[batch.sequence] = batch.weight
    missed = torch.where(batch.after_returns.isnan(), 0.0, batch.after - batch.after_returns.nan_to_num())
    return 0.5 * (weight * missed.square()).sum() / denominators["sequences"]


def token_mean(per_token: Tensor, denominators: Mapping[str, float]) -> Tensor:
    """A metric's share: unweighted sum over tokens / all trained tokens of the mini-batch. Detached."""
    return per_token.detach().sum() / denominators["tokens"]


def ratio_metrics(batch: Batch, denominators: Mapping[str, float]) -> dict[str, Tensor]:
    """How far current is from proximal, and proximal from behaviour."""
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
