"""Update on a GPU: tokens per second and model FLOP utilisation, compared with a bare pass and with padded transformers.

A step learns from four replies to one prompt. `tokens/s` counts prompt and reply of every sample, on all sides. `MFU` divides
the necessary operations by the device's peak. Our side needs a shared prompt once. Padding and recomputation never count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....agents import model_path
from ....agents.engines.sampling import SamplingParams
from ....agents.engines.torch.torch_engine import TorchEngine
from ....agents.model import attention
from ....agents.model.attention import PackedAttention, Segment, pack
from ....agents.model.llama import Llama
from ....agents.model.shape import Shape, shape_of
from ....agents.model.weights import load_model
from ....trainers.algorithms import make_algorithm
from ....trainers.config.group_settings import Learning
from ....trainers.controller.statistics.table import Signal
from ....trainers.group.learning.packing import lay
from ....trainers.group.learning.parameters import Parameters
from ....trainers.group.learning.update import Learner
from ....trainers.group.sample_store import Sample
from .model_sizes import Measurement, Stand, n_tokens, samples_of

PEAKS = {"H100": 989e12, "H200": 989e12, "H20": 148e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12,
         "4090": 165e12, "A10": 125e12}  # fmt: skip
"""Dense bfloat16 operations per second as published, by a part of the device's name."""

TOLERANCE = {"loss": 1e-3, "grad_norm": 1e-3, "weights": 1e-5}
"""Largest relative difference of a float32 step on the GPU from the same step on the CPU."""


def product(bench: Stand) -> Iterator[Measurement]:
    """Measure one large matrix product: the practical peak of the device."""

    def work() -> Measurement:
        n = bench.sizes.product
        a = torch.randn(n, n, device=bench.device, dtype=bench.dtype)
        rate = 2 * n**3 / bench.seconds(lambda: a @ a, warm=3, times=5)
        return {"TFLOP/s": round(rate / 1e12, 3), "published": published(bench)}

    yield from bench.measure({"what": "matrix product"}, work)


def published(bench: Stand) -> float | None:
    """Return the published peak of the device in TFLOP/s, or None for an unknown device."""
    if bench.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(bench.device)
    known = sorted((key for key in PEAKS if key in name), key=len)
    return PEAKS[known[-1]] / 1e12 if known else None


# the update ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateCase:
    """Update of a shape from these samples."""

    bench: Stand
    shape: str
    samples: list[Sample]
    checkpointing: bool
    budget: int
    """Largest number of tokens of a micro-batch."""


TimedUpdate = tuple[Callable[[], object], float]
"""Function that makes one update, and its operations."""


def update(bench: Stand, shape: str) -> Iterator[Measurement]:
    """Measure a shape at every context, with and without activation checkpointing, in three ways."""
    vocab = bench.config(shape).vocab_size
    for context in bench.sizes.contexts:
        for checkpointing in (False, True):
            samples = samples_of(context, vocab)
            ways = {"ours": ours, "bare": bare, "transformers padded": padded}
            if checkpointing:
                ways["ours, 6 bytes a parameter"] = lean
            case = UpdateCase(bench, shape, samples, checkpointing, budget=2 * context)
            for way, make in ways.items():
                what: Measurement = {
                    "what": way,
                    "shape": shape,
                    "context": context,
                    "checkpointing": checkpointing,
                }
                yield from bench.measure(what, partial(_timed, make, case))


def _timed(make: Callable[[UpdateCase], TimedUpdate], case: UpdateCase) -> Measurement:
    step, operations = make(case)
    seconds = case.bench.seconds(step)
    peak = published(case.bench)
    return {
        "tokens/s": round(n_tokens(case.samples) / seconds),
        "seconds": round(seconds, 4),
        "TFLOP/s": round(operations / seconds / 1e12, 3),
        "MFU": None if peak is None else round(operations / seconds / 1e12 / peak, 3),
    }


def ours(case: UpdateCase) -> TimedUpdate:
    """Return our update: packing, loss, backward pass, clipping, AdamW with float32 masters."""
    precision: Literal["float32", "bfloat16"] = (
        "bfloat16" if case.bench.dtype == torch.bfloat16 else "float32"
    )
    settings = Learning(micro_tokens=case.budget, precision=precision, checkpointing=case.checkpointing)
    return _our_step(case.bench.model(case.shape), settings, case.samples)


