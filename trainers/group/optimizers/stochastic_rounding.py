"""Random bits of stochastic rounding: a number is rounded up with a chance equal to its fraction, so the mean error is
0.

The random bits of an element follow from a key and from its place in the whole tensor. There is no generator and no
state: a resumed run draws the same bits, and any number of ranks draws the same bits as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND, _STRIDE = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32), 0x9E3779B1 - (1 << 32)
"""Odd constants of MurmurHash3's last mixing, as 32-bit integers. Products wrap around."""


def bits(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each of the places `start …` of a tensor, as integers [count]."""
    place = torch.arange(start, start + count, device=device).to(torch.int32)
    mixed = place.mul_(_STRIDE).add_(((key & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000)
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed *= _FIRST
    mixed ^= (mixed >> 13) & 0x7FFFF
    mixed *= _SECOND
    mixed ^= (mixed >> 16) & 0xFFFF
    return mixed


def share(random: Tensor, first: int) -> Tensor:
    """Return 8 of the 32 bits, from `first` on, as a number in [0, 1)."""
    return ((random >> first) & 0xFF).float() / 256


def to_bfloat16(number: Tensor, random: Tensor) -> Tensor:
    """Round float32 to one of its two neighbours in bfloat16, by the lowest 16 of the random bits."""
    raised = number.view(torch.int32) + (random & 0xFFFF)
    return (raised & ~0xFFFF).view(torch.float32).bfloat16()
