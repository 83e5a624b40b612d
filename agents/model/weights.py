"""Loading and saving of decoders: Hugging Face directories, and GGUF files (loading only)."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..basics.json_types import JsonObject
from ..basics.manifest import MANIFEST, Damaged, check
from ..fetch.hub import name_in_cache
from ..text.chat import require_template
from ..text.tokenizing import Tokenizer
from . import tensor_files
from .decoder import Decoder, OwnFiles
from .llama import Linear, Llama, LowRank
from .shape import Shape, UnsupportedArchitecture, computes, reading, shape_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# our name of a layer's part -> its name in a Hugging Face file; several names are stacked in that order
_LAYER = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
GENERATION = "generation_config.json"
_TOP = {
    "embed": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "untied_head": "lm_head.weight",
}


def load_decoder(
    path: str | Path, auto: bool = False, speaks: bool = False, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Load a model: as `Llama` if that can compute it, else (or with `auto`) with the layers of transformers.

    With `speaks`, a model without a chat template is an error, raised before its weights are read.
    """
    source = path
    path, where, config = _opened(path, None)
    if speaks:
        require_template(load_tokenizer(source))
    if auto or not computes(config):
        from .auto import load_auto

        decoder: Decoder = load_auto(path, config, **where)
        decoder.generation = _generation(path)
        return decoder.to(dtype)
    return load_model(path, where.get("gguf_file"), dtype)


def count_parameters(path: Path) -> int:
    """Return the number of parameters in a model's safetensors files, from their headers; 0 without such files."""
    from safetensors import safe_open

    count = 0
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else ():
        with safe_open(file, framework="pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def is_ours(path: Path) -> bool:
    """Tell whether our own decoder computes a model. Nothing large is read."""
    return computes(_opened(path, None)[2])


def precisions(path: Path) -> set[str]:
    """Return the types of the numbers in a model's safetensors files, such as BF16; none where there are no such files."""
    from safetensors import safe_open

    kinds: set[str] = set()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else ():
        with safe_open(file, framework="pt") as tensors:
            kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return kinds


def learned_prefix(path: Path) -> Path | None:
    """Return the folder of an exported policy's learned prefix, or None if it has none."""
    config = path / "adapter" / "adapter_config.json"
    if not config.is_file() or json.loads(config.read_text()).get("peft_type") != "PREFIX_TUNING":
        return None
    return config.parent


def load_model(path: str | Path, gguf_file: str | None = None, dtype: torch.dtype = torch.float32) -> Llama:
    """Load a `Llama` from a Hugging Face directory, from a GGUF file in it, or from the path of a `.gguf` file."""
    path, where, config = _opened(path, gguf_file)
    shape = shape_of(config)  # refuses an unsupported model before anything large is read
    name_class(config)
    model = Llama(shape, config)
    model.generation = _generation(path)
    # assigned, not copied: so there is no second copy of the weights in memory
    read = _read(path, where.get("gguf_file"))
    with reading(path / where.get("gguf_file", ""), "the weights"):
        model.load_state_dict(from_hf(read, shape, dtype), strict=True, assign=True)
    return model


def name_class(config: PretrainedConfig) -> None:
    """Set the class name in a configuration that lacks it, such as that of a GGUF file. Other libraries need it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not config.architectures and config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]


def _opened(path: str | Path, gguf_file: str | None) -> tuple[Path, dict[str, str], PretrainedConfig]:
    """Return a model's directory, its GGUF file if it has one, and its configuration."""
    path = Path(path)
    if path.suffix == ".gguf":
        path, gguf_file = path.parent, path.name
    if not path.is_dir() or (gguf_file and not (path / gguf_file).is_file()):
        raise FileNotFoundError(
            f"no model at {path / gguf_file if gguf_file else path}: give a directory with config.json and "
            "*.safetensors, or a .gguf file. Nothing is downloaded unasked."
        )
    if gguf_file is None and not (path / "config.json").is_file():
        run = f"; it is the directory of a run: write run:{path}" if (path / "config.yaml").is_file() else ""
        raise FileNotFoundError(f"{path} holds no config.json: it is no Hugging Face model directory{run}")
    if (path / MANIFEST).is_file():  # a run's policy
        check(path, others=True)  # a model card may be put beside the files
    from transformers import AutoConfig

    where = {"gguf_file": gguf_file} if gguf_file else {}
    with reading(path / (gguf_file or "config.json"), "the configuration of the model"):
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, **where)
        except (ValueError, KeyError) as error:
            if kind := None if gguf_file else _architecture(path):
                raise UnsupportedArchitecture(_unknown(path, kind)) from error
            raise
    config._name_or_path = name_in_cache(path)  # an adapter's file names its base by it
    return path, where, config