def lean(case: UpdateCase) -> TimedUpdate:
    """Return our update with parameters and gradients in bfloat16 and moments in 8 bits."""
    settings = Learning(
        micro_tokens=case.budget,
        precision="bfloat16",
        parameters="bfloat16",
        moments="8bit",
        checkpointing=case.checkpointing,
    )
    return _our_step(case.bench.model(case.shape, torch.bfloat16), settings, case.samples)


def _our_step(model: Llama, settings: Learning, samples: list[Sample]) -> TimedUpdate:
    learner = Learner("team", Parameters(model), settings)
    algorithm = make_algorithm("grpo", dual_clip=None)
    signals = {s.id: Signal(s.id, float(i % 3 - 1)) for i, s in enumerate(samples)}
    return lambda: learner.update(algorithm, signals, [samples]), _our_operations(model, samples)


def bare(case: UpdateCase) -> TimedUpdate:
    """Return forward and backward pass of the same packed row, without loss (sum of log-probs) and optimizer."""
    model = case.bench.model(case.shape)
    parameters = Parameters(model)
    rows = lay(case.samples)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        logp, _ = parameters.logprobs(rows, case.bench.dtype, case.checkpointing)
        logp.sum().backward()

    return step, _our_operations(model, case.samples)


def padded(case: UpdateCase) -> TimedUpdate:
    """Return the update of plain transformers: padded rows, all scores, autocast, AdamW with float32 masters."""
    bench, samples = case.bench, case.samples
    model = bench.theirs(bench.config(case.shape), torch.float32)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    width = max(len(s.prompt) + s.n_tokens for s in samples)
    at_once = max(1, case.budget // width)

    def step() -> None:
        for start in range(0, len(samples), at_once):
            part = samples[start : start + at_once]
            ids = torch.zeros(len(part), width, dtype=torch.long)
            seen = torch.zeros_like(ids)
            for i, s in enumerate(part):
                whole = torch.from_numpy(np.concatenate((s.prompt, s.reply)))
                ids[i, : len(whole)], seen[i, : len(whole)] = whole, 1
            ids, seen = ids.to(bench.device), seen.to(bench.device)
            with torch.autocast(bench.device.type, bench.dtype, enabled=bench.dtype != torch.float32):
                scores = model(input_ids=ids, attention_mask=seen).logits
            loss = ids.new_zeros((), dtype=torch.float32)
            for i, s in enumerate(part):
                begin, n = len(s.prompt), s.n_tokens
                loss = loss + F.cross_entropy(
                    scores[i, begin - 1 : begin + n - 1].float(), ids[i, begin : begin + n]
                )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    sizes = shape_of(bench.config(case.shape))
    operations = sum(
        _operations(sizes, len(s.prompt) + s.n_tokens, s.n_tokens, _pairs(len(s.prompt) + s.n_tokens))
        for s in samples
    )
    return step, operations


def _our_operations(model: Llama, samples: Sequence[Sample]) -> float:
    packed = lay(samples).packed
    pairs = sum(_pairs(s.stop - s.start, _context(packed.segments, s)) for s in packed.segments)
    return _operations(model.shape, len(packed), sum(s.n_tokens for s in samples), pairs)


def _context(segments: Sequence[Segment], segment: Segment) -> int:
    """Return the number of tokens before a segment in its sequence."""
    before = 0
    while segment.parent >= 0:
        segment = segments[segment.parent]
        before += segment.stop - segment.start
    return before


def _pairs(n: int, context: int = 0) -> float:
    """Return the number of pairs of a query and a visible key."""
    return n * context + n * (n + 1) / 2


def _operations(shape: Shape, tokens: int, scored: int, pairs: float) -> float:
    """Return the floating-point operations of a forward and a backward pass."""
    heads = shape.heads * shape.head_width
    of_layer = shape.d * (2 * heads + 2 * shape.kv_heads * shape.head_width + 3 * shape.ffn)
    products = 6.0 * (tokens * shape.layers * of_layer + scored * shape.vocab * shape.d)
    return products + 12.0 * shape.layers * heads * pairs


# attention alone -----------------------------------------------------------------------------------------


def packed_attention(bench: Stand) -> Iterator[Measurement]:
    """Measure one layer's attention over a packed row with a shared prefix. Memory must not grow with the squared length."""
    for context in bench.sizes.contexts:
        for way in ("fused", "with masks"):
            yield from bench.measure(
                {"what": f"attention {way}", "context": context},
                partial(_attention, bench, context, way == "fused"),
            )


def _attention(bench: Stand, context: int, fused: bool) -> Measurement:
    packed = pack([[1] * (context * 3 // 4) + [2 + i] * (context // 4) for i in range(4)])
    plain = attention.fused
    attention.fused = lambda device: fused
    try:
        attend = PackedAttention(packed.segments, bench.dtype, bench.device)
        q, k, v = (
            torch.randn(len(packed), n, 64, device=bench.device, dtype=bench.dtype, requires_grad=True)
            for n in (16, 8, 8)
        )
        seconds = bench.seconds(lambda: attend(0, q, k, v).sum().backward())
    finally:
        attention.fused = plain
    return {"seconds": round(seconds, 5), "tokens/s": round(len(packed) / seconds)}


# a mixture of experts ------------------------------------------------------------------------------------


def mixture(bench: Stand) -> Iterator[Measurement]:
    """Measure some layers of Qwen3-30B-A3B in transformers: the cost of a decoder with experts."""
    layers = bench.sizes.mixture_layers
    for context in bench.sizes.contexts[:2]:
        what: Measurement = {
            "what": f"{layers} of 48 layers, transformers",
            "shape": "Qwen3-30B-A3B",
            "context": context,
        }
        yield from bench.measure(what, partial(_mixture, bench, context))


def _mixture(bench: Stand, context: int) -> Measurement:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**bench.sizes.mixture | {"num_hidden_layers": bench.sizes.mixture_layers})
    model = bench.theirs(config, bench.dtype)
    ids = torch.randint(1, config.vocab_size, (1, context), device=bench.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.model(input_ids=ids).last_hidden_state.float().square().mean().backward()

    seconds = bench.seconds(step)
    return {"tokens/s": round(context / seconds), "seconds": round(seconds, 4)}


# the same step on both devices ---------------------------------------------------------------------------


def same_step(bench: Stand) -> Iterator[Measurement]:
    """Make one PPO step of the embedded tiny team on this device and on the CPU, from the same samples, and compare."""
    yield from bench.measure({"what": "tiny PPO step", "tolerance": TOLERANCE}, partial(_same_step, bench))


def _same_step(bench: Stand) -> Measurement:
    model = load_model(model_path("tiny"))
    samples = _tiny_samples(model)
    here, there = (_tiny_step(model, samples, device) for device in (bench.device, torch.device("cpu")))
    far = {
        name: abs(here[0][name] - there[0][name]) / max(abs(there[0][name]), 1e-6)
        for name in ("loss", "grad_norm")
    }
    far["weights"] = max(_distance(a, b) for a, b in zip(here[1], there[1], strict=True))
    return {
        "differences": {name: float(f"{value:.2g}") for name, value in far.items()},
        "equal": all(far[name] <= TOLERANCE[name] for name in TOLERANCE),
    }


def _tiny_samples(model: Llama) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, model.shape.vocab, (40,), generator=generator).tolist() for _ in range(8)]
    results = TorchEngine(model, slots=8, stop_ids=()).generate(prompts, SamplingParams(max_tokens=16))
    return [
        Sample.of({
            "episode": "tiny", "node": str(i), "policy": "team", "version": 0, "prompt": torch.tensor(r.prompt_ids),
            "reply": torch.tensor(r.ids), "behaviour": torch.tensor(r.logprobs),
        })
        for i, r in enumerate(results)
    ]  # fmt: skip


def _tiny_step(
    model: Llama, samples: Sequence[Sample], device: torch.device
) -> tuple[dict[str, float], list[Tensor]]:
    """Make one step of a policy and its critic. Return the policy's metrics, and the weights of both."""
    own = [copy.copy(sample) for sample in samples]
    learners = [
        Learner("team", Parameters(copy.deepcopy(model).to(device), critic=critic), Learning(lr=1e-4))
        for critic in (False, True)
    ]
    learners[1].measure_values(own)
    algorithm = make_algorithm("ppo")
    signals = {s.id: Signal(s.id, None, tail=float(i % 2)) for i, s in enumerate(own)}
    metrics, _ = (learner.update(algorithm, signals, [own]) for learner in learners)
    return metrics, [t for learner in learners for t in learner.parameters.state_dict().values()]


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the relative distance of two tensors."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-6))
