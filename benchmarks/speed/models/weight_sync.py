"""Time of a weight sync with vLLM: shared memory compared with a directory of safetensors, in one run.

    VLLM_CPU_KVCACHE_SPACE=1 python -m unitymas.benchmarks.speed.models.weight_sync --model tiny --rounds 5

It needs vLLM. The two ways alternate on one engine, so that a busy machine affects both equally.
"""

from __future__ import annotations

import statistics
import time

from ....agents import model_path
from ....agents.engines.vllm.vllm_engine import VLLMEngine
from ....agents.model.weights import load_model
from ....cli.arguments import module_parser


def measured(model_name: str, rounds: int, precision: str) -> dict[str, list[float]]:
    """Return the seconds of each publication, by way."""
    path = model_path(model_name)
    model = load_model(path)
    engine = VLLMEngine(str(path), context=256, dtype=precision, enforce_eager=True, max_num_seqs=4)
    seconds: dict[str, list[float]] = {"shared": [], "files": []}
    try:
        for number in range(rounds + 1):
            for way in seconds:
                engine.transfer = way  # type: ignore[assignment]
                began = time.perf_counter()
                engine.publish(model, number)
                if number:  # the first one sets up the memory, and is the warm-up of both
                    seconds[way].append(time.perf_counter() - began)
    finally:
        engine.close()
    return seconds


def main() -> None:
    """Measure, and print medians with their ratio."""
    parser = module_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="a model by its name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    seconds = measured(options.model, options.rounds, options.precision)
    shared, files = (statistics.median(seconds[way]) for way in ("shared", "files"))
    spread = {way: f"{min(times):.3f}–{max(times):.3f}" for way, times in seconds.items()}
    print(
        f"{options.model}, {options.precision}, {options.rounds} rounds: shared {shared:.3f} s ({spread['shared']}), "
        f"files {files:.3f} s ({spread['files']}), ratio files/shared {files / shared:.2f}"
    )


if __name__ == "__main__":
    main()
