"""Weight files of a Hugging Face directory, written tensor by tensor, so that only one tensor is in memory.

A safetensors file consists of the length of its header, the header (JSON with type, shape and place of every tensor), and
the bytes of all tensors. So the types and shapes of all tensors must be known before the first is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
LARGEST = 4 << 30
"""Largest number of bytes in one file. A larger tensor gets its own file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Name, type and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of the tensor's bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def write(
    folder: Path, entries: Sequence[TensorEntry], tensors: Iterable[Tensor], largest: int = LARGEST
) -> None:
    """Write `model.safetensors`, or several files and an index. `tensors` yields the tensors of `entries`, in order."""
    files: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.size for e in files[-1]) + entry.size > largest:
            files.append([])
        files[-1].append(entry)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
        index = {
            "metadata": {"total_size": sum(entry.size for entry in entries)},
            "weight_map": {e.name: name for name, file in zip(names, files, strict=True) for e in file},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    following = iter(tensors)
    for name, file in zip(names, files, strict=True):
        with (folder / name).open("wb") as out:
            out.write(_header(file))
            for entry in file:
                tensor = next(following)
                assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.name
                out.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    assert next(following, None) is None, "more tensors than entries"


def _header(entries: Sequence[TensorEntry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": TYPES[entry.dtype], "shape": entry.shape, "data_offsets": [place, place + entry.size],
        }  # fmt: skip
        place += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
