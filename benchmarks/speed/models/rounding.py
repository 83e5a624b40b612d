"""Rounding errors of bfloat16: log-probs of a real model's tokens, compared with the same model in float32.

    python -m unitymas.benchmarks.speed.models.rounding [--model NAME]     # default: the embedded tiny model

Our decoder and transformers' own model are both measured, to separate the errors of bfloat16 from those of our code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....agents import model_path
from ....agents.model.attention import pack
from ....agents.model.weights import load_model, load_tokenizer
from ....cli.arguments import module_parser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXTS = (
    "What is the capital of France?",
    "Read the passages, then answer in one sentence: who wrote the letter, and to whom?",
    "Is 17 a prime number? Think step by step, then answer yes or no.",
)


def reference(path: Path) -> PreTrainedModel:
    """Return transformers' own model, in float32."""
    from transformers import AutoModelForCausalLM

    gguf = path.suffix == ".gguf"
    where, extra = (path.parent, {"gguf_file": path.name}) if gguf else (path, {})
    return AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, local_files_only=True, **extra
    ).eval()


@torch.inference_mode()
def main() -> None:
    """Read the arguments and measure."""
    parser = module_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="a model by name (`unitymas models`)")
    path = model_path(parser.parse_args().model)
    tokenizer, ours, theirs = load_tokenizer(path), load_model(path), reference(path)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False
        )
        for t in TEXTS
    ]
    exact = [_chosen(theirs(torch.tensor([ids])).logits[0], ids) for ids in asked]

    def row(name: str, rough: list[Tensor]) -> None:
        off = (torch.cat(rough) - torch.cat(exact)).abs()
        print(f"{name:32} |log-prob - float32's|: mean {off.mean():.5f}, largest {off.max():.5f}")

    for dtype in (torch.float32, torch.bfloat16):
        row(
            f"our decoder, {dtype}",
            [_chosen(ours.logits(ours.forward_packed(pack([ids]), dtype=dtype)), ids) for ids in asked],
        )
    theirs.to(torch.bfloat16)
    row(
        "transformers, torch.bfloat16", [_chosen(theirs(torch.tensor([ids])).logits[0], ids) for ids in asked]
    )


def _chosen(logits: Tensor, ids: list[int]) -> Tensor:
    """Return the log-probs of the following tokens."""
    return logits[:-1].float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


if __name__ == "__main__":
    main()
