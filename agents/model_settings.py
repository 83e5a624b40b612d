"""Settings of a team's models: how they are loaded and sampled. A command line or a `Team` gives them to all models.

Team("tiny", temperature=0, max_tokens=64, device="cpu", threads=2)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .names import read_name

_TORCH = ("temperature", "top_p", "max_tokens", "device", "dtype", "threads", "concurrency")
TAKEN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("tiny", "package", "hub", "path", "run"), _TORCH),
    "vllm": ("temperature", "top_p", "max_tokens", "dtype"),
    "openai": ("temperature", "top_p", "max_tokens", "concurrency"),
}
"""Names of the settings that each kind of model takes."""

HELP = {
    "temperature": (float, "of the models' sampling; 0: greedy (default: 1, or the endpoint's own)"),
    "top_p": (float, "sample among the likeliest tokens of this share (default: 1, or the endpoint's own)"),
    "max_tokens": (int, "longest reply (default: 256; a role's own limit counts if it is lower)"),
    "device": (str, "cpu, cuda, cuda:1, mps (default: a GPU where there is one)"),
    "dtype": (str, "float32 (default) or bfloat16"),
    "threads": (int, "of matrix products (default: 1 for small models, else torch's)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of a team's models. None: the model's own default."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    concurrency: int | None = None
    """Number of requests at once: to an endpoint, or in the engine of a model here."""

    def __post_init__(self) -> None:
        for name, fine, want in (
            ("temperature", lambda x: 0 <= x < float("inf"), "0 (greedy) or more"),
            ("top_p", lambda x: 0 < x <= 1, "in (0, 1]"),
            ("max_tokens", lambda x: x >= 1, "1 or more"),
            ("dtype", lambda x: x in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("threads", lambda x: x >= 1, "1 or more"),
            ("concurrency", lambda x: x >= 1, "1 or more"),
        ):
            value = getattr(self, name)
            if value is not None and not fine(value):
                raise ValueError(f"{name}={value!r}, but it must be {want}")

    def told(self) -> dict[str, Any]:
        """Return the settings that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def of(self, name: str) -> dict[str, Any]:
        """Return the settings that the model of this name takes."""
        known = read_name(name)
        taken = TAKEN[known.kind] if known else ()
        return {key: value for key, value in self.told().items() if key in taken}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--temperature` and the other settings to a parser."""
    group = parser.add_argument_group("models of the team")
    for name, (kind, help_) in HELP.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=help_)


def settings_of(given: argparse.Namespace) -> ModelSettings:
    """Read the settings from a parsed command line."""
    names = (field.name for field in fields(ModelSettings))
    return ModelSettings(**{name: getattr(given, name, None) for name in names})
