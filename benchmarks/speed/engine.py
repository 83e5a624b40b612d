"""How fast the engine is, against transformers' own `model.generate` on the same prompts.

    python -m unitymas.benchmarks.speed.engine [--dtype bfloat16] [--requests 256] [--batch 64] [--threads 1]

One Llama of 2.4M parameters with random weights; prompts of 60-200 random tokens, 32 sampled tokens each, nothing
shared between prompts. `generate` gets them sorted by length, in batches, which is the best case for it. Both are
measured twice, in turns, and the better time counts; processor time is printed beside wall time, because it holds
on a machine that others use too. Then the engine alone with samples of one prompt (shared prefixes), and with
requests of uneven lengths (where a static batch waits for its longest).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from ...agents.engine import Engine
from ...agents.sampling import SamplingParams
from ...agents.weights import from_config, to_hf

VOCAB, NEW = 2048, 32


def models(dtype: torch.dtype) -> tuple[Any, Any]:
    """Our decoder and transformers' model with the same random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    ours = from_config(config)
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    return ours, theirs.to(dtype).eval()


def timed(work: Callable[[], int], times: int = 2) -> tuple[float, float]:
    """Best tokens per second: by the clock, by the processor."""
    wall, cpu = 0.0, 0.0
    for _ in range(times):
        clock, processor = time.perf_counter(), time.process_time()
        tokens = work()
        wall = max(wall, tokens / (time.perf_counter() - clock))
        cpu = max(cpu, tokens / (time.process_time() - processor))
    return wall, cpu


def generate(model: Any, prompts: list[list[int]], batch: int) -> int:
    """transformers: sorted by length, padded on the left, `batch` at a time."""
    ordered = sorted(prompts, key=len)
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        longest = max(map(len, part))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in part])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=seen, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=0
            )
    return len(prompts) * NEW


def engine(
    model: Any, prompts: list[list[int]], lengths: list[int], slots: int, dtype: torch.dtype
) -> Callable[[], int]:
    worker = Engine(model, slots=slots, context=256, dtype=dtype, stop_ids=())

    def work() -> int:
        worker.publish(model, worker.version + 1)  # no prefix from the time before
        requests = [
            worker.submit(p, SamplingParams(max_tokens=n, seed=i))
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        while worker.busy:
            worker.step()
        return sum(len(r.ids) for r in requests)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="generate's batch, and the engine's slots")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    ours, theirs = models(dtype)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(60, 200))] for _ in range(args.requests)]
    uneven = [rng.choice((4, 8, 16, 32)) for _ in prompts]
    samples = [p for p in prompts[: args.requests // 8] for _ in range(8)]
    runs = {
        "model.generate": lambda: generate(theirs, prompts, args.batch),
        "engine": engine(ours, prompts, [NEW] * len(prompts), args.batch, dtype),
        "engine, 8 samples a prompt": engine(ours, samples, [NEW] * len(samples), args.batch, dtype),
        "engine, 4-32 new tokens": engine(ours, prompts, uneven, args.batch, dtype),
    }
    print(f"{args.dtype}, {args.requests} prompts, batch {args.batch}, {args.threads} threads: new tokens/s")
    figures = {name: timed(run) for name, run in runs.items()}
    base_wall, base_cpu = figures["model.generate"]
    for name, (wall, cpu) in figures.items():
        print(
            f"{name:28} {wall:8.0f} by the clock ({wall / base_wall:.2f}x) {cpu:8.0f} by cpu ({cpu / base_cpu:.2f}x)"
        )


if __name__ == "__main__":
    main()
