"""Memory of one optimizer step, for groups of 1, 2 and 4 ranks: measured for a small model, computed for large ones.

    unitymas bench memory [--shape 0.5B] [--ranks 1,2,4] [--moments 8bit] [--parameters bfloat16]

Measured, on a CPU with gloo: bytes of the parameters, gradients and optimizer that each rank holds after a step, and the
most memory of its process during the step and during an export. The process itself (Python and torch, in part shared by
the ranks) is in it. A rank also gathers one layer at a time, and the embedding while a pass runs: that part does not divide.

Computed, and labelled so: the same parts for 7B and 32B in bfloat16 with float32 masters, by adding up sizes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...trainers.algorithms import make_algorithm
from ...trainers.config.group_settings import GroupSpec, Learning, PolicySpec
from ...trainers.controller.statistics.table import Signal
from ...trainers.group.sample_store import Sample

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128},
    "0.1B": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8,
             "num_key_value_heads": 2, "vocab_size": 65_536},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936},
}  # fmt: skip
"""Shapes to measure; 0.5B is that of Qwen2.5-0.5B."""
LARGE = {
    "7B": {"layers": 28, "d": 3584, "ffn": 18_944, "kv": 512, "vocab": 152_064},
    "32B": {"layers": 64, "d": 5120, "ffn": 27_648, "kv": 1024, "vocab": 152_064},
}
"""Shapes to compute: those of Qwen2.5-7B and Qwen2.5-32B, whose heads are not tied."""


def main(argv: list[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks to measure")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of the step")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, where memory is short")
    parser.add_argument("--moments", choices=("float32", "8bit"), default="float32")
    parser.add_argument("--parameters", choices=("float32", "bfloat16"), default="float32")
    a = parser.parse_args(argv)
    if a.layers:
        SHAPES[a.shape]["num_hidden_layers"] = a.layers
    learning = Learning(
        micro_tokens=max(1, a.tokens // 2),
        checkpointing=True,
        precision=a.parameters,
        parameters=a.parameters,
        moments=a.moments,
    )
    layers = SHAPES[a.shape]["num_hidden_layers"]
    print(
        f"measured: one step of {a.tokens} tokens, {a.shape}, {layers} layers, parameters {a.parameters}, "
        f"moments {a.moments}, MiB"
    )
    print("ranks  of rank   parameters  gradients  optimizer  peak of the step  peak of the export")
    with tempfile.TemporaryDirectory() as folder:
        save(a.shape, Path(folder))
        for n in map(int, a.ranks.split(",")):
            for index, sizes in enumerate(measure(Path(folder), n, a.tokens, learning)):
                mib = {name: size / 2**20 for name, size in sizes.items()}
                print(
                    f"{n:5}  {index:7}   {mib['parameters']:10,.1f}  {mib['gradients']:9,.1f}  "
                    f"{mib['optimizer']:9,.1f}  {mib['peak']:16,.1f}  {mib['export']:18,.1f}",
                    flush=True,
                )
    for lean in (False, True):
        kept = "parameters bfloat16, moments 8bit" if lean else "float32 masters"
        print(
            f"\ncomputed: bfloat16, {kept}, activation checkpointing, 16,384 tokens a micro-batch, GB for each rank"
        )
        print("model  ranks   sharded  gathered  activations     sum")
        for name in LARGE:
            for n in (1, 2, 4, 8, 16):
                parts = computed(name, n, lean=lean)
                figures = "  ".join(f"{value:9.1f}" for value in (*parts, sum(parts)))
                print(f"{name:5}  {n:5} {figures}")


def save(shape: str, folder: Path) -> None:
    """Write a model of random weights."""
    import torch
    from transformers import Qwen2Config

    from ...agents.model.weights import from_config, save_model

    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=1024, tie_word_embeddings=True)
    save_model(from_config(config).to(torch.bfloat16), folder)


def measure(model: Path, ranks: int, tokens: int, learning: Learning) -> list[dict[str, int]]:
    """Take two optimizer steps over so many ranks, and export. Return what each rank held."""
    from ...trainers.group.ranks.forked import RankProcesses

    spec = GroupSpec(
        name="main",
        model=str(model),
        policies={"team": PolicySpec(learning=learning)},
        ranks=ranks,
        threads=1,
    )
    rng = np.random.default_rng(0)
    samples = [
        Sample("e", str(i), "team", 0, rng.integers(1, 100, tokens // 8), rng.integers(1, 100, tokens // 8),
               np.zeros(tokens // 8, np.float32))
        for i in range(4)
    ]  # fmt: skip
    signals = {sample.id: Signal(sample.id, float(i % 3 - 1)) for i, sample in enumerate(samples)}
    processes = RankProcesses(spec)
    try:
        for _ in range(2):  # the second has its optimizer from the beginning
            processes.call("memory")
            processes.call("update", "team", make_algorithm("grpo"), signals, [samples])
        held: list[dict[str, int]] = processes.call("memory")
        processes.call("rest", "team")
        processes.call("memory")
        with tempfile.TemporaryDirectory() as folder:
            processes.call("export", "team", Path(folder), 1 << 30)
        peaks = [rank["peak"] for rank in processes.call("memory")]
        return [{**rank, "export": peak} for rank, peak in zip(held, peaks, strict=True)]
    finally:
        processes.close()


def computed(name: str, ranks: int, tokens: int = 16_384, lean: bool = False) -> tuple[float, float, float]:
    """Add up what one rank needs, in GB: its shards, what it gathers, and activations. `lean`: parameters and gradients in
    bfloat16, moments in 8 bits.
    """
    s = LARGE[name]
    layer = s["d"] * (2 * s["d"] + 2 * s["kv"] + 3 * s["ffn"])
    ends = 2 * s["vocab"] * s["d"]
    each = 2 + 2 + 2 * (1 + 4 / 256) if lean else 16  # float32: masters, gradients, two moments
    sharded = each * (s["layers"] * layer + ends) / ranks
    # bfloat16 weights and gradients of both ends, of a layer, and of the next that is fetched meanwhile
    gathered = 0 if ranks == 1 else 4 * (ends + 2 * layer)
    kept = 2 * tokens * s["layers"] * s["d"]
    inside = (
        2 * tokens * (8 * s["d"] + 4 * s["ffn"]) + 3 * 2**29
    )  # of the layer that is computed again; scores
    return sharded / 1e9, gathered / 1e9, (kept + inside) / 1e9


if __name__ == "__main__":
    main()
