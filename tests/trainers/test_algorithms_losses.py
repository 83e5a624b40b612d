"""Every algorithm's loss against plain loops in Python floats, and cut into micro-batches in any way."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.algorithms import PolicyGradient, list_algorithms, make_algorithm
from unitymas.trainers.group.learning.batch import Batch, Thin, tokens_per_unit

UNHURRIED = settings(deadline=None, max_examples=12)
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)
PER_TOKEN = (
    "logp",
    "behaviour",
    "proximal",
    "advantage",
    "entropy",
    "reference",
    "values",
    "old_values",
    "returns",
)


def mini_batch(seed: int, lengths: list[int]) -> tuple[dict[str, list[list[float]]], list[Thin]]:
    """Per decision and token, the numbers of a mini-batch; and its thin rows, two decisions to a unit."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float, shift: float = 0.0) -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator, dtype=torch.float64) * scale + shift for n in lengths]

    proximal = draw(0.5, -2.0)
    columns = {
        "proximal": proximal,
        "logp": [p + d for p, d in zip(proximal, draw(0.4), strict=True)],
        "behaviour": [p + d for p, d in zip(proximal, draw(0.5), strict=True)],
        "reference": [p + d for p, d in zip(proximal, draw(0.5), strict=True)],
        "entropy": [e.abs() for e in draw(1.0)],
        "advantage": draw(1.0),
        "values": draw(1.0),
        "old_values": draw(1.0),
        "returns": draw(1.0),
    }
    weights = (torch.rand(len(lengths), generator=generator, dtype=torch.float64) + 0.5).tolist()
    rows = [Thin(f"d{i}", n, f"u{i // 2}", w) for i, (n, w) in enumerate(zip(lengths, weights, strict=True))]
    return {name: [c.tolist() for c in column] for name, column in columns.items()}, rows


def batch_of(data: dict[str, list[list[float]]], rows: list[Thin], which: list[int]) -> Batch:
    """The micro-batch of the decisions `which`."""
    flat: dict[str, Any] = {
        name: torch.tensor([x for i in which for x in data[name][i]], dtype=torch.float64)
        for name in PER_TOKEN
    }
    lengths = torch.tensor([rows[i].n_tokens for i in which])
    sizes = tokens_per_unit(rows)

    def repeated(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).repeat_interleave(lengths)

    for name in ("logp", "values"):
        flat[name].requires_grad_()
    return Batch(
        **flat,
        weight=repeated([rows[i].weight for i in which]),
        sequence=torch.arange(len(which)).repeat_interleave(lengths),
        n_sequences=len(which),
        unit_tokens=repeated([float(sizes[rows[i].unit]) for i in which]),
    )


def by_hand(a: Any, data: dict[str, list[list[float]]], rows: list[Thin], critic: bool) -> float:
    """The mini-batch's loss as the papers write it."""
    total = 0.0
    units: dict[str, int] = {}
    for row in rows:
        units[row.unit] = units.get(row.unit, 0) + row.n_tokens
    for i, row in enumerate(rows):
        at = {name: data[name][i] for name in PER_TOKEN}
        moved = [c - p for c, p in zip(at["logp"], at["proximal"], strict=True)]
        stale = [p - b for p, b in zip(at["proximal"], at["behaviour"], strict=True)]
        for t in range(row.n_tokens):
            by_sequence = a.name == "gspo"
            ratio = math.exp(sum(moved) / len(moved) if by_sequence else moved[t])
            advantage = at["advantage"][t]
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - a.clip_low), 1 + a.clip_high))
            if a.dual_clip is not None and advantage < 0:
                loss = min(loss, -advantage * a.dual_clip)
            loss *= correction(a, stale, t)
            gap = at["logp"][t] - at["reference"][t]
            loss += a.kl_loss * (math.exp(-gap) - 1 + gap) - a.entropy * at["entropy"][t]
            if critic:
                value, old, target = at["values"][t], at["old_values"][t], at["returns"][t]
                held = old + min(max(value - old, -a.value_clip), a.value_clip)
                loss += a.value_coefficient * 0.5 * max((value - target) ** 2, (held - target) ** 2)
            share = {
                "token-mean": 1 / sum(r.n_tokens for r in rows),
                "sequence-mean": 1 / row.n_tokens / len(rows),
                "sequence-sum": 1 / a.length / len(rows),
                "unit-mean": 1 / units[row.unit] / len(units),
            }[a.aggregation]
            total += loss * share * row.weight
    return total


def correction(a: Any, stale: list[float], t: int) -> float:
    """Weight of token t of a decision whose log-ratios proximal - behaviour are `stale`."""
    weight = math.exp(sum(stale) if a.importance.startswith("sequence") else stale[t])
    if a.importance.endswith("mask"):
        weight = weight if a.importance_floor <= weight <= a.importance_cap else 0.0
    mean, lowest = math.exp(sum(stale) / len(stale)), math.exp(min(stale))
    far = a.geometric is not None and not a.geometric[0] <= mean <= a.geometric[1]
    return 0.0 if far or lowest < a.veto else min(weight, a.importance_cap)


