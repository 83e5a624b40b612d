"""Every loss piece against plain loops in Python floats, on random ragged data."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.trainers.group.learning import losses
from unitymas.trainers.group.learning.batch import Batch, Thin, count, tokens_per_unit

TOLERANCE = 1e-6


def ragged(seed: int, lengths: list[int], units: list[str] | None = None) -> tuple[Batch, list[Thin]]:
    """A float64 batch of `len(lengths)` decisions with random contents."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return torch.randn(sum(lengths), generator=generator, dtype=torch.float64) * scale + shift

    units = units or [f"u{i}" for i in range(len(lengths))]
    weights = torch.rand(len(lengths), generator=generator, dtype=torch.float64) + 0.5
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows = [Thin(f"d{i}", n, units[i], float(weights[i])) for i, n in enumerate(lengths)]
    sizes = tokens_per_unit(rows)
    proximal = draw(0.5, -2.0)
    batch = Batch(
        logp=(proximal + draw(0.4)).requires_grad_(),
        behaviour=proximal + draw(0.3),
        proximal=proximal,
        advantage=draw(),
        weight=weights[sequence],
        sequence=sequence,
        n_sequences=len(lengths),
        unit_tokens=torch.tensor([float(sizes[units[i]]) for i in sequence.tolist()], dtype=torch.float64),
        entropy=draw().abs(),
        reference=proximal + draw(0.5),
        values=draw().requires_grad_(),
        old_values=draw(),
        returns=draw(),
        ids=tuple(row.id for row in rows),
    )
    return batch, rows


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)
UNHURRIED = settings(deadline=None, max_examples=40)


def on_ragged_data(test: Callable[..., None]) -> Callable[..., None]:
    return UNHURRIED(given(seed=st.integers(0, 2**20), lengths=LENGTHS)(test))


def plain_aggregate(per_token: list[float], batch: Batch, rows: list[Thin], how: str, length: float) -> float:
    """The four aggregations, written out."""
    sequence = batch.sequence.tolist()
    total = 0.0
    for token, value in enumerate(per_token):
        row = rows[sequence[token]]
        weighted = value * row.weight
        if how == "token-mean":
            total += weighted / sum(r.n_tokens for r in rows)
        elif how == "sequence-mean":
            total += weighted / row.n_tokens / len(rows)
        elif how == "sequence-sum":
            total += weighted / length / len(rows)
        else:
            size = sum(r.n_tokens for r in rows if r.unit == row.unit)
            total += weighted / size / len({r.unit for r in rows})
    return total


@on_ragged_data
@pytest.mark.parametrize("how", ["token-mean", "sequence-mean", "sequence-sum", "unit-mean"])
def test_aggregations(how: str, seed: int, lengths: list[int]) -> None:
    batch, rows = ragged(seed, lengths, [f"u{i // 2}" for i in range(len(lengths))])
    per_token = torch.randn(sum(lengths), dtype=torch.float64)
    found = losses.aggregate(per_token, batch, how, count(rows), length=32.0)  # type: ignore[arg-type]
    assert float(found) == pytest.approx(
        plain_aggregate(per_token.tolist(), batch, rows, how, 32.0), abs=TOLERANCE
    )


@on_ragged_data
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_clipped_policy_loss(dual_clip: float | None, seed: int, lengths: list[int]) -> None:
    batch, _ = ragged(seed, lengths)
    log_ratio = losses.log_ratio(batch.logp, batch.proximal) * 4  # far enough for every branch
    found, silenced = losses.clipped_policy_loss(log_ratio, batch.advantage, 0.2, 0.28, dual_clip)
    (gradient,) = torch.autograd.grad(found.sum(), batch.logp)
    for token in range(sum(lengths)):
        moved, advantage = float(log_ratio[token].detach()), float(batch.advantage[token])
        ratio = math.exp(moved)
        expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        if dual_clip is not None and advantage < 0:
            expected = min(expected, -dual_clip * advantage)
        assert float(found[token].detach()) == pytest.approx(expected, abs=TOLERANCE)
        live = not bool(silenced[token])
        assert live == (abs(float(gradient[token])) > 0)
        if live:
            assert float(gradient[token]) == pytest.approx(-4 * advantage * ratio, rel=1e-6)


