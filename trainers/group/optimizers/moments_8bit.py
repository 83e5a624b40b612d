"""Moments in one byte each: 256 neighbours of a row share a scale, and small numbers have fine steps.

A code `c` stands for `scale * (c / levels) ** power`. A power spreads the codes over many orders of magnitude, which the
second moment needs: one that became 0 would make its step endless. Blocks never cross a row, so rows can be dealt to
ranks, and a checkpoint of any number of ranks holds the same codes.

Shapes: R rows, C columns, B = ⌈C / 256⌉ blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256


@dataclass(frozen=True)
class ByteCode:
    """Bytes for numbers of one kind."""

    levels: int
    power: int
    least: int
    """Smallest code. 1: a number that is rarely 0 is never rounded to 0."""

    def read(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers [R, C] of codes [R, C] and scales [R, B]."""
        step = codes.float() - (0 if self.least else 128)
        return (step / self.levels) ** self.power * _spread(scale, codes.shape[1])

    def write(self, numbers: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of numbers [R, C]. `chance` in [0, 1) decides the rounding, so that the mean error is
        0.
        """
        columns = numbers.shape[1]
        padded = F.pad(numbers, (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        scale = padded.abs().amax(2)
        height = numbers.abs() / _spread(scale, columns).clamp(min=1e-38) * self.levels**self.power
        low = height.pow(1 / self.power).floor_().clamp_(max=self.levels - 1)
        below = low**self.power
        codes = low + ((height - below) / ((low + 1) ** self.power - below) > chance)
        signed = codes.clamp_(min=self.least) if self.least else codes.copysign_(numbers) + 128
        return signed.to(torch.uint8), scale


FIRST = ByteCode(levels=127, power=3, least=0)
"""Code of first moments, which have a sign."""
SECOND = ByteCode(levels=255, power=4, least=1)
"""Code of second moments, which are positive."""


def _spread(scale: Tensor, columns: int) -> Tensor:
    """Return the scale of each number: [R, C]."""
    return scale.repeat_interleave(BLOCK, 1)[:, :columns]
