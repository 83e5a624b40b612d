"""Contract of all engines, and the registry of engines by name.

    ENGINES.find("torch")(EngineOrder(model, tokenizer, slots=16))       # an engine for these weights
    ENGINES.register("echo", "my_package.echo:make")                     # or an entry point of unitymas.engines

How to add one: docs/new-parts.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from ..basics.json_types import JsonView
from ..basics.named_parts import Registry

if TYPE_CHECKING:
    from ..model.decoder import Decoder
    from ..text.tokenizing import Tokenizer
    from .generation import Generation
    from .sampling import SamplingParams

Ability = Literal["determinism", "tracked truncation", "adapters", "new weights within a reply", "replicas"]


class Engine(Protocol):
    """Contract of an engine: it generates replies to prompts of token ids, with weights that are published to it."""

    stop_ids: frozenset[int]
    """Tokens that end a reply."""
    context: int
    """Largest number of tokens of a prompt and its reply together."""
    version: int
    """Version of the weights that were published last."""
    cannot: Mapping[Ability, str]
    """Abilities that the engine lacks, each with a predicate that says why: `{"adapters": "cannot serve adapters"}`.

    determinism: the same bits for the same request, independently of other requests. tracked truncation: the allowed tokens of
    each position with `top_p` and `top_k`, which training must know. adapters: several low-rank changes of one model.
    new weights within a reply: `publish` does not wait for replies that are begun; they go on with the new weights.
    replicas: several engines with the same weights, behind a router.
    """

    @property
    def counts(self) -> Counter[str]:
        """Counters for the run's report; an engine chooses their names."""
        ...

    async def agenerate(
        self,
        prompt: list[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Answer one prompt, at the same time as other requests. Cancelling the task cancels the request."""
        ...

    def publish(self, model: Decoder, version: int, adapter: str | None = None) -> None:
        """Copy a model's weights, or those of one adapter alone."""
        ...

    def fix_shapes(self) -> None:
        """Give the same bits for the same request from now on. An engine that cannot do this raises ValueError."""
        ...

    def close(self) -> None:
        """Stop what the engine has started: processes, threads."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """Interface of an engine that can give its memory to the learner."""

    @property
    def sleeps(self) -> bool:
        """Tell whether the engine sleeps while policies learn."""
        ...

    def sleep(self) -> None:
        """Free memory until `wake` or `publish`."""
        ...

    def wake(self) -> None:
        """Take the memory back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """Request of a model group for an engine."""

    model: Decoder
    tokenizer: Tokenizer
    slots: int = 64
    """Largest number of concurrent requests."""
    context: int | None = None
    precision: str = "float32"
    deterministic: bool = False
    seed: int = 0
    sleeps: bool = False
    """Flag: free memory for the learner between rollouts, if the engine can."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Rank of each adapter on the model, by name."""
    options: JsonView = field(default_factory=dict)
    """Options of the engine itself: `groups.*.engine_options`."""


ENGINES: Registry[Callable[[EngineOrder], Engine]] = Registry(
    "engine",
    "unitymas.engines",
    __package__,
    {"torch": ".built_in:torch_engine", "vllm": ".built_in:vllm_engine"},
)
