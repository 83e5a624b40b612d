"""Contract of a model group: the calls of the controller to a group. It is the only contract between the two sides of
the star.

A group in the controller's process (`ModelGroup`), one in a Ray actor (`RayGroup`) and one of many ranks have the same
methods. Only thin records cross: calls and answers, ids, signals, summaries, metrics. Tensors never do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

from ...agents.answers import Answer, DecisionId
from ...agents.policies import Call
from ..algorithms.algorithm import Algorithm, Needs
from ..controller.statistics.table import Signal, ValueSummary

if TYPE_CHECKING:
    from ...agents.model.decoder import Decoder
    from .sample_store import Sample, SampleRow


class GroupReport(TypedDict, total=False):
    """Report of a group."""

    samples: dict[str, int]
    """Counts by state and by cause."""
    engines: dict[str, dict[str, int]]
    """Counters of the engine of each policy."""
    at: float
    """Time of the report."""
    versions: dict[str, int]
    vocabulary: str
    """Hash of the tokenizer's words."""
    parameters: dict[str, int]
    """Number of parameters of each policy."""
    ranks: list[dict[str, int]]
    """Memory of each rank, in a group with several ranks."""


class Peer(Protocol):
    """Connection from one group to another. It can be sent to a group in any process."""

    async def admit(self, samples: Sequence[Sample]) -> None:
        """Receive sealed samples, or values that were computed for stored samples."""
        ...


class Group(Protocol):
    """One base model with the policies on it, their engines, samples and learners."""

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Answer a call as a policy. The sample is stored until it is sealed or dropped, unless `keep` is off
        (validation). `temperature` replaces the policy's own.
        """
        ...

    async def cancel(self, episode: str, node: str | None = None) -> int:
        """Cancel the requests of an episode, or one of them. Return their number."""
        ...

    async def seal(self, episode: str, keep: Sequence[str]) -> list[DecisionId]:
        """Close an episode. The nodes in `keep` may be trained on. Idempotent. Return their decision ids."""
        ...

    async def drop(self, episode: str, cause: str) -> int:
        """Discard an episode's samples, and count the cause. Return the number of samples."""
        ...

    async def retire(self, episodes: Collection[str]) -> dict[str, int]:
        """End the step for these episodes. Return the counts of their samples, by state."""
        ...

    async def send(self, ids: Sequence[DecisionId], peer: Peer, news: bool = False) -> None:
        """Send sealed samples directly to another group: what a critic needs, or (`news`) only the values that were
        computed for samples which that group has.
        """
        ...

    async def records(
        self, ids: Sequence[DecisionId], policy: str, algorithm: Algorithm, signals: Sequence[Signal]
    ) -> list[SampleRow]:
        """Return the sampled tokens that a run stores, as plain data."""
        ...

    async def admit(self, samples: Sequence[Sample]) -> None:
        """Receive sealed samples of another group, or the values that its critic computed."""
        ...

    async def phase(self, name: str) -> dict[str, int]:
        """Set the phase. In "collect" calls are answered. In "learn" new calls wait. Return the bytes that the group
        holds on its device, by kind.
        """
        ...

    async def values(
        self,
        policy: str,
        ids: Sequence[DecisionId],
        needs: Needs,
        critic: str | None = None,
        contexts: Mapping[DecisionId, str] | None = None,
    ) -> dict[DecisionId, ValueSummary]:
        """Return value summaries by decision id, computed by a critic of this group."""
        ...

    async def prepare(self, policy: str, ids: Sequence[DecisionId]) -> None:
        """Compute the reference's log-probs now. Otherwise the update computes them."""
        ...

    async def update(
        self,
        policy: str,
        algorithm: Algorithm,
        signals: Sequence[Signal],
        minibatches: Sequence[Sequence[DecisionId]],
    ) -> dict[str, float]:
        """Make the optimizer steps of one policy. A failed step changes nothing, and ends the update
        (docs/update-path.md).
        """
        ...

    async def publish(self, policy: str | None = None) -> dict[str, int]:
        """Publish new weights to the engine of a policy (None: of every updated policy). Return the version of every
        policy.
        """
        ...

    async def save(self, path: str | Path) -> None:
        """Save a checkpoint folder, completely or not at all."""
        ...

    async def load(self, path: str | Path) -> dict[str, int]:
        """Load the checkpoint of a group with the same policies. Return the version of every policy."""
        ...

    async def export(self, policy: str, path: str | Path) -> str:
        """Write a policy to a Hugging Face directory, with its tokenizer. Return the path."""
        ...

    async def adopt(self, policy: str, path: str | Path) -> None:
        """Load the parameters of an exported policy. `publish` gives them to the engine."""
        ...

    async def report(self) -> GroupReport:
        """Return samples by state and cause, the engine's counters, versions, sizes, and the vocabulary's
        hash.
        """
        ...

    async def close(self) -> None:
        """End the group and free its memory."""
        ...

    def abandon(self) -> None:
        """End the group without waiting for anything."""
        ...

    @property
    def peer(self) -> Peer:
        """Return the connection for other groups to this one."""
        ...


class PolicyLearner(Protocol):
    """Interface of a policy's learner for its group, in the same process or over ranks."""

    steps: int
    """Number of optimizer steps so far."""

    def update(
        self,
        algorithm: Algorithm,
        signals: Mapping[DecisionId, Signal],
        minibatches: Sequence[Sequence[Sample]],
    ) -> dict[str, float]:
        """Make one optimizer step per mini-batch. Return metrics."""
        ...

    def measure_proximal(self, samples: Sequence[Sample]) -> None:
        """Compute `proximal` of samples without it."""
        ...

    def measure_reference(self, samples: Sequence[Sample]) -> None:
        """Compute `reference` of samples without it."""
        ...

    def measure_values(self, samples: Sequence[Sample]) -> None:
        """Compute `values` of a critic."""
        ...

    def rest(self) -> None:
        """Free memory that no later call needs."""
        ...

    def published(self) -> Decoder:
        """Return the present model, for an engine."""
        ...


METHODS = tuple(
    name for name in vars(Group) if not name.startswith("_") and name not in ("close", "abandon", "peer")
)
"""Names of a group's methods, which are the same in every runtime."""
