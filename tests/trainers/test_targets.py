"""From one number per decision back to numbers per token: against GAE over the flat tokens of a chain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.learning.targets import Discount, summaries, targets
from unitymas.trainers.group.sample_store import Sample


def chain(seed: int, lengths: list[int]) -> list[Sample]:
    """The decisions of one chain, with a critic's values, and log-probs for the KL reward."""
    rng = np.random.default_rng(seed)
    found = []
    for i, n in enumerate(lengths):
        behaviour = np.zeros(n, np.float32)
        sample = Sample("e", str(i), "p", 0, np.array([1]), np.arange(n), behaviour)
        sample.values = rng.normal(size=n + 1).astype(np.float32)
        sample.proximal, sample.reference = (rng.normal(size=n).astype(np.float32) for _ in range(2))
        found.append(sample)
    return found


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gamma=st.floats(0.5, 1.0),
    lam=st.floats(0.5, 1.0),
)
def test_composed_advantages_are_those_of_the_flat_chain(
    seed: int, lengths: list[int], gamma: float, lam: float
) -> None:
    samples, discount = chain(seed, lengths), Discount(gamma, lam, kl_reward=0.3)
    rewards = np.random.default_rng(seed + 1).normal(size=len(lengths))

    values, flat_rewards = [], []
    for sample, reward in zip(samples, rewards, strict=True):
        assert sample.values is not None and sample.proximal is not None and sample.reference is not None
        values += sample.values[:-1].tolist()
        penalty = (-0.3 * (sample.proximal.astype(float) - sample.reference)).tolist()
        penalty[-1] += reward
        flat_rewards += penalty
    expected = [0.0] * len(values)
    carried = 0.0
    for i in reversed(range(len(values))):
        following = values[i + 1] if i + 1 < len(values) else 0.0
        carried = flat_rewards[i] + gamma * following - values[i] + gamma * lam * carried
        expected[i] = carried

    known, tails, tail = summaries(samples, discount), {}, 0.0
    for i in reversed(range(len(samples))):
        tail = float(rewards[i])
        if i + 1 < len(samples):
            after = known[samples[i + 1].id]
            first = after.local_first + (gamma * lam) ** (after.n - 1) * tails[samples[i + 1].id]
            tail += gamma * after.first + gamma * lam * first
        tails[samples[i].id] = tail
    signals = {id: Signal(id, None, tail=t, shift=0.25, scale=2.0) for id, t in tails.items()}
    found = targets(samples, signals, discount)
    advantage = np.concatenate([target.advantage for target in found])
    np.testing.assert_allclose(advantage, (np.array(expected) - 0.25) * 2.0, atol=1e-4)
    returns = np.concatenate([t.returns for t in found if t.returns is not None])
    np.testing.assert_allclose(returns, np.array(expected) + values, atol=1e-4)


def test_a_given_advantage_is_every_tokens() -> None:
    (sample,) = chain(0, [3])
    (target,) = targets(
        [sample], {sample.id: Signal(sample.id, 1.5, shift=0.5, scale=3.0, target=0.7)}, Discount()
    )
    assert target.advantage.tolist() == [3.0] * 3
    assert target.returns is not None and target.returns.tolist() == pytest.approx([0.7] * 3)


def test_what_is_missing_is_named() -> None:
    (sample,) = chain(0, [3])
    sample.reference = None
    with pytest.raises(ValueError, match="KL reward needs"):
        summaries([sample], Discount(kl_reward=0.1))
    with pytest.raises(KeyError, match="no signal"):
        targets([sample], {}, Discount())
    with pytest.raises(ValueError, match="neither advantage nor tail"):
        targets([sample], {sample.id: Signal(sample.id, None)}, Discount())
