"""Measurements behind the choices in the decoder and the cache, with one thread.

    python -m unitymas.benchmarks.speed.models.products

Times are processor times (best of three), so that they hold on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....agents.model.attention import pack, plain_attend
from ....agents.model.logprobs import logprobs_entropy
from .engine import models

HEADS, KEYS, WIDTH = 6, 2, 32


def milliseconds(work: Callable[[], object], times: int = 3) -> float:
    """Return the processor milliseconds of the fastest run."""
    work()
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - began) / times)
    return best * 1e3


def products(dtype: torch.dtype) -> None:
    """Measure a matrix product with 64 and with 4,096 rows."""
    for rows in (64, 4096):
        x, w = torch.randn(rows, 192, dtype=dtype), torch.randn(1024, 192, dtype=dtype)
        took = milliseconds(partial(F.linear, x, w))
        print(f"  [{rows} x 192] x [192 x 1024]: {2 * rows * 192 * 1024 / took / 1e6:.0f} GFLOP/s")


def attention(dtype: torch.dtype) -> None:
    """Measure attention over 32 sequences of 182 tokens, forward and backward: torch's fused kernel, and plain products."""
    n = 182
    q = torch.randn(32, HEADS, n, WIDTH, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(32, KEYS, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.zeros(32, n, n, dtype=dtype).masked_fill_(
        torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf")
    )
    grad = torch.randn_like(q)

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)

    def plain() -> Tensor:
        return plain_attend(q, k, v, mask)

    both = [milliseconds(partial(_there_and_back, way, grad)) for way in (fused, plain)]
    print(
        f"  attention, 32 x 182 tokens, forward and backward: fused {both[0]:.0f} ms, plain {both[1]:.0f} ms"
    )


def _there_and_back(way: Callable[[], Tensor], grad: Tensor) -> None:
    way().backward(grad)


def decoding(dtype: torch.dtype) -> None:
    """Measure the attention of a decode step: 64 slots, 160 of 2048 tokens read.

    The keys are stored in rows, for the fused kernel, or transposed.
    """
    q = torch.randn(64, KEYS, HEADS // KEYS, WIDTH, dtype=dtype)
    rows, values = torch.randn(2, 64, KEYS, 2048, WIDTH, dtype=dtype)[:, :, :, :160]
    columns = torch.randn(64, KEYS, WIDTH, 2048, dtype=dtype)[..., :160].transpose(-1, -2)
    mask = torch.zeros(64, 1, 160, dtype=dtype)

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(q, rows, values, attn_mask=mask[:, None])

    def plain() -> Tensor:
        return plain_attend(q.view(64, HEADS, 1, WIDTH), columns, values, mask)

    took = [milliseconds(way, 50) * 1e3 for way in (fused, plain)]
    print(
        f"  decoding, 64 slots: fused over rows {took[0]:.0f} us, plain over transposed keys {took[1]:.0f} us"
    )


def learning(dtype: torch.dtype) -> None:
    """Measure forward and backward of 32 sequences (4 prompts of 150 tokens, 8 replies of 32), with and without sharing."""
    model, _ = models(torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 2048, (150,), generator=generator).tolist() for _ in range(4)]
    rows = [
        p + torch.randint(0, 2048, (32,), generator=generator).tolist() for p in prompts for _ in range(8)
    ]
    targets = torch.tensor([ids[150:] for ids in rows]).flatten()
    for share in (None, 16):

        def update(share: int | None = share) -> None:
            packed = pack(rows, share)
            keep = torch.cat([places[149:-1] for places in packed.rows])
            hidden = model.forward_packed(packed, dtype=dtype, keep=keep)
            logprobs_entropy(hidden, model.head, targets)[0].mean().backward()

        took = milliseconds(update, 1)
        how = "each sequence whole" if share is None else "prefixes laid once"
        print(f"  2.4M Llama, forward and backward, {how}: {182 * 32 / took * 1e3:.0f} tokens/s")


def main() -> None:
    """Measure all products in both precisions."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        print(str(dtype).removeprefix("torch."))
        for measure in (products, attention, decoding, learning):
            measure(dtype)


if __name__ == "__main__":
    main()
