"""The update: however the samples are cut, packed or padded, it is the same step; and all of it or none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unitymas.agents.model.weights import from_config, save_model
from unitymas.trainers.algorithms import make_algorithm
from unitymas.trainers.config.group_settings import Learning
from unitymas.trainers.controller.statistics.table import Signal
from unitymas.trainers.group.learning.packing import lay, micro_batches
from unitymas.trainers.group.learning.parameters import Parameters
from unitymas.trainers.group.learning.targets import Discount, summaries
from unitymas.trainers.group.learning.update import Learner, UpdateError
from unitymas.trainers.group.sample_store import Sample

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    initializer_range=0.2,
)


def model() -> Any:
    return from_config(CONFIG, seed=3)


def draw(n: int = 12, seed: int = 0) -> list[Sample]:
    """Samples of a few shared prompts, ragged, some hot, some with a restricted support."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 61, length) for length in (40, 25, 3)]
    found = []
    for i in range(n):
        reply = rng.integers(0, 61, int(rng.integers(1, 9)))
        restricted = i % 4 == 3
        found.append(
            Sample(
                episode=f"e{i // 2}",
                node=str(i % 2),
                policy="shared",
                version=0,
                prompt=prompts[i % 3],
                reply=reply,
                behaviour=np.full(len(reply), -3.0, np.float32),
                temperature=(1.0, 0.7, 1.3)[i % 3],
                support=tuple((int(token), 5, 17) for token in reply) if restricted else None,
            )
        )
    return found


def signals(samples: list[Sample], **options: Any) -> dict[str, Signal]:
    rng = np.random.default_rng(7)
    return {
        s.id: Signal(s.id, float(rng.normal()), weight=0.5 + i % 2, **options) for i, s in enumerate(samples)
    }


def learner(parameters: Parameters | None = None, **options: Any) -> Learner:
    settings = Learning(**{"lr": 1e-2, "micro_tokens": 10_000, **options})
    return Learner("shared", parameters or Parameters(model()), settings)


def own_behaviour(mine: Learner, samples: list[Sample]) -> None:
    """As if the engine's numbers were exact."""
    mine.measure_proximal(samples)
    for sample in samples:
        assert sample.proximal is not None
        sample.behaviour, sample.proximal, sample.proximal_at = sample.proximal, None, -1


def hf_logprobs(reference: Any, sample: Sample) -> torch.Tensor:
    """One by one, through transformers, in float64: no packing, no sharing, no chunks."""
    ids = torch.tensor([[*sample.prompt.tolist(), *sample.reply.tolist()]])
    logits = reference(ids).logits[0, len(sample.prompt) - 1 : -1] / sample.temperature
    if sample.support is not None:
        mask = torch.full_like(logits, float("-inf"))
        for row, allowed in enumerate(sample.support):
            mask[row, list(allowed or range(61))] = 0.0
        logits = logits + mask
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.reply)[:, None]).squeeze(1)


