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
    ids: list[int]  # exactly what was sampled, the closing token included
    logprobs: list[float]  # under the distribution that each token was drawn from
    finish_reason: str  # stop | length | overflow (the prompt did not fit) | cancelled
    text: str = ""
    support: list[tuple[int, ...] | None] | None = (
        None  # allowed tokens of each id; None where all tokens were allowed
    )
    version: int = 0  # version of the weights that drew the first token
    versions: list[int] = field(default_factory=list)  # version that drew each token
    cached: int = 0  # prompt tokens whose keys and values were copied, not computed

    @property
    def switches(self) -> tuple[tuple[int, int], ...]:
        """Tokens from which newer weights drew, each with the version; empty where one version drew all."""
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
        """Take over the tokens of a reply that was begun."""
        self.ids, self.logprobs, self.versions = list(begun.ids), list(begun.logprobs), list(begun.versions)
        self.support = list(begun.support or [None] * len(begun.ids))
        for token in self.ids if self.node is not None else ():
            assert self.node is not None
            self.node = self.node.children[token]

    @property
    def tokens(self) -> list[int]:
        """Tokens that prefill computes when the request gets a slot: the prompt, and what was sampled before."""
        return self.prompt + self.ids if self.ids else self.prompt

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are in the cache: all but the last one sampled."""
        return len(self.prompt) + max(0, len(self.ids) - 1)


class Versioned:
    """Versions of the weights of an engine: of the model, and of each adapter that was published alone."""

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
