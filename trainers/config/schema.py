"""The config of a run: one typed tree, importable without torch.

    defaults  <-  preset  <-  YAML file  <-  `a.b=c` overrides

Every key is a field of a dataclass below, and what stands under a field is its documentation. An unknown
key is an error that names the nearest one; so is a value of the wrong type, with its path.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ..controller.counterfactual import Counterfactual
from .choices import COUNT, POSITIVE, OutOfRange, Range, check_ranges
from .group_settings import Adapter, Learning, Sampling


class ConfigError(ValueError):
    """A config that cannot be; the message gives the path of the key and what would fit."""


RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("size", "slots", "context", "tasks", "k", "steps", "tasks_per_step", "minibatches", "epochs", "concurrency",
         "patience", "checkpoints"), COUNT,
    ),
    **dict.fromkeys(
        ("threads", "gpus", "every", "temperature", "traces_every", "retries", "staleness", "checkpoint_every", "watchdog"), Range(),
    ),
    "episode_seconds": POSITIVE,
}  # fmt: skip
"""What fits a number of the tree, by its key."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Where episodes come from: the arguments of `unitymas.make`."""

    id: str = "mask-hotpotqa"
    data: str | None = None
    """"mini", the name of a prepared data set, or a file. null: the real one if prepared, else mini."""
    split: str = "train"
    size: int | None = None
    """How many tasks of the mini world to generate. null: its default."""
    reward: Any = "default"
    args: dict[str, Any] = field(default_factory=dict)
    """The workflow's own arguments (max_turns …)."""

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """A model group: one base model, and the policies on it."""

    model: str = "tiny"
    """Of the Llama family: "tiny" (embedded), "hf:PATH" or PATH, a directory or a .gguf file."""
    slots: int = 128
    """Requests that are generated side by side, at most; keys and values take the memory that they need."""
    context: int | None = None
    """Longest prompt and reply together. null: the model's own."""
    threads: int = 0
    """Threads of its matrix products; 0: torch's default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of generation."""
    device: str = "auto"
    """Where its models learn, and speak where the engine is torch: cpu, cuda, cuda:1 … auto: a GPU where there is one
    (groups take them in turn), else cpu; with vLLM, which fills a GPU by itself, cpu."""
    gpus: float | None = None
    """That Ray keeps for it; it sees no others. null: one where the device is cuda (a share
    where groups on auto outnumber them), else none."""
    engine: Literal["torch", "vllm"] = "torch"
    """Who generates (docs/engine.md)."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Of vLLM: its engine arguments (gpu_memory_utilization, tensor_parallel_size, enforce_eager …)."""

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A policy: parameters in a group, and how they learn."""

    group: str = "main"
    frozen: bool = False
    algorithm: dict[str, Any] = field(default_factory=lambda: {"name": "ppo"})
    """`name`, and the algorithm's own fields (docs/algorithms.md)."""
    learning: Learning = Learning()
    critic: str = "auto"
    """The policy with a value head that judges this one. auto: one of its own, in the same group, where the
    algorithm needs one."""
    critic_learning: Learning | None = None
    """Of the automatic critic. null: as `learning`."""
    reference: bool = False
    """Keep a frozen copy of the first parameters, for a KL penalty."""
    adapter: Adapter | None = None
    """Train a low-rank adapter on the group's base instead of a full copy."""
    init: str = ""
    """A model to begin from instead of the group's, named as there."""
    sampling: Sampling = Sampling(max_tokens=64)
    credit: dict[str, Any] = field(default_factory=dict)
    """Credit transforms by role (docs/algorithms.md): team and local mixing, shaping, tree credit."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation, greedy by default, on tasks of another split."""

    every: int = 10
    """Steps between validations; 0: only at the beginning and the end."""
    tasks: int = 64
    split: str = "validation"
    k: int = 1
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where figures go, besides `metrics.jsonl`."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    tensorboard: bool = False
    wandb: str = ""
    """Project of Weights & Biases. Empty: off."""
    trackio: str = ""
    """Project of trackio. Empty: off."""
    traces_every: int = 10
    """Steps between those whose traces are kept; 0: none but validation's."""

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    env: EnvConfig = EnvConfig()
    groups: dict[str, GroupConfig] = field(default_factory=lambda: {"main": GroupConfig()})
    policies: dict[str, PolicyConfig] = field(default_factory=lambda: {"team": PolicyConfig()})
    map: dict[str, str] = field(default_factory=lambda: {"*": "team"})
    """Agent, else role, else "*" -> a policy of `policies`, or a fixed player ("scripted", "openai:…")."""
    counterfactual: dict[str, Counterfactual] = field(default_factory=dict)
    """Role (or "*") -> how its acts are questioned by forks (docs/trees-and-recipes.md)."""
    recipe: str = "default"
    """The order of a step: default, or another registered one."""
    recipe_args: dict[str, Any] = field(default_factory=dict)
    steps: int = 60
    tasks_per_step: int = 32
    k: int = 8
    """Trajectories per task."""
    minibatches: int = 2
    """Optimiser steps per update, cut by task. More: faster and further off-policy."""
    epochs: int = 1
    """Passes over a step's samples."""
    concurrency: int = 512
    """Episodes in flight."""
    episode_seconds: float | None = None
    """An episode that takes longer is truncated. Not in deterministic runs."""
    retries: int = 2
    """How often an episode that failed for infrastructure's sake is begun anew."""
    staleness: int = 0
    """How many versions old a sample may be when it is trained on; older ones are discarded and counted."""
    seed: int = 0
    runtime: Literal["local", "ray"] = "local"
    deterministic: bool = False
    """Fixed decode shapes, pinned threads, no wall-clock deadlines: runs agree bit for bit."""
    shuffle_rewards: bool = False
    """A control: credits are exchanged between episodes, and brought to mean 0 for each agent and turn, before advantages
    are made. There is nothing to learn."""
    watchdog: float = 300.0
    """Seconds in which nothing ends, after which the run says who waits for whom; 0: never. It only tells."""
    patience: int = 3
    """Stop with the cause after so many steps in a row without one usable sample."""
    starved: bool = True
    """Stop when over 90% of a trained role's advantages are 0 for `patience` steps."""
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint_every: int = 20
    """Steps between checkpoints; 0: only at the end."""
    checkpoints: int = 2
    """How many are kept."""

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)


