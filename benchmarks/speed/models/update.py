"""Speed of the update: one optimizer step of GRPO on ready samples, compared with TRL's trainers in the same run.

    unitymas bench update                 # tokens/s, and the ratio
    unitymas bench update --memory        # peak memory as the vocabulary grows
    unitymas bench update --model smollm2 --samples 32 --rounds 1 --only "bfloat16.*(16|replies)"

Both sides train the same 2.6M-parameter Llama, or the model of `--model`, on the same 256 samples (32 prompts of 100 to 200
tokens, 8 replies of 32 tokens each): forward, loss, backward, clipping, AdamW. TRL runs its own `train()` on the ready batch,
without generation and scoring, so only its update is timed. It runs in several settings, of which the fastest counts, and with
both of its trainers: the synchronous one, and the asynchronous one with tree rows (`beside/trl_trainers.py` explains its
attention). A sample's tokens are its prompt and its reply on both sides, even if a side computes a shared prompt once. The line
"prompts all different" shows our side without shared prompts. The first step of each side does not count. The sides alternate.
Medians of wall-clock time and of processor time are printed; a busy machine affects the latter less.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import statistics
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....agents.basics.hints import counted
from ....agents.model.llama import Llama
from ....agents.model.weights import from_config, load_model
from ....agents.names import model_path
from ....cli.arguments import COUNT, module_parser, pattern
from ....trainers.algorithms import make_algorithm
from ....trainers.config.group_settings import Learning
from ....trainers.controller.statistics.table import Signal
from ....trainers.group.learning.parameters import Parameters
from ....trainers.group.learning.update import Learner
from ....trainers.group.sample_store import Sample
from ..clock import Seconds, stopwatch
from ..gpu.model_sizes import n_tokens
from .beside.trl_trainers import SETTINGS, Setting, advantage, steps_of

if TYPE_CHECKING:
    from transformers import LlamaConfig

REPLY, K = 32, 8


def start_of(model: str, vocab: int) -> Llama:
    """Return the first model of both sides: the model of this name, or a small one with random weights."""
    return load_model(model_path(model)) if model else from_config(llama_config(vocab))


def llama_config(vocab: int) -> LlamaConfig:
    """Return the configuration of the small model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def draw(vocab: int, n: int = 256, k: int = K) -> list[Sample]:
    """Return `n` random samples, with `k` samples for each prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for p in range(n // k):
        prompt = rng.integers(3, vocab, int(rng.integers(100, 201)))
        for i in range(k):
            reply = rng.integers(3, vocab, REPLY)
            behaviour = np.full(REPLY, -np.log(vocab), np.float32)
            samples.append(Sample(f"p{p}", str(i), "shared", 0, prompt, reply, behaviour))
    return samples


def ours(
    samples: list[Sample], vocab: int, precision: str, micro_tokens: int, model: str = ""
) -> Callable[[], Seconds]:
    """Return a function that makes one update and returns its time."""
    parameters = Parameters(start_of(model, vocab).requires_grad_(True))
    learner = Learner("shared", parameters, Learning(micro_tokens=micro_tokens, precision=precision))  # type: ignore[arg-type]
    algorithm = make_algorithm("grpo", dual_clip=None)
    signals = {s.id: Signal(s.id, advantage(i)) for i, s in enumerate(samples)}

    return lambda: stopwatch(lambda: learner.update(algorithm, signals, [samples]))


def theirs(
    samples: list[Sample], vocab: int, setting: Setting, rounds: int, model: str = ""
) -> list[Seconds]:
    """Return the time of each optimizer step of TRL's own training loop."""
    return steps_of(setting, samples, start_of(model, vocab), model, rounds, K)