def test_packed_is_padded_is_one_by_one(tmp_path: Path) -> None:
    """Loss and gradients of the packed, prefix-sharing update against transformers, one by one and padded."""
    samples, mine = draw(), learner()
    save_model(mine.parameters.model, tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    weights = torch.randn(sum(s.n_tokens for s in samples), dtype=torch.float64)

    packed = {
        share: mine.parameters.logprobs(lay(samples, share=share), torch.float32)[0]
        for share in (True, False)
    }
    one_by_one = torch.cat([hf_logprobs(plain, sample) for sample in samples])
    for logp in packed.values():
        torch.testing.assert_close(logp.double(), one_by_one, atol=1e-4, rtol=0)

    length = max(len(s.prompt) + s.n_tokens for s in samples)
    ids, mask = torch.zeros(len(samples), length, dtype=torch.long), torch.zeros(len(samples), length)
    for row, s in enumerate(samples):
        whole = torch.tensor([*s.prompt.tolist(), *s.reply.tolist()])
        ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1.0
    logits = plain(ids, attention_mask=mask).logits
    padded = []
    for row, s in enumerate(samples):
        scores = logits[row, len(s.prompt) - 1 : len(s.prompt) + s.n_tokens - 1] / s.temperature
        if s.support is not None:
            kept = torch.full_like(scores, float("-inf"))
            for place, allowed in enumerate(s.support):
                kept[place, list(allowed or ())] = scores[place, list(allowed or ())]
            scores = kept
        padded.append(scores.log_softmax(-1).gather(1, torch.tensor(s.reply)[:, None]).squeeze(1))

    (torch.cat(padded) * weights).sum().backward(retain_graph=True)
    embedding = plain.model.embed_tokens.weight
    assert embedding.grad is not None
    from_padded, embedding.grad = embedding.grad.clone(), None
    (one_by_one * weights).sum().backward()
    torch.testing.assert_close(from_padded, embedding.grad)
    for share in (True, False):
        mine.parameters.model.zero_grad()
        (packed[share].double() * weights).sum().backward()
        found = mine.parameters.model.embed.grad
        assert found is not None
        torch.testing.assert_close(found.double(), embedding.grad, atol=2e-4, rtol=1e-3)


def step(
    micro_tokens: int, precision: str = "float32", **options: Any
) -> tuple[dict[str, float], torch.Tensor]:
    """One optimizer step with plain gradient descent in mind: the gradients it came to."""
    samples = draw()
    mine = learner(micro_tokens=micro_tokens, precision=precision, clip_norm=0, **options)
    own_behaviour(mine, samples)
    algorithm = make_algorithm("grpo", aggregation="unit-mean", unit="episode", entropy=0.01)
    wanted = {id: s._replace(unit=id.split("/")[0]) for id, s in signals(samples).items()}
    metrics = mine.update(algorithm, wanted, [samples])
    gradients = [p.grad.flatten() for p in mine.trained if p.grad is not None]
    return metrics, torch.cat(gradients)


def test_the_micro_batch_size_changes_nothing() -> None:
    whole, expected = step(10_000)
    assert whole["micro_batches"] == 1
    for budget in (1, 50, 120):
        metrics, gradients = step(budget)
        assert metrics["micro_batches"] > 1
        torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-4)
        for name in ("loss", "entropy", "approx_kl", "grad_norm", "clipped"):
            assert metrics[name] == pytest.approx(whole[name], abs=1e-5)


def test_checkpointing_changes_nothing_and_bfloat16_little() -> None:
    _, expected = step(10_000)
    _, checkpointed = step(10_000, checkpointing=True)
    torch.testing.assert_close(checkpointed, expected, atol=1e-6, rtol=1e-5)
    _, rounded = step(10_000, precision="bfloat16")
    assert torch.nn.functional.cosine_similarity(rounded, expected, dim=0) > 0.98


def test_the_order_of_samples_changes_nothing() -> None:
    found = []
    for order in (1, -1):
        samples, mine = draw()[::order], learner()
        own_behaviour(mine, samples)
        mine.update(make_algorithm("grpo"), signals(draw()), [samples])
        found.append(torch.cat([p.detach().flatten() for p in mine.trained]))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


def test_at_zero_staleness_every_ratio_is_one() -> None:
    samples, mine = draw(), learner()
    own_behaviour(mine, samples)
    metrics = mine.update(make_algorithm("grpo"), signals(samples), [samples])
    assert metrics["max_log_ratio"] == 0.0  # the first step is its own start
    assert metrics["max_mismatch"] < 1e-4
    assert metrics["clipped"] == 0.0


def test_proximal_is_the_start_of_the_update_in_every_step() -> None:
    """Two epochs of two mini-batches: ratios move away from one, and are measured from where the update began."""
    samples, mine = draw(), learner(lr=1e-3)
    own_behaviour(mine, samples)
    start = {s.id: s.behaviour for s in samples}
    seen: list[float] = []

    class Watching(type(make_algorithm("grpo"))):  # type: ignore[misc]
        def loss(self, batch: Any, denominators: Any) -> Any:
            expected = np.concatenate([start[id] for id in batch.ids])
            seen.append(float((batch.proximal - torch.from_numpy(expected)).abs().max()))
            return super().loss(batch, denominators)

    minibatches = [samples[:6], samples[6:], samples[6:], samples[:6]]
    metrics = mine.update(Watching(), signals(samples), minibatches)
    assert len(seen) == 4 and max(seen) < 1e-4
    assert metrics["max_log_ratio"] > 1e-4 and mine.steps == 4
    assert all(sample.proximal_at == 0 for sample in samples)