@on_ragged_data
def test_gspo_is_a_ratio_of_whole_decisions(seed: int, lengths: list[int]) -> None:
    batch, rows = ragged(seed, lengths)
    per_decision = torch.randn(len(lengths), dtype=torch.float64)
    advantage = per_decision[batch.sequence]
    per_token, _ = losses.clipped_policy_loss(losses.sequence_log_ratio(batch), advantage, 1e9, 1e9)
    batch.weight = torch.ones_like(batch.weight)
    loss = losses.aggregate(per_token, batch, "sequence-mean", count(rows))
    (found,) = torch.autograd.grad(loss, batch.logp)

    logp = batch.logp.detach().clone().requires_grad_()
    plain = logp.new_zeros(())
    for index in range(len(lengths)):
        mine = batch.sequence == index
        plain = plain - (logp[mine] - batch.proximal[mine]).mean().exp() * per_decision[index] / len(lengths)
    (expected,) = torch.autograd.grad(plain, logp)
    torch.testing.assert_close(loss, plain, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@on_ragged_data
def test_importance(seed: int, lengths: list[int]) -> None:
    batch, _ = ragged(seed, lengths)
    truncated = losses.importance(batch, "truncate", cap=1.3).tolist()
    masked = losses.importance(batch, "mask", cap=1.3, floor=0.8).tolist()
    whole = losses.importance(batch, "sequence-truncate", cap=1.3).tolist()
    within = losses.importance(batch, "sequence-mask", cap=1.3, floor=0.8).tolist()
    differences = (batch.proximal - batch.behaviour).tolist()
    sequence = batch.sequence.tolist()
    for token, difference in enumerate(differences):
        weight = math.exp(difference)
        total = math.exp(sum(d for d, s in zip(differences, sequence, strict=True) if s == sequence[token]))
        assert truncated[token] == pytest.approx(min(weight, 1.3))
        assert masked[token] == pytest.approx(weight if 0.8 <= weight <= 1.3 else 0.0)
        assert whole[token] == pytest.approx(min(total, 1.3))
        assert within[token] == pytest.approx(total if 0.8 <= total <= 1.3 else 0.0)
    assert not losses.importance(batch).requires_grad
    assert losses.importance(batch, "off").tolist() == [1.0] * sum(lengths)


@on_ragged_data
def test_decisions_too_far_from_their_behaviour_do_not_count(seed: int, lengths: list[int]) -> None:
    batch, _ = ragged(seed, lengths)
    geometric = losses.accepted(batch, geometric=(0.9, 1.1)).tolist()
    vetoed = losses.accepted(batch, veto=0.8).tolist()
    both = losses.accepted(batch, (0.9, 1.1), 0.8).tolist()
    ratios = [math.exp(p - b) for p, b in zip(batch.proximal.tolist(), batch.behaviour.tolist(), strict=True)]
    token = 0
    for n in lengths:
        own = ratios[token : token + n]
        mean, lowest = math.prod(own) ** (1 / n), min(own)
        for t in range(token, token + n):
            assert geometric[t] == (0.9 <= mean <= 1.1)
            assert vetoed[t] == (lowest >= 0.8)
            assert both[t] == (geometric[t] and vetoed[t])
        token += n
    assert all(losses.accepted(batch).tolist())


def test_kl_gradients_are_the_gradient_of_the_kl() -> None:
    """Exact over a small vocabulary: the expected gradient of the loss is d KL / d logits."""
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    probabilities = logp.detach().exp()
    (expected,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)

    def expected_gradient(per_token: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((probabilities * per_token).sum(), logits, retain_graph=True)[0]

    for estimator in ("k1", "k2", "k3"):
        found = losses.kl_loss(logp, reference, estimator)  # type: ignore[arg-type]
        torch.testing.assert_close(expected_gradient(found), expected)
        torch.testing.assert_close(
            found,
            losses.kl_estimate(logp, reference, estimator),  # type: ignore[arg-type]
        )
    for estimator in ("k1", "k3"):  # the usual mistake, kept as an option because papers report it
        wrong = losses.kl_loss(logp, reference, estimator, own_gradient=True)  # type: ignore[arg-type]
        assert not torch.allclose(expected_gradient(wrong), expected)
    exact = float((probabilities * (logp.detach() - reference)).sum())
    for estimator in ("k1", "k3"):
        mean = (probabilities * losses.kl_estimate(logp.detach(), reference, estimator)).sum()  # type: ignore[arg-type]
        assert float(mean) == pytest.approx(exact)


@on_ragged_data
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None, seed: int, lengths: list[int]) -> None:
    batch, _ = ragged(seed, lengths)
    assert batch.values is not None and batch.returns is not None and batch.old_values is not None
    found = losses.value_loss(batch.values, batch.returns, batch.old_values, clip)
    for token in range(sum(lengths)):
        value, target, old = (
            float(x[token].detach()) for x in (batch.values, batch.returns, batch.old_values)
        )
        expected = 0.5 * (value - target) ** 2
        if clip is not None:
            held = min(max(value, old - clip), old + clip)
            expected = max(expected, 0.5 * (held - target) ** 2)
        assert float(found[token].detach()) == pytest.approx(expected, abs=TOLERANCE)


@UNHURRIED
@given(
    seed=st.integers(0, 2**20), lengths=st.lists(st.integers(1, 9), min_size=2, max_size=8), data=st.data()
)
@pytest.mark.parametrize("how", ["token-mean", "sequence-mean", "sequence-sum", "unit-mean"])
def test_shares_of_micro_batches_add_up(
    how: losses.Aggregation, seed: int, lengths: list[int], data: st.DataObject
) -> None:
    """Cut anywhere between decisions: with global denominators the sum is the whole."""
    batch, rows = ragged(seed, lengths, [f"u{i % 3}" for i in range(len(lengths))])
    per_token = torch.randn(sum(lengths), dtype=torch.float64)
    whole = losses.aggregate(per_token, batch, how, count(rows))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    shares = [
        losses.aggregate(per_token[mine], select(batch, mine), how, count(rows))
        for mine in (batch.sequence < cut, batch.sequence >= cut)
    ]
    torch.testing.assert_close(sum(shares), whole, atol=TOLERANCE, rtol=0)


def select(batch: Batch, mine: torch.Tensor) -> Batch:
    """The part of a batch that `mine` marks: whole decisions."""
    sequence = batch.sequence[mine]
    first = int(sequence[0])
    return Batch(
        logp=batch.logp[mine],
        behaviour=batch.behaviour[mine],
        proximal=batch.proximal[mine],
        advantage=batch.advantage[mine],
        weight=batch.weight[mine],
        sequence=sequence - first,
        n_sequences=int(sequence[-1]) - first + 1,
        unit_tokens=batch.unit_tokens[mine],
    )


def test_zero_staleness_has_nothing_to_correct() -> None:
    batch, rows = ragged(0, [3, 2])
    batch.logp, batch.behaviour = batch.proximal, batch.proximal
    metrics = losses.ratio_metrics(batch, count(rows))
    assert (
        float(metrics["approx_kl"]) == float(metrics["max_log_ratio"]) == float(metrics["mismatch_kl"]) == 0
    )
    assert losses.importance(batch).tolist() == [1.0] * 5


def test_unknown_names_say_what_is_known() -> None:
    batch, rows = ragged(0, [2])
    with pytest.raises(ValueError, match="token-mean"):
        losses.aggregate(batch.advantage, batch, "mean", count(rows))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="truncate"):
        losses.importance(batch, "tis")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="greater than 1"):
        losses.clipped_policy_loss(batch.logp, batch.advantage, dual_clip=0.5)
