"""Files of a Hugging Face directory, written one tensor at a time: no more than one tensor is in memory for it.

A safetensors file is the length of its header, the header (JSON: type, shape and place of every tensor), and the bytes
of the tensors one after the other. So types and shapes must be known before the first tensor is there.
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
"""Bytes of one file, unless a single tensor is larger."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of its bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def write(
    folder: Path, entries: Sequence[TensorEntry], tensors: Iterable[Tensor], largest: int = LARGEST
) -> None:
    """Write `model.safetensors`, or several files and their index. `tensors` gives each entry's tensor, in order."""
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
