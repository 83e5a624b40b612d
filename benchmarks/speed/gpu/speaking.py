"""Decode on a GPU: new tokens per second of our engine and of transformers' `generate`, and the time of a publish."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from ....agents.engines.sampling import SamplingParams
from ....agents.engines.torch.cuda_graphs import DecodeGraphs
from ....agents.engines.torch.torch_engine import TorchEngine
from .model_sizes import Measurement, Stand


def decode(bench: Stand, shape: str) -> Iterator[Measurement]:
    """Measure decode at every batch size: recorded steps, plain steps, and `generate` with a static cache."""
    recorded = "CUDA graphs" if bench.device.type == "cuda" else "fixed sizes"
    ways = {
        f"engine, {recorded}": partial(_engine, bench, shape, graphs=True),
        "engine, plain steps": partial(_engine, bench, shape, graphs=False),
        "generate, dynamic cache": partial(_generate, bench, shape, cache="dynamic"),
        # the last, because transformers compiles it, which may take all the time that is left
        "generate, static cache": partial(_generate, bench, shape, cache="static"),
    }
    for way, measure in ways.items():
        for batch in bench.sizes.batches:
            yield from bench.measure(
                {"what": way, "shape": shape, "batch": batch}, partial(measure, batch=batch)
            )


def _prompts(bench: Stand, shape: str, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocab = bench.config(shape).vocab_size
    return torch.randint(1, vocab, (batch, bench.sizes.prompt), generator=generator).tolist()


def _engine(bench: Stand, shape: str, batch: int, graphs: bool) -> Measurement:
    context = bench.sizes.prompt + bench.sizes.reply
    model = bench.model(shape, bench.dtype)
    engine = TorchEngine(
        model, slots=batch, context=context, dtype=bench.dtype, stop_ids=(), share_prefixes=False
    )
    del model
    engine.graphs = DecodeGraphs(engine.model) if graphs else None
    prompts = _prompts(bench, shape, batch)
    rates, first = [], 0.0
    for _ in range(3):  # the first records the steps
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, SamplingParams(max_tokens=bench.sizes.reply, seed=i))
        bench.finish()
        began = time.perf_counter()
        while engine.waiting or not engine.running:
            engine.step()
        bench.finish()
        first, spoken = time.perf_counter() - began, engine.counts["tokens_spoken"]
        decoding = time.perf_counter()
        while engine.busy:
            engine.step()
        bench.finish()
        rates.append((engine.counts["tokens_spoken"] - spoken) / (time.perf_counter() - decoding))
    return {
        "tokens/s": round(max(rates[1:])),
        "prefill tokens/s": round(batch * bench.sizes.prompt / first),
        "recorded": len(engine.graphs.recorded) if engine.graphs else 0,
    }


def _generate(bench: Stand, shape: str, batch: int, cache: str) -> Measurement:
    model = bench.theirs(bench.config(shape), bench.dtype).eval()
    ids = torch.tensor(_prompts(bench, shape, batch), device=bench.device)
    how: dict[str, object] = {"do_sample": True, "top_k": 0, "attention_mask": torch.ones_like(ids)}
    if cache == "static":
        how["cache_implementation"] = "static"

    new = bench.sizes.reply

    @torch.inference_mode()
    def speak() -> None:
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, **how)

    # not `generate` with one token: a static cache of another size would be compiled again
    @torch.inference_mode()
    def read() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    whole = bench.seconds(speak, warm=2)
    prefill = bench.seconds(read)
    return {"tokens/s": round(batch * (new - 1) / max(whole - prefill, 1e-9))}


def publish(bench: Stand, shape: str) -> Iterator[Measurement]:
    """Measure the time of new weights from the learner's parameters to the engine, and until it generates again."""
    yield from bench.measure({"what": "publish", "shape": shape}, partial(_publish, bench, shape))


def _publish(bench: Stand, shape: str) -> Measurement:
    model = bench.model(shape)
    engine = TorchEngine(model, slots=8, context=128, dtype=bench.dtype, stop_ids=())
    versions = iter(range(1, 100))
    seconds = bench.seconds(lambda: engine.publish(model, next(versions)))
    prompt = _prompts(bench, shape, 1)[0][:32]
    bench.finish()
    began = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=2))
    bench.finish()
    gigabytes = sum(p.numel() * p.element_size() for p in engine.model.parameters()) / 2**30
    return {
        "seconds": round(seconds, 4),
        "GiB": round(gigabytes, 3),
        "seconds to the next token": round(time.perf_counter() - began, 4),
    }
