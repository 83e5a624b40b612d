"""Speed of the engine, compared with transformers' own `model.generate` on the same requests.

    unitymas bench engine [--dtype bfloat16] [--batch 64] [--threads 1] [--repeat 3]
    unitymas bench engine --model smollm2 --requests 32 --vllm

The model is a Llama of 2.4M parameters with random weights, or the model of `--model`. `generate` gets the requests sorted by
length, in batches padded on the left. A batch runs until its longest reply ends, and tokens beyond a row's own length do not
count. `--vllm` adds vLLM, in this process. The engine and vLLM also return the log-prob of each token. Each side first serves a
few requests that do not count, because the first kernels of a process take longer. Then the sides alternate, and the best round
of each counts. Processor time is printed beside wall-clock time, because a busy machine affects it less.

    alike    different prompts of 60-200 random tokens, 32 new tokens each: the best case for `generate`
    uneven   the same prompts, 4 to 32 new tokens
    samples  an eighth of those prompts, 8 samples of each, 4 to 32 new tokens
    team     5 roles with a text of 60 tokens each, questions of 40-120 tokens, 2 samples, 4 to 32 new tokens
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ....agents.engines.sampling import SamplingParams
from ....agents.engines.torch.torch_engine import TorchEngine
from ....agents.model.llama import Llama
from ....agents.model.weights import from_config, load_model, to_hf
from ....agents.names import model_path
from ....cli.arguments import COUNT, module_parser
from ..clock import Seconds, stopwatch
from .beside.vllm_offline import TimedPrompts, vllm_server

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 2048


def models(dtype: torch.dtype, name: str = "") -> tuple[Llama, PreTrainedModel]:
    """Return our decoder and transformers' model with the same weights: of the model of this name, or random ones."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name:
        path = model_path(name)
        return load_model(path), AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    ours = from_config(config)
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    return ours, theirs.to(dtype).eval()


def requests(vocab: int = VOCAB, count: int = 256) -> dict[str, TimedPrompts]:
    """Return the four kinds of work of the module's docstring, with about `count` requests each."""
    rng = random.Random(0)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(1, vocab) for _ in range(rng.randint(low, high))]

    def reply() -> int:
        return rng.choice((4, 8, 12, 16, 32))

    prompts = [words(60, 200) for _ in range(count)]
    roles, questions = [words(60, 60) for _ in range(5)], [words(40, 120) for _ in range(max(1, count // 8))]
    return {
        "alike": [(p, 32) for p in prompts],
        "uneven": [(p, reply()) for p in prompts],
        "samples": [(p, reply()) for p in prompts[: max(1, count // 8)] for _ in range(8)],
        "team": [(role + question, reply()) for question in questions for role in roles for _ in range(2)],
    }


def generate(model: PreTrainedModel, asked: TimedPrompts, batch: int) -> None:
    """Generate with transformers: sorted by length, padded on the left, `batch` requests at a time."""
    ordered = sorted(asked, key=lambda a: len(a[0]))
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        longest, new = max(len(p) for p, _ in part), max(n for _, n in part)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in part])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in part])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=seen, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0
            )


def serve(engine: TorchEngine, model: PreTrainedModel, asked: TimedPrompts) -> None:
    """Generate with the engine: all requests are submitted at once, with an empty prefix cache."""
    engine.publish(model, engine.version + 1)
    for i, (prompt, new) in enumerate(asked):
        engine.submit(prompt, SamplingParams(max_tokens=new, seed=i))
    while engine.busy:
        engine.step()


def in_turns(works: Sequence[Callable[[], None]], times: int) -> list[Seconds]:
    """Run the works alternately. Return the best wall-clock and processor seconds of each."""
    rounds = [[stopwatch(work) for work in works] for _ in range(times)]
    return [Seconds(*map(min, zip(*own, strict=True))) for own in zip(*rounds, strict=True)]


def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=COUNT, default=64, help="generate's batch, and the engine's slots")
    parser.add_argument("--threads", type=COUNT, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=COUNT, default=3)
    parser.add_argument(
        "--model", default="", help="a model by its name (default: a small one with random weights)"
    )
    parser.add_argument("--requests", type=COUNT, default=256, help="of each kind, about (a multiple of 8)")
    parser.add_argument("--vllm", action="store_true", help="vLLM beside them")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    ours, theirs = models(dtype, args.model)
    engine = TorchEngine(ours, slots=args.batch, context=256, dtype=dtype, stop_ids=())
    print(
        f"{args.model or 'random weights'}, {args.dtype}, batch and slots {args.batch}, {args.threads} threads; new tokens/s by the clock (by cpu)"
    )
    sides: dict[str, Callable[[TimedPrompts], None]] = {
        "generate": partial(generate, theirs, batch=args.batch),
        "engine": partial(serve, engine, ours),
    }
    if args.vllm:
        sides["vLLM"] = vllm_server(ours, args.dtype, args.batch, 256)
    kinds = requests(ours.shape.vocab, args.requests)
    for side in sides.values():
        side([(prompt, 4) for prompt, _ in kinds["alike"][: args.batch]])
    for name, asked in kinds.items():
        best = in_turns([partial(side, asked) for side in sides.values()], args.repeat)
        n, seconds = sum(new for _, new in asked), dict(zip(sides, best, strict=True))
        mine = seconds["engine"]
        told = [f"{side} {n / clock:6.0f} ({n / cpu:6.0f})" for side, (clock, cpu) in seconds.items()]
        told += [
            f"engine / {side} {clock / mine[0]:.2f} ({cpu / mine[1]:.2f})"
            for side, (clock, cpu) in seconds.items()
            if side != "engine"
        ]
        print(f"{name:8}", "   ".join(told), flush=True)


if __name__ == "__main__":
    main()
