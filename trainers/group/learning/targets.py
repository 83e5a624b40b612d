"""Targets per token from signals: advantages for the policy's tokens, and returns for the critic.

The controller composes advantages over chains and groups from thin rows, and sends one number per decision. The group
holds the tensors, so it spreads that number over the decision's tokens. gae.py shows why this is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....agents.answers import DecisionId
from ....agents.engines.token_text import pieces
from ....agents.text.tokenizing import Tokenizer
from ...algorithms.algorithm import Needs
from ...controller.statistics.gae import local_advantages, summarise, token_advantages
from ...controller.statistics.table import Signal, ValueSummary
from ..sample_store import Sample, SampleRow
from .batch import Thin

Floats32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Discount:
    """Discounts of values and rewards over tokens, as an algorithm's `needs` state them. The default gives
    plain returns.
    """

    gamma: float = 1.0
    lam: float = 1.0
    kl_reward: float = 0.0
    """Coefficient of the per-token reward -c * (proximal - reference)."""


@dataclass(frozen=True, slots=True)
class Target:
    """Targets of one decision's tokens: (n,) each."""

    advantage: Floats32
    returns: Floats32 | None
    """Targets of the critic's values; None where no critic is trained."""
    after: float | None = None
    """Target of the critic's value after the last token; None where there is none."""


def summaries(samples: Sequence[Sample], discount: Discount) -> dict[DecisionId, ValueSummary]:
    """Return each decision's summary: the numbers that token-level GAE of its chain needs."""
    if not samples:
        return {}
    values, after = _values(samples)
    lengths = [sample.n_tokens for sample in samples]
    rows = summarise(values, lengths, after, discount.gamma, discount.lam, _kl_rewards(samples, discount))
    return dict(zip((sample.id for sample in samples), rows, strict=True))


def targets(
    samples: Sequence[Sample], signals: Mapping[DecisionId, Signal], discount: Discount
) -> list[Target]:
    """Return the advantages of each sample's tokens, shifted and scaled, and the targets of its critic."""
    composed = [sample for sample in samples if _signal(signals, sample).advantage is None]
    locals_ = _locals(composed, signals, discount)
    return [_target(sample, signals[sample.id], locals_.get(sample.id)) for sample in samples]


def moved(signals: Mapping[DecisionId, Signal], samples: Sequence[Sample]) -> list[int]:
    """Return the places of samples whose advantage is not 0. If there is none, return the shortest sample, because an
    optimizer step needs one.
    """
    places = [
        i for i, sample in enumerate(samples) if sample.id not in signals or not signals[sample.id].still
    ]  # samples without a signal are refused where targets are made
    return places or [min(range(len(samples)), key=lambda i: samples[i].n_tokens)]


def moving(
    signals: Mapping[DecisionId, Signal],
    samples: Sequence[Sample],
    goals: Sequence[Target],
    thin: Sequence[Thin],
) -> tuple[list[Sample], list[Target], list[Thin]]:
    """Return samples, targets and thin rows of the decisions at the places of `moved`."""
    rows = moved(signals, samples)
    return [samples[i] for i in rows], [goals[i] for i in rows], [thin[i] for i in rows]


def _target(sample: Sample, signal: Signal, composed: NDArray[np.float64] | None) -> Target:
    n = sample.n_tokens
    returns: Floats32 | None = None
    if composed is not None:
        advantage = composed
        if sample.values is not None:
            returns = (composed + sample.values[:n]).astype(np.float32)
    else:
        assert signal.advantage is not None
        advantage = np.full(n, signal.advantage, np.float64)
        if signal.target is not None:
            returns = np.full(n, signal.target, np.float32)
    return Target(((advantage - signal.shift) * signal.scale).astype(np.float32), returns, signal.after)


def _locals(
    samples: Sequence[Sample], signals: Mapping[DecisionId, Signal], discount: Discount
) -> dict[str, NDArray[np.float64]]:
    """Return the token-level GAE of decisions whose signal is a `tail`."""
    if not samples:
        return {}
    lengths = [sample.n_tokens for sample in samples]
    local = local_advantages(
        _values(samples)[0], lengths, discount.gamma, discount.lam, _kl_rewards(samples, discount)
    )
    tails = [_tail(signals[sample.id]) for sample in samples]
    flat = token_advantages(local, lengths, tails, discount.gamma, discount.lam)
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    return {sample.id: part for sample, part in zip(samples, parts, strict=True)}


def _values(samples: Sequence[Sample]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values before all tokens, flat (T,), and after each decision (S,). They are 0 without a critic."""
    whole = [s.values if s.values is not None else np.zeros(s.n_tokens + 1) for s in samples]
    return (
        np.concatenate([v[:-1] for v in whole]).astype(np.float64),
        np.array([v[-1] for v in whole], np.float64),
    )


def _kl_rewards(samples: Sequence[Sample], discount: Discount) -> NDArray[np.float64] | None:
    if not discount.kl_reward:
        return None
    parts = []
    for sample in samples:
        if sample.proximal is None or sample.reference is None:
            raise ValueError(
                f"sample {sample.id!r}: the KL reward needs proximal and reference log-probs first"
            )
        parts.append(sample.proximal.astype(np.float64) - sample.reference)
    return -discount.kl_reward * np.concatenate(parts)


def _signal(signals: Mapping[DecisionId, Signal], sample: Sample) -> Signal:
    if sample.id not in signals:
        raise KeyError(f"decision {sample.id!r} is in a mini-batch but got no signal")
    return signals[sample.id]


def _tail(signal: Signal) -> float:
    if signal.tail is None:
        raise ValueError(f"the signal of {signal.id!r} has neither advantage nor tail")
    return signal.tail


def records(
    samples: Sequence[Sample], signals: Sequence[Signal], needs: Needs, tokenizer: Tokenizer
) -> list[SampleRow]:
    """Return samples as plain data for a run's sidecar: text, log-prob and advantage of each token."""
    by_id = {sample.id: sample for sample in samples}
    own = {signal.id: signal for signal in signals if signal.id in by_id}
    goals = targets([by_id[id] for id in own], own, Discount(needs.gamma, needs.lam, needs.kl_reward))
    advantage = {id: target.advantage.tolist() for id, target in zip(own, goals, strict=True)}
    return [
        sample.record(pieces(tokenizer, sample.reply.tolist()), advantage.get(id))
        for id, sample in by_id.items()
    ]