def speed(rounds: int, vocab: int, n: int, model: str = "", only: str | re.Pattern[str] = "") -> None:
    """Time both sides alternately. `only` is a regular expression for the names of the settings."""
    vocab = start_of(model, vocab).shape.vocab
    shared, different = draw(vocab, n), draw(vocab, n, k=1)
    variants = {
        name: (ours(samples, vocab, precision, 4096, model), n_tokens(samples))
        for precision in ("float32", "bfloat16")
        for what, samples in (("8 replies to a prompt", shared), ("prompts all different", different))
        if re.search(only, name := f"ours {precision}, {what}")
    }
    settings = [s for s in SETTINGS if re.search(only, s.name) and n % s.batch == 0]
    if not settings or not variants:
        raise SystemExit(f"--only {only!r} with {n} samples leaves nothing of one of the sides")
    for step, _ in variants.values():  # TRL's first step does not count either
        step()
    times: dict[str, list[Seconds]] = {name: [] for name in [*variants, *(s.name for s in settings)]}
    for setting in settings:
        for name, (step, _) in variants.items():
            times[name].append(step())
        times[setting.name] += theirs(shared, vocab, setting, rounds + 1, model)[1:]
        print(f"measured: {setting.name}", flush=True)
    rates = {
        kind: {
            name: (variants[name][1] if name in variants else n_tokens(shared))
            / statistics.median(getattr(moment, kind) for moment in moments)
            for name, moments in times.items()
        }
        for kind in Seconds._fields
    }
    for kind, rate in rates.items():
        print(
            f"\ntokens per {kind} second"
            + (f" ({torch.get_num_threads()} threads)" if kind == "wall" else "")
        )
        fastest = max(value for name, value in rate.items() if name.startswith("TRL"))
        for name, value in rate.items():
            print(f"  {name:45s} {value:9,.0f}   {value / fastest:5.2f} x the fastest TRL setting")


def _peak(side: str, vocab: int, n: int, result: Queue[float]) -> None:
    """Measure the peak resident memory, beyond that before the first step of the update, in a separate process."""
    samples = draw(vocab, n)
    if side == "ours":
        step = ours(samples, vocab, "float32", 4096)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(), step()
    else:
        theirs(draw(64, 64), 64, Setting("", 64), 1)  # its imports and pools
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        theirs(samples, vocab, Setting("", 64), 2)
    result.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def memory(vocabularies: list[int], n: int) -> None:
    """Print the peak memory of both sides for each vocabulary."""
    spawn = multiprocessing.get_context("spawn")
    print(
        "peak memory of two updates above the loaded process, MiB (float32; ours 4,096 laid tokens, TRL batches of 64)"
    )
    for vocab in vocabularies:
        row: dict[str, float] = {"vocabulary": vocab, "parameters": round(4 * vocab * 192 / 2**20 + 8.5, 1)}
        for side in ("ours", "TRL"):
            result = spawn.Queue()
            process = spawn.Process(target=_peak, args=(side, vocab, n, result))
            process.start()
            row[side] = round(result.get(), 1)
            process.join()
        print(json.dumps(row), flush=True)


def crowded(threads: int, load: float, processors: int) -> str:
    """Return what makes the figures doubtful: other work that takes the processors which the threads need."""
    if threads == 1 or load + threads <= processors + 0.5:
        return ""
    return (
        f"other work runs here (load {load:.1f}, {counted(processors, 'processor')}): {threads} threads that wait for each other "
        "spend up to ten times the processor time, on either side; give --threads 1"
    )


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--rounds", type=COUNT, default=3, help="timed optimizer steps of each TRL setting")
    parser.add_argument("--vocab", type=COUNT, default=2048)
    parser.add_argument("--threads", type=COUNT, default=2)
    parser.add_argument("--samples", type=COUNT, default=256, help="a multiple of 16")
    parser.add_argument(
        "--model", default="", help="a model by its name (default: a small one with random weights)"
    )
    parser.add_argument(
        "--only", type=pattern, default="", help="regular expression of the settings to run, by their names"
    )
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if doubt := crowded(arguments.threads, os.getloadavg()[0], len(os.sched_getaffinity(0))):
        print(doubt, flush=True)
    if arguments.memory:
        memory([1024, 8192, 32768, 131072], arguments.samples)
    else:
        speed(arguments.rounds, arguments.vocab, arguments.samples, arguments.model, arguments.only)


if __name__ == "__main__":
    main()
