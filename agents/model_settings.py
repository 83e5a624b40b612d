"""Settings of a team's models: how they are loaded and sampled. A command line or a `Team` gives them to all models.

Team("tiny", temperature=0, max_tokens=64, device="cpu", threads=2)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from .basics.json_types import JsonObject
from .names import endpoint_of, read_name
from .spending import Price

_TORCH = ("temperature", "top_p", "max_tokens", "context", "device", "dtype", "threads", "concurrency")
TAKEN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("tiny", "package", "hub", "path", "run"), _TORCH),
    "vllm": ("temperature", "top_p", "max_tokens", "context", "dtype"),
    "openai": (
        "temperature",
        "top_p",
        "max_tokens",
        "concurrency",
        "deadline",
        "stream",
        "price",
        "requests_per_minute",
        "tokens_per_minute",
        "budget_dollars",
        "budget_tokens",
    ),  # fmt: skip
}
"""Names of the settings that each kind of model accepts."""

HELP = {
    "temperature": (float, "temperature of sampling; 0: greedy (default: 1, or the endpoint's own)"),
    "top_p": (
        float,
        "share of the probability whose likeliest tokens may be drawn (default: 1, or the endpoint's own)",
    ),
    "max_tokens": (int, "longest reply in tokens (default: 256; a role's own limit counts if it is lower)"),
    "context": (
        int,
        "largest number of tokens of a prompt and its reply together (default: that of the run, else the model's own)",
    ),
    "device": (str, "device: cpu, cuda, cuda:1, mps (default: a GPU if there is one)"),
    "dtype": (str, "precision: float32 (default) or bfloat16"),
    "threads": (int, "CPU threads of matrix products (default: 1 for small models, else torch's)"),
    "deadline": (
        float,
        "longest time of one call to an endpoint in seconds, retries included (default: 120)",
    ),
    "requests_per_minute": (float, "largest number of requests to an endpoint in a minute"),
    "tokens_per_minute": (float, "largest number of tokens of an endpoint in a minute, in and out"),
    "budget_dollars": (float, "stop when the next call could cost more than is left; it needs --price"),
    "budget_tokens": (int, "the same limit in tokens, in and out"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of a team's models. None: the model's own default."""

    temperature: float | None = None
    """Temperature of sampling. 0: greedy."""
    top_p: float | None = None
    """Limit of nucleus sampling: the most likely tokens with this share of the probability may be sampled."""
    max_tokens: int | None = None
    """Longest reply in tokens."""
    context: int | None = None
    """Largest number of tokens of a prompt and its reply together, of models on this machine. None: that of the run, else the
    model's own."""
    device: str | None = None
    """Device of models on this machine: cpu, cuda, cuda:1, mps."""
    dtype: str | None = None
    """Precision of models on this machine: float32 or bfloat16."""
    threads: int | None = None
    """CPU threads of matrix products."""
    concurrency: int | None = None
    """Largest number of requests at the same time: to an endpoint, or in the engine of a model on this machine."""
    deadline: float | None = None
    """Longest time of one call to an endpoint in seconds, retries included."""
    stream: bool | None = None
    """Flag: endpoints stream their replies. None: true."""
    price: Mapping[str, Price] | None = None
    """Prices of an endpoint's models by name, or for "*": dollars for a million input tokens, and for a million output
    tokens."""
    requests_per_minute: float | None = None
    """Largest number of requests to an endpoint in a minute."""
    tokens_per_minute: float | None = None
    """Largest number of input and output tokens of an endpoint in a minute."""
    budget_dollars: float | None = None
    """Largest cost in dollars of all the team's endpoints together."""
    budget_tokens: int | None = None
    """Largest number of input and output tokens of all the team's endpoints together."""

    def __post_init__(self) -> None:
        for name, fine, want in (
            ("temperature", lambda x: 0 <= x < float("inf"), "0 (greedy) or more"),
            ("top_p", lambda x: 0 < x <= 1, "in (0, 1]"),
            ("max_tokens", lambda x: x >= 1, "1 or more"),
            ("context", lambda x: x >= 2, "2 or more"),
            ("dtype", lambda x: x in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("threads", lambda x: x >= 1, "1 or more"),
            ("concurrency", lambda x: x >= 1, "1 or more"),
            ("deadline", lambda x: 0 < x < float("inf"), "more than 0"),
            ("requests_per_minute", lambda x: 0 < x < float("inf"), "more than 0"),
            ("tokens_per_minute", lambda x: 0 < x < float("inf"), "more than 0"),
            ("budget_dollars", lambda x: 0 < x < float("inf"), "more than 0"),
            ("budget_tokens", lambda x: x >= 1, "1 or more"),
        ):
            value = getattr(self, name)
            if value is not None and not fine(value):
                raise ValueError(f"{name}={value!r}, but it must be {want}")

    def told(self) -> JsonObject:
        """Return the settings that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def of(self, name: str) -> JsonObject:
        """Return the settings that the model of this name accepts."""
        known = read_name(name)
        taken = TAKEN[known.kind] if known else ()
        return {key: value for key, value in self.told().items() if key in taken}

    def endpoint(self, name: str) -> JsonObject:
        """Return the settings of one endpoint: all but the budget, and the price of its model."""
        told = {key: value for key, value in self.of(name).items() if not key.startswith("budget_")}
        prices = told.pop("price", None) or {}
        model = endpoint_of(name)[0]
        price = prices.get(model, prices.get("*"))
        if price is None and self.budget_dollars is not None:
            raise ValueError(
                f"budget_dollars={self.budget_dollars:g}: the price of {model!r} is not known; give it, in dollars for a "
                f"million tokens in and out (--price {model}=0.15,0.6 or price={{{model!r}: (0.15, 0.6)}})"
            )
        return told if price is None else {**told, "price": (float(price[0]), float(price[1]))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--temperature` and the other settings to a parser."""
    group = parser.add_argument_group("models of the team")
    for name, (kind, help_) in HELP.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=help_)


def settings_of(options: argparse.Namespace) -> ModelSettings:
    """Read the settings from a parsed command line."""
    names = (field.name for field in fields(ModelSettings))
    return ModelSettings(**{name: getattr(options, name, None) for name in names})
