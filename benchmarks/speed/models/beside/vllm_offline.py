"""vLLM on ready prompts, in this process, so that its processor time is measured here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from .....agents.model.llama import Llama
from .....agents.model.weights import save_model

TimedPrompts = list[tuple[list[int], int]]
"""Prompts, each with the number of new tokens."""


def vllm_server(model: Llama, dtype: str, batch: int, context: int) -> Callable[[TimedPrompts], None]:
    """Return a function that answers requests with vLLM and the same weights.

    Each call begins with an empty prefix cache, and returns the log-prob of each token, as our engine does.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    folder = TemporaryDirectory(prefix="unitymas-vllm-")
    llm = LLM(
        model=str(save_model(model, Path(folder.name))),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=batch,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )

    def answer(asked: TimedPrompts) -> None:
        llm.reset_prefix_cache()
        params = [
            SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
            for _, new in asked
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        for reply, (_, new) in zip(llm.generate(prompts, params, use_tqdm=False), asked, strict=True):
            if len(reply.outputs[0].token_ids) != new:
                raise RuntimeError(f"vLLM said {len(reply.outputs[0].token_ids)} tokens, not {new}")

    return answer
