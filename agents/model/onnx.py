"""Conversion of a decoder in an ONNX file with 8-bit weights to a Hugging Face directory.

Exporters name matrix products by their place in the model (`/model/layers.0/self_attn/q_proj/MatMul`), and matrices by
numbers. So a matrix is named here after the product that uses it. The file is in the format of Protocol Buffers, of
which this module reads the few fields that it needs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GRAPH, NODE, INITIALIZER = 7, 1, 5
INPUT, NAME = 1, 3  # of a node
DIMS, TYPE, FLOATS, INTS, TENSOR_NAME, RAW = 1, 2, 4, 5, 8, 9  # of a tensor
TYPES: dict[int, type[np.generic]] = {1: np.float32, 2: np.uint8, 3: np.int8}

Array = npt.NDArray[Any]


def convert(source: Path, target: Path) -> None:
    """Convert the directory `source` (config, tokenizer, one .onnx file) to one that transformers and `Llama` load."""
    from safetensors.numpy import save_file

    (path,) = source.glob("*.onnx")
    config = json.loads((source / "config.json").read_text())
    state = weights(memoryview(path.read_bytes()))
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)  # a second copy of the embedding, with its own rounding
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    for file in source.glob("*.json"):
        if file.name != "config.json":
            shutil.copyfile(file, target / file.name)


def weights(data: memoryview) -> dict[str, Array]:
    """Return every parameter of the file in float32, by its Hugging Face name."""
    graph = next(value for field, value in fields(data) if field == GRAPH)
    tensors = dict(_tensor(value) for field, value in fields(graph) if field == INITIALIZER)
    state = {
        name: np.array(t)
        for name, t in tensors.items()
        if name.startswith("model.") and t.dtype == np.float32 and t.ndim
    }
    embedding = "model.embed_tokens.weight"
    if f"{embedding}_quantized" in tensors:
        state[embedding] = _dequantised(tensors, embedding)
    for field, value in fields(graph):
        if field != NODE:
            continue
        parts = list(fields(value))
        name = next((bytes(v).decode() for f, v in parts if f == NAME), "")
        inputs = [bytes(v).decode() for f, v in parts if f == INPUT]
        product = re.fullmatch(r"/(.+)/MatMul(_quant)?", name)
        matrix = inputs[1].removesuffix("_quantized") if len(inputs) > 1 else ""
        if product and f"{matrix}_quantized" in tensors:
            state[product[1].replace("/", ".") + ".weight"] = np.ascontiguousarray(
                _dequantised(tensors, matrix).T
            )
        elif product and matrix in tensors:
            state[product[1].replace("/", ".") + ".weight"] = np.ascontiguousarray(tensors[matrix].T)
    return state


def _dequantised(tensors: dict[str, Array], name: str) -> Array:
    whole, zero, scale = (tensors[f"{name}_{part}"] for part in ("quantized", "zero_point", "scale"))
    exact: Array = (whole.astype(np.float32) - zero.astype(np.float32)) * scale
    return exact


def _tensor(data: memoryview) -> tuple[str, Array]:
    """Return a tensor's name and values."""
    dims: list[int] = []
    name, kind, raw = "", 0, b""
    numbers: list[float] = []
    for field, value in fields(data):
        if field == DIMS:
            dims += [value] if isinstance(value, int) else list(_varints(value))
        elif field == TYPE:
            kind = value
        elif field == TENSOR_NAME:
            name = bytes(value).decode()
        elif field == RAW:
            raw = value
        elif field == FLOATS:
            numbers += np.frombuffer(value, np.float32).tolist()
        elif field == INTS:
            unsigned = [value] if isinstance(value, int) else list(_varints(value))
            numbers += [n - (1 << 64) if n >> 63 else n for n in unsigned]
    if kind not in TYPES:  # shapes and axes: no weights
        return name, np.zeros(0, np.int64)
    flat = np.frombuffer(raw, TYPES[kind]) if len(raw) else np.array(numbers, TYPES[kind])
    return name, flat.reshape(dims)


def fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of every field of a Protocol Buffers message. A value is an int or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"no ONNX file: a field of wire type {kind}")
        if at + size > len(data):
            raise ValueError("no whole ONNX file: it ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
        if byte < 128:
            return number, at


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        number, at = _varint(data, at)
        yield number