@UNHURRIED
@given(seed=st.integers(0, 2**20), lengths=LENGTHS)
@pytest.mark.parametrize(
    "given",
    [
        {"importance": "mask", "importance_floor": 0.9, "importance_cap": 1.1},
        {"importance": "sequence-mask"},
        {"importance": "sequence-truncate", "veto": 0.8},
        {"geometric": [0.95, 1.05]},
        {"geometric": (0.9, 1.1), "veto": 0.7},
    ],
)
def test_corrections_of_old_samples(given: dict[str, Any], seed: int, lengths: list[int]) -> None:
    data, rows = mini_batch(seed, lengths)
    algorithm = make_algorithm("grpo", **given)
    loss, metrics = algorithm.loss(batch_of(data, rows, list(range(len(rows)))), algorithm.denominators(rows))
    assert float(loss.detach()) == pytest.approx(by_hand(algorithm, data, rows, False), abs=1e-6)
    if algorithm.geometric or algorithm.veto:
        gone = [
            len(p)
            for p, b in zip(data["proximal"], data["behaviour"], strict=True)
            if not correction(algorithm, [x - y for x, y in zip(p, b, strict=True)], 0)
        ]
        assert float(metrics["rejected"]) == pytest.approx(sum(gone) / sum(lengths))


@UNHURRIED
@given(seed=st.integers(0, 2**20), lengths=LENGTHS)
@pytest.mark.parametrize("name", list_algorithms())
def test_losses(name: str, seed: int, lengths: list[int]) -> None:
    data, rows = mini_batch(seed, lengths)
    algorithm = make_algorithm(name, kl_loss=0.05, entropy=0.01)
    denominators = algorithm.denominators(rows)
    loss, metrics = algorithm.loss(batch_of(data, rows, list(range(len(rows)))), denominators)
    critic = name in ("ppo", "mappo")
    assert float(loss.detach()) == pytest.approx(by_hand(algorithm, data, rows, critic), abs=1e-6)
    assert {"policy_loss", "clipped", "approx_kl", "mismatch_kl", "kl", "entropy"} <= set(metrics)
    assert ("value_loss" in metrics) == critic


@UNHURRIED
@given(seed=st.integers(0, 2**20), lengths=LENGTHS, cut=st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "dr_grpo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum", "unit-mean"])
def test_micro_batches_add_up(name: str, aggregation: str, seed: int, lengths: list[int], cut: Any) -> None:
    """Loss, gradient and metrics of the mini-batch, whatever it is cut into and in whatever order."""
    data, rows = mini_batch(seed, lengths)
    algorithm = make_algorithm(name, aggregation=aggregation)
    denominators = algorithm.denominators(rows)

    def run(parts: list[list[int]]) -> tuple[float, list[float], float]:
        loss, clipped, gradient = 0.0, 0.0, [0.0] * len(rows)
        for part in parts:
            batch = batch_of(data, rows, part)
            share, metrics = algorithm.loss(batch, denominators)
            share.backward()  # type: ignore[no-untyped-call]
            loss, clipped = loss + float(share.detach()), clipped + float(metrics["clipped"])
            assert batch.logp.grad is not None
            for i, g in zip(part, batch.logp.grad.split([rows[i].n_tokens for i in part]), strict=True):
                gradient[i] = g.tolist()
        return loss, [x for decision in gradient for x in decision], clipped  # type: ignore[attr-defined]

    order = list(range(len(rows)))
    cut.shuffle(order)
    parts = [order[i : i + 2] for i in range(0, len(order), 2)]
    whole, pieces = run([list(range(len(rows)))]), run(parts)
    assert pieces[0] == pytest.approx(whole[0], abs=1e-9)
    assert pieces[1] == pytest.approx(whole[1], abs=1e-9)
    assert pieces[2] == pytest.approx(whole[2], abs=1e-9)


def test_a_critic_with_parameters_of_its_own() -> None:
    data, rows = mini_batch(1, [3, 2])
    batch = batch_of(data, rows, [0, 1])
    ppo: Any = make_algorithm("ppo", value_clip=None)
    loss, metrics = ppo.critic_loss(batch, ppo.denominators(rows))
    expected = sum(
        row.weight * 0.5 * (v - r) ** 2 / 5
        for i, row in enumerate(rows)
        for v, r in zip(data["values"][i], data["returns"][i], strict=True)
    )
    assert float(loss.detach()) == pytest.approx(expected)
    assert float(metrics["value_loss"]) == pytest.approx(expected)
    batch.returns = None
    with pytest.raises(ValueError, match="a critic's batch needs values, old_values and returns"):
        ppo.critic_loss(batch, ppo.denominators(rows))


def test_a_batch_without_what_was_asked_for_is_refused() -> None:
    data, rows = mini_batch(1, [3])
    batch = batch_of(data, rows, [0])
    batch.reference = None
    algorithm = make_algorithm("grpo", kl_loss=0.1)
    with pytest.raises(ValueError, match="use the reference log-probs, but the batch has none"):
        algorithm.loss(batch, algorithm.denominators(rows))


def test_all_here_end_in_the_clipped_surrogate() -> None:
    assert all(isinstance(make_algorithm(name), PolicyGradient) for name in list_algorithms())