def test_decisions_without_advantage_cost_nothing() -> None:
    """The step is that of an update that computes them all; with a KL term they are computed, for they are pulled back."""

    class Thorough(type(make_algorithm("grpo"))):  # type: ignore[misc]
        skips_still = False

    samples, few = draw(), {"micro_tokens": 60}
    own = signals(samples)
    equal = {s.id: own[s.id]._replace(advantage=0.0) for s in samples[2:10]}
    quick, thorough = learner(**few), learner(**few)
    brief = quick.update(make_algorithm("grpo"), {**own, **equal}, [samples[:6], samples[6:]])
    whole = thorough.update(Thorough(), {**own, **equal}, [samples[:6], samples[6:]])
    assert brief["micro_batches"] < whole["micro_batches"]
    assert brief["policy_loss"] == pytest.approx(whole["policy_loss"], abs=1e-5)
    for name, parameter in quick.parameters.named().items():
        torch.testing.assert_close(parameter, thorough.parameters.named()[name], atol=1e-6, rtol=1e-4)

    pulled = learner(**few)
    pulled.reference = learner().parameters
    counts = pulled.update(make_algorithm("grpo", kl_loss=0.1), {**own, **equal}, [samples[:6], samples[6:]])
    assert counts["micro_batches"] == whole["micro_batches"]


