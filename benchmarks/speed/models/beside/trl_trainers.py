"""TRL's `GRPOTrainer` and `AsyncGRPOTrainer` on ready samples: their own training loops, without generation.

The asynchronous trainer packs samples into tree rows, in which a shared prompt is computed once. It takes samples from a
rollout worker and sends its weights to a server. Here the worker has the ready samples, and nothing is sent. TRL 1.16 does not
run this trainer without CUDA, for two reasons. It asks CUDA for the device's name; here the answer is that the peak is unknown.
And its attention is a FlashAttention 3 kernel from the hub; `segments` replaces it with torch's own fused attention, in one
call for all successive segments of equal lengths.
"""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .....agents.model.decoder import Decoder
from .....agents.model.weights import load_tokenizer, save_model
from .....agents.names import model_path
from .....agents.text.tokenizing import Tokenizer
from .....trainers.group.sample_store import Sample
from ...clock import Seconds


@dataclass(frozen=True)
class Setting:
    """Settings of one run of a TRL trainer."""

    name: str
    batch: int
    dtype: str = "float32"
    autocast: bool = False
    tree_rows: bool = False
    """Flag: the asynchronous trainer, with tree rows."""


SETTINGS = (
    Setting("TRL float32, batches of 16", 16),
    Setting("TRL bfloat16 autocast, batches of 16", 16, autocast=True),
    Setting("TRL bfloat16 autocast, batches of 64", 64, autocast=True),
    Setting("TRL bfloat16 weights, batches of 16", 16, dtype="bfloat16"),
    Setting("TRL bfloat16 weights, batches of 64", 64, dtype="bfloat16"),
    Setting("TRL async float32, tree rows of 16", 16, tree_rows=True),
    Setting("TRL async bfloat16 autocast, tree rows of 16", 16, autocast=True, tree_rows=True),
    Setting("TRL async bfloat16 weights, tree rows of 16", 16, dtype="bfloat16", tree_rows=True),
    Setting("TRL async bfloat16 weights, tree rows of 64", 64, dtype="bfloat16", tree_rows=True),
)


class Trainer(Protocol):
    """Interface of a TRL trainer, as it is used here."""

    def train(self) -> object:
        """Run all steps."""


def steps_of(
    setting: Setting, samples: list[Sample], start: Decoder, model: str, rounds: int, k: int
) -> list[Seconds]:
    """Return the time of each optimizer step. `start`: the decoder to begin from; `model`: its name, or "" for a random one."""
    with tempfile.TemporaryDirectory() as folder:
        vocab = start.shape.vocab
        save_model(start, folder, load_tokenizer(model_path(model)) if model else small_tokenizer(vocab))
        make = asynchronous if setting.tree_rows else synchronous
        steps: list[Seconds] = []
        make(setting, samples, folder, rounds, k, clock_callback(steps)).train()
    return steps


def common(setting: Setting, samples: list[Sample], folder: str, rounds: int, k: int) -> dict[str, object]:
    """Return the settings that both trainers take."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": setting.batch,
        "gradient_accumulation_steps": len(samples) // setting.batch,
        "max_completion_length": samples[0].n_tokens,
        "num_generations": k,
        "max_steps": rounds,
        "learning_rate": 1e-5,
        "bf16": setting.autocast,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def arguments(samples: list[Sample], folder: str, config: object, clock: object) -> dict[str, object]:
    """Return the arguments that both trainers take."""
    return {
        "model": folder,
        "args": config,
        "reward_funcs": no_reward,
        "train_dataset": prompts(len(samples)),
        "callbacks": [clock],
    }


def synchronous(
    setting: Setting, samples: list[Sample], folder: str, rounds: int, k: int, clock: object
) -> Trainer:
    """Return a `GRPOTrainer` whose batch is ready."""
    from trl import GRPOConfig, GRPOTrainer

    ready = padded_batch(samples)

    class ReadyMade(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: object) -> dict[str, Tensor]:
            return ready

    config = GRPOConfig(
        **common(setting, samples, folder, rounds, k),
        model_init_kwargs={"dtype": setting.dtype},
        beta=0.0,
        logging_strategy="no",
    )
    trainer: Trainer = ReadyMade(**arguments(samples, folder, config, clock))
    return trainer


def asynchronous(
    setting: Setting, samples: list[Sample], folder: str, rounds: int, k: int, clock: object
) -> Trainer:
    """Return an `AsyncGRPOTrainer` whose rollouts are ready."""
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=segments)
    config = AsyncGRPOConfig(
        **common(setting, samples, folder, rounds, k),
        dtype=setting.dtype,
        token_budget=0,
        max_staleness=rounds + 1,
        logging_steps=rounds + 1,
    )
    trainer: Trainer = AsyncGRPOTrainer(
        **arguments(samples, folder, config, clock),
        rollout_worker=ReadyRollouts(samples, rounds, k),
        weight_transfer=NothingSent(),
    )
    return trainer


class ReadyRollouts:
    """Rollout worker of TRL that has the samples of all steps from the start."""

    def __init__(self, samples: list[Sample], rounds: int, k: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: queue.Queue[object] = queue.Queue()
        self.metrics_queue: queue.Queue[object] = queue.Queue()
        # one step more than is trained: the loader reads ahead
        for n, sample in enumerate(samples * (rounds + 1)):
            prompt, reply = np.asarray(sample.prompt), np.asarray(sample.reply)
            none = np.zeros(len(prompt), np.float32)
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=torch.from_numpy(np.concatenate([prompt, reply])),
                    completion_mask=torch.from_numpy(
                        np.concatenate([none, np.ones(len(reply))]).astype(np.int64)
                    ),
                    old_log_probs=torch.from_numpy(np.concatenate([none, np.asarray(sample.behaviour)])),
                    advantage=advantage(n % len(samples)),
                    model_version=0,
                    group_id=n // k,
                    metrics={},
                )
            )

    def start(self) -> None:
        """Do nothing, because the samples are ready."""

    def stop(self) -> None:
        """Do nothing."""

    def update_model_version(self, model_version: int) -> None:
        """Do nothing, because the samples never change."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise an error, because no further sample will come."""
        raise RuntimeError("the ready samples are used up; give ReadyRollouts more rounds")


