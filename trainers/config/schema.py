"""The config of a run: one typed tree, importable without torch.

    defaults  <-  preset  <-  YAML file  <-  `a.b=c` overrides

Every key is a field of a dataclass below: its type says what fits, its range too, and what stands under it is its
documentation. How text becomes settings: reader.py. What fits together: resolve.py and plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..controller.counterfactual import Counterfactual
from .choices import Amount, Count, Positive, Settings, Whole
from .group_settings import Adapter, Learning, Sampling
from .reader import ConfigError as ConfigError
from .reader import build as build
from .reader import dump as dump
from .reader import merge as merge
from .reader import override as override
from .reader import read_yaml as read_yaml
from .reader import to_dict as to_dict


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Settings):
    """Where episodes come from: the arguments of `unitymas.make`."""

    id: str = "mask-hotpotqa"
    data: str | None = None
    """"mini", the name of a prepared data set, or a file. null: the real one if prepared, else mini."""
    split: str = "train"
    size: Count | None = None
    """How many tasks of the mini world to generate. null: its default."""
    reward: Any = "default"
    """Rules, functions, or entry points to them (module:name). null: none."""
    rules: tuple[Any, ...] = ()
    """Rules besides: what reward wrappers attach."""
    tasks: Any = None
    """Rows of one's own, from Python; then neither `data` nor `split` counts, and validation plays them too."""
    tools: dict[str, Any] = field(default_factory=dict)
    """Tools in place of the environment's, by name, from Python."""
    budget: dict[str, Any] | None = None
    """Limits of an episode: requests, tokens, seconds. null: the environment's."""
    args: dict[str, Any] = field(default_factory=dict)
    """The workflow's own arguments (max_turns …)."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Settings):
    """A model group: one base model, and the policies on it."""

    model: str = "tiny"
    """Of the Llama family: "tiny" (embedded), "hf:PATH" or PATH, a directory or a .gguf file."""
    slots: Count = 128
    """Requests that are generated side by side, at most; keys and values take the memory that they need."""
    context: Count | None = None
    """Longest prompt and reply together. null: the model's own."""
    threads: Whole = 0
    """Threads of its matrix products; 0: torch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of generation."""
