"""Requests to an engine, their results, and the versions of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .sampling import SamplingParams, Trie
from .stopping import Stopper


@dataclass(frozen=True, slots=True)
class Generation:
    """Result of one request."""

    prompt_ids: list[int]
    ids: list[int]  # exactly the sampled tokens, with the closing token
    logprobs: list[float]  # in the distribution from which each token was sampled
    finish_reason: str  # stop | length | overflow (the prompt did not fit) | cancelled
    text: str = ""
    support: list[tuple[int, ...] | None] | None = (
        None  # allowed tokens at each position; None if all tokens were allowed
    )
    version: int = 0  # version of the weights that sampled the first token
    versions: list[int] = field(default_factory=list)  # version that drew each token
    cached: int = 0  # prompt tokens whose keys and values were copied, not computed

    @property
    def switches(self) -> tuple[tuple[int, int], ...]:
        """Return the numbers of tokens from which newer weights sampled, each with the version. Empty if one version
        sampled all.
        """
        pairs = enumerate(zip(self.versions, self.versions[1:], strict=False), 1)
        return tuple((token, after) for token, (before, after) in pairs if before != after)


class Request:
    """A request while it waits and runs. Its `result` is set when it is `done`."""

    __slots__ = (
        "adapter", "cached", "ids", "key", "logprobs", "node", "on_done", "params", "prompt", "result", "stopper",
        "support", "version", "versions",
    )  # fmt: skip

    def __init__(self, prompt: list[int], params: SamplingParams, key: object, adapter: str | None) -> None:
        self.prompt, self.params, self.key, self.adapter = prompt, params, key, adapter
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.support: list[tuple[int, ...] | None] = []
        self.node: Trie | None = None
        self.stopper: Stopper | None = None
        self.result: Generation | BaseException | None = None
        self.on_done: Callable[[Request], None] | None = None
        self.versions: list[int] = []
        self.version = self.cached = 0

    def go_on(self, begun: Generation) -> None:
        """Take the tokens of a reply that has already begun."""
        self.ids, self.logprobs, self.versions = list(begun.ids), list(begun.logprobs), list(begun.versions)
        self.support = list(begun.support or [None] * len(begun.ids))
        for token in self.ids if self.node is not None else ():
            assert self.node is not None
            self.node = self.node.children[token]

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that prefill computes when the request gets a slot: the prompt, and earlier sampled
        tokens.
        """
        return self.prompt + self.ids if self.ids else self.prompt

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def length(self) -> int:
        """Return the number of tokens whose keys and values are in the cache: all except the last sampled one."""
        return len(self.prompt) + max(0, len(self.ids) - 1)


class Versioned:
    """Versions of an engine's weights: of the model, and of each adapter that was published alone."""

    version = 0

    def __init__(self) -> None:
        self._own: dict[str, int] = {}

    def version_of(self, adapter: str | None) -> int:
        return self.version if adapter is None else self._own.get(adapter, self.version)

    def _took_over(self, version: int, adapter: str | None = None) -> None:
        if adapter is None:
            self.version, self._own = version, {}
        else:
            self._own[adapter] = version