class NothingSent:
    """Weight transfer of TRL that sends nothing."""

    def init_weight_transfer(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""


def segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Return attention of segments laid end to end, as FlashAttention's `flash_attn_varlen_func` does.

    query (T, heads, d), key and value (U, kv heads, d). The last token of a segment sees all of its keys, and each earlier one
    a key less.
    """
    if not causal or window_size != (-1, -1):
        raise ValueError("only causal attention without a window takes the place of TRL's kernel here")
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeat, 1) if repeat > 1 else t for t in (key, value))
    sizes = zip(
        (b - a for a, b in pairwise(ends_q.tolist())),
        (b - a for a, b in pairwise(ends_k.tolist())),
        strict=True,
    )
    outputs, at_q, at_k = [], 0, 0
    for (n_q, n_k), run in groupby(sizes):
        n = len(list(run))
        q = query[at_q : at_q + n * n_q].unflatten(0, (n, n_q)).transpose(1, 2)
        k, v = (t[at_k : at_k + n * n_k].unflatten(0, (n, n_k)).transpose(1, 2) for t in (key, value))
        mask = None if n_q == n_k else torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)
        told = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=softmax_scale)
        outputs.append(told.transpose(1, 2).flatten(0, 1))
        at_q, at_k = at_q + n * n_q, at_k + n * n_k
    return torch.cat(outputs)


def padded_batch(samples: list[Sample]) -> dict[str, Tensor]:
    """Return the samples in the form of the synchronous trainer: prompts padded on the left, replies on the right."""
    width = max(len(sample.prompt) for sample in samples)
    prompt_ids = torch.zeros(len(samples), width, dtype=torch.long)
    prompt_mask = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        prompt_ids[row, width - len(sample.prompt) :] = torch.from_numpy(sample.prompt)
        prompt_mask[row, width - len(sample.prompt) :] = 1
    replies = torch.stack([torch.from_numpy(sample.reply) for sample in samples])
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": replies,
        "completion_mask": torch.ones_like(replies),
        "advantages": torch.tensor([advantage(i) for i in range(len(samples))]),
        "num_items_in_batch": torch.tensor(float(replies.numel())),
    }


def advantage(i: int) -> float:
    """Return the advantage of the `i`-th sample, the same on all sides."""
    return float(i % 3 - 1)


def no_reward(completions: list[object], **_: object) -> list[float]:
    """Return zeros, because advantages are ready."""
    return [0.0] * len(completions)


def clock_callback(steps: list[Seconds]) -> object:
    """Return a callback that appends the seconds of each step to a list."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = Seconds.now()

        def on_step_end(self, *_: object, **__: object) -> None:
            steps.append(Seconds.now().since(self.started))

    return Clock()


def small_tokenizer(vocab: int) -> Tokenizer:
    """Return any tokenizer, which TRL requires although nothing is tokenised."""
    from tokenizers import Tokenizer as WordTokenizer
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, vocab)}}
    inner = WordTokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    return tokenizer


def prompts(n: int) -> object:
    """Return a data set of this many prompts, which are never read."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["w3"] * n})
