"""Memory of one optimizer step, for groups of 1, 2 and 4 ranks: measured for a small model, computed for large ones.

    unitymas bench memory [--shape 0.5B] [--ranks 1,2,4] [--moments 8bit] [--parameters bfloat16]

Measured, on a CPU with gloo: bytes of the parameters, gradients and optimizer that each rank holds after a step, and the peak
memory of its process in each phase: loading, forward, backward, optimizer step, export. All of these include the process
itself (Python and torch, partly shared by the ranks). A rank also gathers one layer at a time, which does not divide.

Counted: the bytes that ranks hold after a step, from the shards that FSDP2 makes of a model without weights. This takes no
memory, so it also works for large shapes. `--count` does only this.

Computed, and labelled so: the needs of a rank for 7B and 32B in bfloat16 with float32 masters, as a sum of sizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from ....cli.arguments import COUNT, counts, module_parser, number
from ....trainers.algorithms import make_algorithm
from ....trainers.config.group_settings import GroupSpec, Learning, PolicySpec
from ....trainers.controller.statistics.table import Signal
from ....trainers.group.sample_store import Sample

SHAPES: dict[str, dict[str, int | bool]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128},
    "0.1B": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8,
             "num_key_value_heads": 2, "vocab_size": 65_536},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
             "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 40,
             "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
"""Shapes of Qwen2.5, except for the two smallest. Those above 0.5B are only counted."""
PHASES = ("began", "load", "loaded", "forward", "backward", "step", "after", "export")
"""Moments of a rank's process: before loading, peak of loading, after loading, peak of each phase of a step, after the step,
peak of an export.
"""
LARGE = {
    "7B": {"layers": 28, "d": 3584, "ffn": 18_944, "kv": 512, "vocab": 152_064},
    "32B": {"layers": 64, "d": 5120, "ffn": 27_648, "kv": 1024, "vocab": 152_064},
}
"""Shapes to compute: those of Qwen2.5-7B and Qwen2.5-32B, whose heads are not tied."""


def main(argv: list[str] | None = None) -> None:
    """Print both tables."""
    parser = module_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--count", action="store_true", help="count, and measure nothing")
    parser.add_argument("--ranks", type=counts, default=[1, 2, 4], help="numbers of ranks (default 1,2,4)")
    parser.add_argument("--tokens", type=number(8), default=128, help="tokens of the step (default 128)")
    parser.add_argument("--layers", type=COUNT, help="fewer layers than the shape has, where memory is short")
    parser.add_argument("--out", type=Path, help="a JSON file of what was measured, in bytes; it is added to")
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
    if a.out is not None and not a.out.parent.is_dir():
        parser.error(f"--out {a.out}: there is no folder {a.out.parent}")
    print_counts(a, a.ranks, learning)
    if not a.count:
        measurements(a, a.ranks, learning)
        computations()


def print_counts(a: argparse.Namespace, numbers: list[int], learning: Learning) -> None:
    """Print the counted bytes for each number of ranks."""
    print(
        f"counted: {a.shape}, parameters {a.parameters}, moments {a.moments}, MiB of the fullest rank, and the sum of all"
    )
    print("ranks  parameters  gradients  optimizer      sum  all ranks")
    for n in numbers:
        ranks = counted(config_of(a.shape), n, learning)
        note(a, "counted", n, ranks)
        sums = [sum(rank.values()) for rank in ranks]
        fullest = ranks[sums.index(max(sums))]
        figures = [fullest["parameters"], fullest["gradients"], fullest["optimizer"], max(sums), sum(sums)]
        mib = [size / 2**20 for size in figures]
        print(
            f"{n:5}  {mib[0]:10,.1f}  {mib[1]:9,.1f}  {mib[2]:9,.1f}  {mib[3]:7,.1f}  {mib[4]:9,.1f}",
            flush=True,
        )


def measurements(a: argparse.Namespace, numbers: list[int], learning: Learning) -> None:
    """Print the measured bytes and peaks of each rank."""
    print(
        f"\nmeasured: one step of {a.tokens} tokens, {a.shape}, {SHAPES[a.shape]['num_hidden_layers']} layers, "
        f"parameters {a.parameters}, moments {a.moments}, MiB"
    )
    heads = "".join(f"{name:>11}" for name in PHASES)
    print(f"ranks  of rank   parameters  gradients  optimizer{heads}")
    with tempfile.TemporaryDirectory() as folder:
        save(a.shape, Path(folder))
        for n in numbers:
            ranks = measure(Path(folder), n, a.tokens, learning)
            note(a, "measured", n, ranks)
            for index, sizes in enumerate(ranks):
                mib = {name: size / 2**20 for name, size in sizes.items()}
                peaks = "".join(f"{mib[name]:11,.0f}" for name in PHASES)
                print(
                    f"{n:5}  {index:7}   {mib['parameters']:10,.1f}  {mib['gradients']:9,.1f}  {mib['optimizer']:9,.1f}{peaks}",
                    flush=True,
                )


def computations() -> None:
    """Print the computed needs of large models."""
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


def note(a: argparse.Namespace, kind: str, n: int, ranks: list[dict[str, int]]) -> None:
    """Add the figures of the ranks to the JSON file."""
    if a.out is None:
        return
    rows = json.loads(a.out.read_text()) if a.out.exists() else []
    how = {"kind": kind, "shape": a.shape, "layers": SHAPES[a.shape]["num_hidden_layers"], "ranks": n}
    kept = [{name: size for name, size in rank.items() if name != "process"} for rank in ranks]
    rows.append({**how, "tokens": a.tokens, "parameters": a.parameters, "moments": a.moments, "bytes": kept})
    a.out.write_text(json.dumps(rows, indent=1) + "\n")


def config_of(shape: str) -> object:
    """Return the configuration of a shape."""
    from transformers import Qwen2Config

    return Qwen2Config(**{"max_position_embeddings": 1024, "tie_word_embeddings": True, **SHAPES[shape]})


def counted(config: object, ranks: int, learning: Learning) -> list[dict[str, int]]:
    """Count the bytes that each rank holds after a step: its shards of a model without weights, as FSDP2 cuts them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ....agents.model.llama import Llama
    from ....agents.model.shape import shape_of
    from ....trainers.group.optimizers.adam import CompactAdam, fresh
    from ....trainers.group.ranks.fsdp import cut
    from ....trainers.group.ranks.one_rank import local

    rows = []
    for index in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=index, world_size=ranks)  # sends nothing
        try:
            with torch.device("meta"):
                model = Llama(shape_of(config), config)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(torch, learning.parameters))
            cut(model, init_device_mesh("cpu", (ranks,)), None, False)
            trained = list(model.parameters())
            compact = learning.moments == "8bit" or learning.parameters == "bfloat16"
            optimizer: torch.optim.Optimizer = (
                CompactAdam(
                    trained, eight_bit=learning.moments == "8bit", lr=1e-3, betas=(0.9, 0.999), eps=1e-8
                )
                if compact
                else torch.optim.AdamW(trained)
            )
            own = sum(local(parameter).nbytes for parameter in trained)
            moments = sum(local(t).nbytes for p in trained for t in fresh(optimizer, p).values())
            rows.append({"parameters": own, "gradients": own, "optimizer": moments})
        finally:
            dist.destroy_process_group()
    return rows