def _architecture(path: Path) -> str:
    """Return the name of the architecture in a model's configuration; empty if it names none or cannot be read."""
    try:
        return str(json.loads((path / "config.json").read_text()).get("model_type") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def _unknown(path: Path, kind: str) -> str:
    """Return the error text for an architecture that transformers does not know."""
    import transformers

    return (
        f"{path}: transformers {transformers.__version__} knows no architecture {kind!r}; install a version that does. "
        "Code that comes with a model is never run."
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model, from its directory or from its .gguf file.

    If a .gguf file has no chat template, `chat_template.jinja` beside it is used.
    """
    from transformers import AutoTokenizer

    path = Path(path)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    with reading(path, "the tokenizer"):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **where)
    template = folder / "chat_template.jinja"
    if where and not tokenizer.chat_template and template.is_file():
        # transformers looks for templates beside a tokenizer's own files alone
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def from_config(config: PretrainedConfig, seed: int = 0) -> Llama:
    """Return a new model with random weights, in the shape of a transformers configuration."""
    name_class(config)
    return Llama(shape_of(config), config).init_weights(seed, getattr(config, "initializer_range", 0.02))


def save_model(
    model: Decoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a Hugging Face directory: config, safetensors and, if there is one, the tokenizer. Return its path.

    `adapter` is added into the matrices. `dtype` is the precision of the files; the default is that of the parameters.
    """
    if model.hf_config is None:
        raise ValueError(
            "this model was built without a transformers configuration and cannot be saved as one"
        )
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, OwnFiles):
        model.save(path, tokenizer, adapter, dtype)
        save_settings(model, path, dtype)
        return path
    assert isinstance(model, Llama)
    save_settings(model, path, dtype)
    save_tensors(model, (model.played(name, adapter) for name, _, _ in hf_names(model)), path, dtype)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def save_settings(model: Decoder, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model's configuration, and that of generation as it was loaded.

    Other libraries load a model in the precision that its configuration names. Without `dtype` this stays as it was.
    """
    config = copy.deepcopy(model.hf_config)
    config.dtype = dtype or config.dtype
    config.save_pretrained(path)
    if model.generation:
        (path / GENERATION).write_text(json.dumps(dict(model.generation), indent=2), encoding="utf-8")


def _generation(path: Path) -> JsonObject:
    """Read what a model's directory says about generation; {} where it says nothing."""
    file = path / GENERATION
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Damaged(f"{file} is no JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def save_tensors(
    model: Llama,
    tensors: Iterable[Tensor],
    path: Path,
    dtype: torch.dtype | None = None,
    largest: int = tensor_files.LARGEST,
) -> None:
    """Write tensors, in the order of `hf_names`, as safetensors files of at most `largest` bytes.

    Only types and shapes are read from the model, so it may be on the meta device. `dtype` is that of the files; the
    default is that of the parameters (of a `fixed` model, whose parameters have half the digits, float32).
    """
    own, names = dict(model.named_parameters()), list(hf_names(model))
    dtype = dtype or (torch.float32 if model.fixed else None)
    entries = [
        tensor_files.TensorEntry(part, dtype or own[name].dtype, (rows, *own[name].shape[1:]))
        for name, parts, sizes in names
        for part, rows in zip(parts, sizes, strict=True)
    ]
    split = (
        part
        for tensor, (_, _, sizes) in zip(tensors, names, strict=True)
        for part in tensor.detach().to(dtype or tensor.dtype).split(sizes)
    )
    tensor_files.write(path, entries, split, largest)


def save_adapter(model: Decoder, adapter: str, path: str | Path) -> Path:
    """Write one adapter in the format of peft, which peft, transformers and vLLM load. Return its path.

    One fused matrix of `Llama` becomes several matrices in the file. Each gets its rows of `up` and a copy of `down`.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, OwnFiles):
        model.save_adapter(adapter, path)
        return path
    assert isinstance(model, Llama)
    state: dict[str, Tensor] = {}
    targets: set[str] = set()
    for ours, names, sizes in _layer_names(model.shape):
        module = model.get_submodule(ours)
        if isinstance(module, Linear):
            low = module.adapters[adapter]
            assert isinstance(low, LowRank)
            rank, alpha = len(low.down), low.scale * len(low.down)
            for name, up in zip(names, low.up.detach().split(sizes), strict=True):
                state[f"base_model.model.{name}.lora_A.weight"] = low.down.detach().cpu().clone()
                state[f"base_model.model.{name}.lora_B.weight"] = up.cpu().clone()
                targets.add(name.rpartition(".")[2])
    save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": getattr(model.hf_config, "_name_or_path", ""),
        "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets), "lora_dropout": 0.0, "bias": "none",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return path


def to_hf(model: Llama) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under their Hugging Face names, without adapters. The tensors share the model's memory."""
    state = model.state_dict()
    for ours, names, sizes in hf_names(model):
        yield from zip(names, state[ours].split(sizes), strict=True)


def hf_names(model: Llama) -> Iterator[tuple[str, list[str], list[int]]]:
    """Yield our name, the Hugging Face names and the rows of each, for every parameter except those of adapters."""
    own = dict(model.named_parameters())
    yield from ((ours, [name], [len(own[ours])]) for ours, name in _TOP.items() if ours in own)
    for ours, names, sizes in _layer_names(model.shape):
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in own:
                yield f"{ours}.{kind}", [f"{name}.{kind}" for name in names], sizes


def from_hf(
    state: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return our parameters, built from tensors with Hugging Face names. A missing tensor is an error."""
    sources = {ours: [name] for ours, name in _TOP.items() if ours != "untied_head" or not shape.tied}
    for ours, names, _ in _layer_names(shape):
        for kind in ("weight", "bias"):
            if kind == "weight" or f"{names[0]}.bias" in state:
                sources[f"{ours}.{kind}"] = [f"{name}.{kind}" for name in names]
    missing = [name for names in sources.values() for name in names if name not in state]
    if missing:
        raise ValueError(
            f"the model file lacks {len(missing)} tensors, among them {missing[0]}; it is not complete"
        )
    return {ours: torch.cat([state[n].to(dtype) for n in names]) for ours, names in sources.items()}


def _layer_names(shape: Shape) -> Iterator[tuple[str, list[str], list[int]]]:
    """Yield our name, the Hugging Face names and the rows of each, for every part of every layer."""
    keys = shape.kv_heads * shape.head_width
    sizes = {
        "attention_norm": [shape.d], "mlp_norm": [shape.d], "q_norm": [shape.head_width], "k_norm": [shape.head_width],
        "qkv": [shape.heads * shape.head_width, keys, keys], "out": [shape.d], "gate_up": [shape.ffn] * 2,
        "down": [shape.d],
    }  # fmt: skip
    for layer in range(shape.layers):
        for ours, names in _LAYER.items():
            if shape.qk_norm or ours not in ("q_norm", "k_norm"):
                yield f"layers.{layer}.{ours}", [f"model.layers.{layer}.{n}" for n in names], sizes[ours]


def _load_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    return tensors


def _read(path: Path, gguf_file: str | None) -> dict[str, Tensor]:
    """Return all tensors of a directory, by their Hugging Face names."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if gguf_file is None and (index.is_file() or single.is_file()):
        files = [single.name]
        if index.is_file():
            with reading(index, "the list of files (weight_map)"):
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return {name: tensor for file in files for name, tensor in _load_file(path / file).items()}
    from transformers import AutoModelForCausalLM

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    with reading(path / (gguf_file or ""), "the weights"):
        return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **extra).state_dict())
