"""Sampling: how a token is chosen, and what training must know to compute the same log-prob again.

The chance of a request depends on its own seed and the number of the token alone (a counter-based generator). So
it does not matter which other requests are in the batch. A temperature of 0 is greedy; its log-probs are those at
temperature 1. Where only some tokens were allowed (choices, top-k, top-p), they are recorded: the *support* of that
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..text.control_tokens import plain_of
from ..text.tokenizing import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for sampling one reply."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    max_tokens: int = 256
    stop: tuple[str, ...] = ()  # the reply ends with the first of these, which it includes
    seed: int = 0
    choices: tuple[str, ...] | None = None  # the reply is exactly one of these

    def __post_init__(self) -> None:
        for name, fine, want in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("choices", self.choices is None or len(self.choices) > 0, "None or at least one text"),
            ("stop", all(self.stop), "texts that are not empty"),
        ):
            if not fine:
                raise ValueError(f"sampling: {name}={getattr(self, name)!r}, but it must be {want}")


def truncates(params: SamplingParams) -> bool:
    """Tell whether sampling excludes tokens."""
    return bool(params.top_k) or params.top_p < 1


@dataclass(slots=True)
class Trie:
    """Tree of the token sequences of some choices: which tokens may come next, and which choice is complete."""

    children: dict[int, Trie] = field(default_factory=dict)
    choice: str | None = None

    @classmethod
    def of(cls, choices: Sequence[str], encode: Callable[[str], Sequence[int]], end: int) -> Trie:
        """Build the tree. `end` closes a choice that another one continues ("1" beside "12"); elsewhere none
        is needed.
        """
        root = cls()
        for choice in choices:
            node = root
            for token in encode(choice):
                node = node.children.setdefault(token, cls())
            if node is root or node.choice not in (None, choice):
                raise ValueError(
                    f"choice {choice!r} is empty to the tokenizer, or the same tokens as {node.choice!r}"
                )
            node.choice = choice
        for node in list(root.walk()):
            if node.choice is not None and node.children:
                node.children[end] = cls(choice=node.choice)
        return root

    def walk(self) -> Iterable[Trie]:
        yield self
        for child in self.children.values():
            yield from child.walk()


class Tries:
    """Tries of an engine's choices, each built once."""

    def __init__(self, tokenizer: Tokenizer | None, stop_ids: Iterable[int]) -> None:
        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.known: dict[tuple[str, ...], Trie] = {}

    def __call__(self, choices: tuple[str, ...]) -> Trie:
        if choices not in self.known:
            if self.tokenizer is None or not self.stop_ids:
                raise ValueError("choices need an engine with a tokenizer that has an end token")
            self.known[choices] = Trie.of(choices, plain_of(self.tokenizer).encode, min(self.stop_ids))
        return self.known[choices]


@dataclass(slots=True)
class Draw:
    """Sampled tokens, one for each row: ids, log-probs, and the allowed tokens of rows in which not all were
    allowed.
    """

    ids: list[int]
    logprobs: list[float]
    support: list[tuple[int, ...] | None]


def draw(
    scores: Tensor,
    params: Sequence[SamplingParams],
    steps: Sequence[int],
    allowed: Sequence[tuple[int, ...] | None],
) -> Draw:
    """Sample from logits [n, V]: row i by `params[i]`, as its token number `steps[i]`, among `allowed[i]`."""
    import torch

    from ..model.logprobs import Support

    heat = torch.tensor([p.temperature or 1.0 for p in params], device=scores.device)
    scores = scores / heat[:, None]
    support = [_truncate(row, p, a) for row, p, a in zip(scores, params, allowed, strict=True)]
    kept = Support.of(support)
    if kept is not None:
        scores = kept.to(scores.device).forbid(scores, 0)
    probs = scores.softmax(-1)
    ids = scores.argmax(-1)
    if any(p.temperature for p in params):
        cumulative = probs.cumsum(-1)
        dice = torch.from_numpy(uniform([p.seed for p in params], steps)).to(scores.device)
        sampled = torch.searchsorted(cumulative, dice[:, None] * cumulative[:, -1:], right=True).squeeze(1)
        greedy = torch.tensor([p.temperature == 0 for p in params], device=scores.device)
        ids = torch.where(greedy, ids, sampled.clamp_(max=scores.shape[1] - 1))
    chosen = probs.gather(1, ids[:, None]).squeeze(1).log()
    return Draw(ids.tolist(), chosen.tolist(), support)


def _truncate(row: Tensor, params: SamplingParams, allowed: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the tokens of one row that top-k and then top-p allow, or None if all are allowed."""
    limited = 0 < params.top_k < len(row) or params.top_p < 1
    if not limited or params.temperature == 0:
        return allowed
    if allowed is not None:
        row = row[list(allowed)]
    best = row.float().log_softmax(-1).sort(descending=True, stable=True)
    keep = min(params.top_k or len(row), len(row))
    probs = best.values[:keep].exp()
    probs = probs / probs.sum()
    before = probs.cumsum(0) - probs
    ids: list[int] = best.indices[:keep][(before < params.top_p)].tolist()
    return tuple(sorted(ids if allowed is None else [allowed[i] for i in ids]))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1 - 2^-23], one for each (seed, step): splitmix64 as a counter-based generator."""
    with np.errstate(over="ignore"):
        state = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64) + _GOLDEN)
        mixed = _mix(state + (np.array(steps, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((mixed >> np.uint64(41)).astype(np.float64) * 2.0**-23).astype(np.float32)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