def save(shape: str, folder: Path) -> None:
    """Write a model of random weights."""
    import torch

    from ....agents.model.weights import from_config, save_model

    save_model(from_config(config_of(shape)).to(torch.bfloat16), folder)


def measure(model: Path, ranks: int, tokens: int, learning: Learning) -> list[dict[str, int]]:
    """Make two optimizer steps over several ranks, and export. Return the figures of each rank."""
    from ....trainers.group.ranks.forked import RankProcesses

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
        processes.call("update", "team", make_algorithm("grpo"), signals, [samples])
        # the next has its optimizer from the beginning
        loading: list[dict[str, int]] = processes.call("watch", "team")
        processes.call("update", "team", make_algorithm("grpo"), signals, [samples])
        phases: list[dict[str, int]] = processes.call("watched")
        held: list[dict[str, int]] = processes.call("memory")
        processes.call("rest", "team")
        processes.call("memory")
        with tempfile.TemporaryDirectory() as folder:
            processes.call("export", "team", Path(folder), 1 << 30)
        peaks = [rank["peak"] for rank in processes.call("memory")]
        return [
            {**about, **steps, **rank, "export": peak}
            for about, steps, rank, peak in zip(loading, phases, held, peaks, strict=True)
        ]
    finally:
        processes.close()


def computed(name: str, ranks: int, tokens: int = 16_384, lean: bool = False) -> tuple[float, float, float]:
    """Compute the needs of one rank in GB: its shards, the gathered layers, and the activations.

    With `lean`, parameters and gradients are in bfloat16 and moments in 8 bits.
    """
    s = LARGE[name]
    layer = s["d"] * (2 * s["d"] + 2 * s["kv"] + 3 * s["ffn"])
    ends = 2 * s["vocab"] * s["d"]
    each = 2 + 2 + 2 * (1 + 4 / 256) if lean else 16  # float32: masters, gradients, two moments
    sharded = each * (s["layers"] * layer + ends) / ranks
    # bfloat16 weights and gradients of a layer, and of the next that is fetched meanwhile; and while the gradient of its own part of
    # one end is summed up in float32, a product in bfloat16
    gathered = 0 if ranks == 1 else 4 * 2 * layer + 6 * ends / 2 / ranks
    kept = 2 * tokens * s["layers"] * s["d"]
    # of the layer that is computed again; scores
    inside = 2 * tokens * (8 * s["d"] + 4 * s["ffn"]) + 3 * 2**29
    return sharded / 1e9, gathered / 1e9, (kept + inside) / 1e9


if __name__ == "__main__":
    main()
