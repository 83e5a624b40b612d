"""Models on another device than samples and losses. There is no GPU here: torch's `meta` device stands for it, whose
tensors have shapes and no numbers, and every operation that would mix the two devices is an error, as on a GPU.
"""

import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from unitymas.agents.basics.machine import give_back
from unitymas.agents.engines.sampling import Draw, SamplingParams
from unitymas.agents.engines.torch import torch_engine as engines
from unitymas.agents.engines.torch.torch_engine import TorchEngine
from unitymas.agents.model.weights import from_config
from unitymas.trainers.group.learning.packing import lay
from unitymas.trainers.group.learning.parameters import Parameters
from unitymas.trainers.group.sample_store import Sample

AWAY = torch.device("meta")
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
BETWEEN = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_")
"""What may see both: copies; and indices may lie on the CPU."""


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU would refuse. What comes back from it is zeros."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        where = {t.device for t in tensors if t.dim()}
        self.seen += AWAY in where
        assert len(where) < 2 or func._schema.name in BETWEEN, f"{func} mixes {where}"
        if (
            func._schema.name == "aten::_to_copy"
            and AWAY in where
            and kwargs.get("device") == torch.device("cpu")
        ):
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        return func(*args, **kwargs)


def away(adapters=()):
    model = from_config(LlamaConfig(**SIZES)).to(AWAY)
    for name in adapters:
        model.add_adapter(name, rank=2)
    return model


def samples():
    prompts, replies = ([5, 6, 7] * 8, [9, 8, 7, 6]), ([1, 2, 3], [4, 5])
    return [
        Sample(
            episode="e", node=str(i), policy="p", version=0, prompt=np.array(prompt), reply=np.array(reply),
            behaviour=np.zeros(len(reply), np.float32), temperature=0.7,
        )
        for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("adapter", [None, "a"])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_keeps_its_model_there_and_its_losses_here(adapter, critic, dtype):
    parameters = Parameters(away([adapter] if adapter else []), adapter, critic)
    rows = lay(samples(), whole=critic)
    with OneDevice() as mode:
        if critic:
            found = torch.cat(parameters.values(rows, dtype, checkpointing=True))
        else:
            found = torch.stack(parameters.logprobs(rows, dtype, checkpointing=True))
        assert found.device.type == "cpu"
        found.sum().backward()
    assert mode.seen > 100
    touched = [name for name, p in parameters.named().items() if p.grad is not None]
    assert touched and {p.grad.device for p in parameters.named().values() if p.grad is not None} == {AWAY}


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_speaks_there(deterministic, monkeypatch):
    def draw(scores, params, steps, allowed):
        assert scores.device == AWAY
        return Draw([step % 7 + 1 for step in steps], [-1.0] * len(steps), [None] * len(steps))

    monkeypatch.setattr(engines, "draw", draw)
    with OneDevice() as mode:
        engine = TorchEngine(away(["a"]), slots=3, context=64, stop_ids=[6], deterministic=deterministic)
        asked = [
            engine.submit(
                [5, 6, 7] * 6 + [i], SamplingParams(max_tokens=4 + i), adapter="a" if i % 2 else None
            )
            for i in range(8)
        ]
        while engine.busy:
            engine.step()
        engine.publish(away(["a"]), 1, "a")
    assert mode.seen > 100 and all(request.result.ids for request in asked)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="of glibc's allocator"
)
def test_memory_that_was_freed_is_given_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pieces = [bytearray(b"x") * 60_000 for _ in range(2_000)]  # small enough for the heap
    held, full = pieces[::100], resident()  # scattered, so that no end of the heap is free
    del pieces
    give_back()
    assert full - resident() > 60e6 and len(held) == 20