def test_a_mini_batch_of_equal_groups_is_a_step_all_the_same() -> None:
    samples = draw()
    still = {s.id: Signal(s.id, 0.0) for s in samples}
    mine = learner()
    before = [parameter.detach().clone() for parameter in mine.trained]
    metrics = mine.update(make_algorithm("grpo"), still, [samples])
    assert mine.steps == 1 and metrics["micro_batches"] == 1 and metrics["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, mine.trained, strict=True))


def test_a_later_mini_batch_of_equal_groups_is_measured_at_the_start_too() -> None:
    """The engine's log-probs are compared with those before the update, whichever rows a step computes."""
    samples, mine = draw(), learner(lr=3e-2)
    own_behaviour(mine, samples)
    own = signals(samples)
    still = {s.id: own[s.id]._replace(advantage=0.0) for s in samples[4:]}
    metrics = mine.update(make_algorithm("grpo"), {**own, **still}, [samples[:6], samples[6:], samples[4:6]])
    assert mine.steps == 3 and metrics["max_mismatch"] < 1e-4


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failed_update_is_an_error_and_changes_nothing(broken: int, tmp_path: Path) -> None:
    """A NaN in the first or in a later mini-batch: parameters and optimizer as before, the batch kept."""
    samples = draw()
    settings = Learning(lr=1e-2, snapshot=True)
    mine = Learner("shared", Parameters(model()), settings, inspection=tmp_path / "inspect")
    own_behaviour(mine, samples)
    mine.update(make_algorithm("grpo"), signals(samples), [samples])  # so that the optimizer has a state
    before, moments = mine.parameters.state_dict(), mine.optimiser.state_dict()["state"][0]["exp_avg"].clone()
    poisoned = signals(samples)
    halves = [samples[:6], samples[6:]]
    bad = halves[broken][2].id
    poisoned[bad] = poisoned[bad]._replace(advantage=float("nan"))
    with pytest.raises(UpdateError, match="loss is nan") as caught:
        mine.update(make_algorithm("grpo"), poisoned, halves)
    for name, tensor in mine.parameters.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert torch.equal(mine.optimiser.state_dict()["state"][0]["exp_avg"], moments)
    assert mine.steps == 1
    (file,) = (tmp_path / "inspect").iterdir()
    assert str(file) in str(caught.value)
    assert bad in torch.load(file)["batch"]["ids"]
    mine.update(make_algorithm("grpo"), signals(samples), halves)  # and goes on


def test_without_a_snapshot_a_failed_update_keeps_its_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied; the step that failed changed nothing, the one before it stands, and the error says so."""
    monkeypatch.setattr(Learner, "_snapshot", lambda self: pytest.fail("copied"))
    samples = draw()
    first, second = samples[:6], samples[6:]
    mine, same = learner(lr=1e-2), learner(lr=1e-2)
    for one in (mine, same):
        own_behaviour(one, samples)
    poisoned = signals(samples)
    poisoned[second[2].id] = poisoned[second[2].id]._replace(advantage=float("nan"))
    with pytest.raises(UpdateError, match="as after the 1 optimiser steps"):
        mine.update(make_algorithm("grpo"), poisoned, [first, second])
    same.update(make_algorithm("grpo"), signals(samples), [first])
    assert mine.steps == same.steps == 1
    for own, other in zip(mine.trained, same.trained, strict=True):
        assert torch.equal(own, other) and own.grad is None


def test_an_update_without_samples_is_an_error() -> None:
    with pytest.raises(UpdateError, match="needs samples"):
        learner().update(make_algorithm("grpo"), {}, [])
    with pytest.raises(KeyError, match="no signal"):
        learner().update(make_algorithm("grpo"), {}, [draw()])


def test_a_critic_learns_what_a_state_is_worth() -> None:
    """Values start at 0; summaries compose; the critic then fits returns, and the policy's update is refused to it."""
    samples = draw()
    critic = learner(Parameters(model(), critic=True), lr=3e-3)
    algorithm = make_algorithm("ppo", gamma=0.9, lam=0.8, value_clip=None)
    errors, explained = [], []
    for _ in range(30):
        critic.measure_values(samples)
        found = summaries(samples, Discount(0.9, 0.8))
        if not errors:
            assert all(v.first == v.after == v.sum_local == 0.0 for v in found.values())
        tails = {s.id: Signal(s.id, None, tail=1.0 - found[s.id].first) for s in samples}
        metrics = critic.update(algorithm, tails, [samples])
        errors.append(metrics["value_loss"])
        explained.append(metrics["explained_variance"])
    assert errors[-1] < 0.1 * errors[0]
    assert explained[0] == 0.0 and explained[-1] > 0.3  # values of 0 foresee nothing
    with pytest.raises(UpdateError, match="no critic_loss"):
        critic.update(make_algorithm("grpo"), signals(samples), [samples])


def test_adapters_learn_and_leave_the_base_alone() -> None:
    base = model()
    base.add_adapter("a")
    base.add_adapter("b")
    base.requires_grad_(False)
    first, second = Parameters(base, "a"), Parameters(base, "b")
    before = {n: p.detach().clone() for n, p in base.named_parameters() if ".adapters.a." not in n}
    samples, mine = draw(), learner(first)
    own_behaviour(mine, samples)
    mine.update(make_algorithm("grpo"), signals(samples), [samples])
    assert all(torch.equal(tensor, dict(base.named_parameters())[name]) for name, tensor in before.items())
    assert any(bool(p.abs().sum() > 0) for n, p in first.named().items() if n.endswith("up"))
    assert first.named().keys().isdisjoint(second.named())


def test_micro_batches_hold_every_sample_once_within_budget() -> None:
    samples = draw(30)
    cut = micro_batches(samples, 90)
    assert sorted(i for micro in cut for i in micro) == list(range(30))
    assert all(len(lay([samples[i] for i in micro]).packed) <= 90 for micro in cut)
    separate = sum(len(s.prompt) + s.n_tokens - 1 for s in samples)
    assert (
        sum(len(lay([samples[i] for i in micro]).packed) for micro in micro_batches(samples, 10**6))
        < separate / 2
    )


def test_learning_rate_schedules() -> None:
    linear = Learning(lr=1.0, schedule="linear", warmup=2, horizon=12, final=0.0)
    assert [linear.rate(step) for step in (0, 1, 2, 7, 12, 99)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    )
    cosine = Learning(lr=1.0, schedule="cosine", horizon=10, final=0.1)
    assert [cosine.rate(step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.55, 0.1])
    with pytest.raises(ValueError, match="horizon > warmup"):
        Learning(schedule="cosine", warmup=5, horizon=5)
    with pytest.raises(ValueError, match=r"needs learning\.horizon"):
        Learning(schedule="cosine").rate(1)
    with pytest.raises(ValueError, match=r"needs learning\.horizon"):
        Learner("team", learner().parameters, Learning(schedule="cosine", warmup=5))


def test_ratio_metrics_see_a_stale_engine() -> None:
    samples, mine = draw(), learner()
    own_behaviour(mine, samples)
    for sample in samples:
        sample.behaviour = sample.behaviour + np.float32(0.25)
    metrics = mine.update(make_algorithm("grpo"), signals(samples), [samples])
    assert metrics["max_mismatch"] == pytest.approx(0.25, abs=1e-4)


def test_thinking_that_is_not_trained_is_context() -> None:
    """The gradients are those of a prompt that holds the thoughts, and a reply without them."""

    def gradients(samples: list[Sample], **options: Any) -> torch.Tensor:
        mine = learner(clip_norm=0, **options)
        own_behaviour(mine, samples)
        mine.update(make_algorithm("grpo", aggregation="token-mean"), signals(samples), [samples])
        return torch.cat([p.grad.flatten() for p in mine.trained if p.grad is not None])

    thinking, apart = draw(), draw()
    for one, other in zip(thinking, apart, strict=True):
        one.thinking = n = one.n_tokens // 2
        other.prompt, other.reply = np.concatenate([other.prompt, other.reply[:n]]), other.reply[n:]
        other.behaviour = other.behaviour[n:]
        other.support = other.support and other.support[n:]
    expected = gradients(apart)
    torch.testing.assert_close(gradients(thinking, thinking=False), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(gradients(thinking), expected, atol=1e-3)