# reading -----------------------------------------------------------------------------------------------


def build(kind: type[Any], given: Any, path: str = "") -> Any:
    """A dataclass out of a mapping, checked key by key."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path or 'config'}: expected keys of {kind.__name__}, got {given!r:.60}")
    hints = get_type_hints(kind)
    names = {f.name for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in names:
            raise ConfigError(f"{where}: unknown key; {_where_else(str(key), hints)}")
        values[key] = _value(hints[key], value, where)
    try:
        return kind(**values)
    except ConfigError:
        raise
    except OutOfRange as error:
        key = error.name.rpartition(".")[2]
        where = f"{path}.{key}" if path else key
        raise ConfigError(f"{where}: must {error.refusal}, got {error.value}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _where_else(key: str, hints: Mapping[str, Any]) -> str:
    """The key that may have been meant: a similar one, or one of this name a level further down."""
    if near := difflib.get_close_matches(key, hints, n=1):
        return f"did you mean {near[0]!r}?"
    for name, hint in hints.items():
        below = get_args(hint)[1] if get_origin(hint) is dict else hint
        if dataclasses.is_dataclass(below) and key in {f.name for f in dataclasses.fields(below)}:
            return f"did you mean {name}{'.*' if below is not hint else ''}.{key}?"
    return f"its keys are {', '.join(sorted(hints))}"


def _value(hint: Any, value: Any, where: str) -> Any:
    """A value checked against a type hint."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in args:
            if option is type(None):
                continue
            try:
                return _value(option, value, where)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[-1])
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, args))}")
        return value
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected keys and values, got {value!r:.60}")
        return {str(k): _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {value!r:.60}")
        kinds = args if args[-1] is not Ellipsis else (args[0],) * len(value)
        return tuple(_value(k, v, where) for k, v in zip(kinds, value, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r:.60}")
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, key by key."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def override(tree: Mapping[str, Any], assignments: list[str]) -> dict[str, Any]:
    """`a.b=c` assignments laid on a tree; values are read as YAML (`1e-4` and `true` mean what they say)."""
    merged = dict(tree)
    for text in assignments:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r}: overrides look like a.b=c")
        value: Any = scalar(raw)
        for name in reversed(key.split(".")):
            value = {name: value}
        merged = merge(merged, value)
    return merged


def scalar(raw: str) -> Any:
    """A value as YAML reads it, and numbers like `1e-4`, which YAML takes for text."""
    value = yaml.safe_load(raw) if raw else ""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as plain data."""
    plain: dict[str, Any] = dataclasses.asdict(config)
    return plain


def dump(config: RunConfig) -> str:
    """The tree as YAML; reading it back gives the same config."""
    return yaml.safe_dump(_plain(to_dict(config)), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{value!r:.80} cannot be written to config.yaml; name it by an entry point 'module:name'"
    )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as a tree."""
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path}: expected keys and values, got {type(tree).__name__}")
    return tree
