"""The samples of one model group: prompts and replies, token by token, until they have been trained.

    open -> sealed -> taken -> retired          put: open;  seal: sealed;  take: taken;  retire: gone

An episode is sealed once, when all its credits are known. Sealing names the decisions that may train. `seal` and
`drop` are idempotent, because the controller may call again after a lost answer. A sample that arrives for a closed
episode is refused and counted as late. Every sample that is not trained is counted by its cause: the sum over
causes and states is the number of samples ever put.

Token ids here are those that the engine saw and drew. Nothing is ever tokenised again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...agents.answers import DecisionId
from ...agents.basics.json_types import JsonObject
from ..controller.checkpoint import Saved

SampleState = Literal["open", "sealed", "taken"]


class SampleRow(TypedDict, total=False):
    """Line of a run's `samples/` sidecar: one sample, token by token."""

    id: str
    policy: str
    version: int
    versions: list[int]
    role: str
    prompt_ids: list[int]
    reply_ids: list[int]
    tokens: list[str]
    logprobs: list[float]
    advantages: list[float] | None
    temperature: float
    support: tuple[tuple[int, ...] | None, ...] | None
    finish_reason: str


@dataclass(slots=True)
class Sample:
    """One decision, token by token, and how it was sampled: its temperature and its allowed tokens."""

    episode: str
    node: str
    policy: str
    version: int
    """Version of the policy that sampled the first token."""
    prompt: NDArray[np.int64]
    reply: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    """Log-probability of each reply token as sampled: at `temperature`, within `support`."""
    versions: NDArray[np.int64] | None = None
    """Version that sampled each reply token. None: `version` sampled all of them."""
    temperature: float = 1.0
    support: tuple[tuple[int, ...] | None, ...] | None = None
    """Token ids that were allowed at each reply token (choices, top-p, top-k). None: the whole vocabulary."""
    finish_reason: str = "stop"
    role: str = ""
    thinking: int = 0
    """Number of the reply's first tokens that are closed thinking."""
    values: NDArray[np.float32] | None = None
    """The critic's value before each reply token and, last, after all of them (n_tokens + 1). None until
    computed.
    """
    proximal: NDArray[np.float32] | None = None
    """Log-probs at the start of an update."""
    proximal_at: int = -1
    """Number of optimizer steps that the policy had made when `proximal` was computed."""
    reference: NDArray[np.float32] | None = None
    """Log-probs under the frozen reference. None until computed."""
    critic_prompt: NDArray[np.int64] | None = None
    """Prompt of the critic, if it reads more than the policy does."""
    state: SampleState = "open"

    @classmethod
    def of(cls, plain: Saved) -> Sample:
        """Restore a sample from the result of `plain`."""
        own: JsonObject = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in plain.items()}
        return cls(**own)

    def plain(self) -> dict[str, object]:
        """Return tensors and plain data, for a checkpoint."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in own.items()}

    @property
    def id(self) -> DecisionId:
        return DecisionId(self.episode, self.node)

    @property
    def n_tokens(self) -> int:
        return len(self.reply)

    def for_critic(self) -> Sample:
        """Return what a critic in another group needs: token ids, their positions, and computed values."""
        return replace(self, support=None)

    def news(self) -> Sample:
        """Return the values computed for the sample, without its tokens."""
        none = np.empty(0, np.int64)
        empty = replace(self, prompt=none, reply=none, behaviour=np.empty(0, np.float32))
        return replace(empty, support=None, critic_prompt=None)

    def record(self, tokens: list[str], advantages: list[float] | None) -> SampleRow:
        """Return plain data for the `samples/` sidecar of a run. `tokens` are the text pieces of the reply's tokens."""
        return {
            "id": str(self.id),
            "policy": self.policy,
            "version": self.version,
            **({} if self.versions is None else {"versions": self.versions.tolist()}),
            "role": self.role,
            "prompt_ids": self.prompt.tolist(),
            "reply_ids": self.reply.tolist(),
            "tokens": tokens,
            "logprobs": self.behaviour.tolist(),
            "advantages": advantages,
            "temperature": self.temperature,
            "support": self.support,
            "finish_reason": self.finish_reason,
        }


class SampleStore:
    """All samples of a group, by decision id."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, Sample]] = {}  # episode -> node -> sample
        self._closed: dict[
            str, frozenset[str]
        ] = {}  # episode -> nodes with which it was sealed (empty: dropped)
        # the dropped and retired episodes among these: remembered only for late replies
        self._over: set[str] = set()
        self._guests: dict[
            str, dict[str, Sample]
        ] = {}  # samples of other groups, whose episodes are open in those groups
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Sample]:
        for samples in (self._samples, self._guests):
            for nodes in samples.values():
                yield from nodes.values()

    def put(self, sample: Sample) -> bool:
        """Store a new sample. If its episode is already closed, count the sample as late and return False."""
        self.counts["put"] += 1
        if sample.episode in self._closed:
            self.counts["discarded/late"] += 1
            return False
        nodes = self._samples.setdefault(sample.episode, {})
        if sample.node in nodes:  # repeated request: only the last reply is in the trace
            self.counts["discarded/superseded"] += 1
        nodes[sample.node] = sample
        return True

    def seal(self, episode: str, keep: Collection[str]) -> list[DecisionId]:
        """Close an episode. The nodes in `keep` may be trained on, and the others are discarded. Return the ids of the
        kept ones, in order.
        """
        trainable = frozenset(keep)
        if episode in self._closed:
            if self._closed[episode] != trainable:
                raise ValueError(
                    f"episode {episode!r} was already closed with other nodes: "
                    f"{sorted(self._closed[episode])}, now {sorted(trainable)}. An episode is sealed once."
                )
            return [DecisionId(episode, node) for node in keep]
        nodes = self._samples.get(episode, {})
        missing = sorted(trainable - nodes.keys())
        if missing:
            raise KeyError(
                f"episode {episode!r} cannot be sealed: nodes {missing} were never stored here "
                f"(this group holds {sorted(nodes)}). Seal each node in the group that sampled it."
            )
        for node in sorted(nodes.keys() - trainable):
            del nodes[node]
            self.counts["discarded/not-kept"] += 1
        for sample in nodes.values():
            sample.state = "sealed"
        self._closed[episode] = trainable
        return [DecisionId(episode, node) for node in keep]

    def drop(self, episode: str, cause: str) -> int:
        """Discard all of an episode's samples in any state, and count them under `cause`. Return their number."""
        gone = [*self._samples.pop(episode, {}).values(), *self._guests.pop(episode, {}).values()]
        self.counts[f"discarded/{cause}"] += len(gone)
        self._closed.setdefault(episode, frozenset())
        self._over.add(episode)
        return len(gone)

    def take(self, ids: Iterable[str]) -> list[Sample]:
        """Return the samples of an update, in the given order. They must be sealed or already taken."""
        taken = [self.get(id) for id in ids]
        for sample in taken:
            if sample.state == "open":
                raise ValueError(
                    f"sample {sample.id!r} is still open: seal its episode before training on it"
                )
            sample.state = "taken"
        return taken

    def retire(self, episodes: Iterable[str], expected: Collection[str] = ()) -> None:
        """Remove the samples of these episodes, because their step is over. Taken samples count as trained, others do
        not. Episodes with `expected` replies are remembered until all replies have come.
        """
        for episode in episodes:
            own, guests = self._samples.pop(episode, {}), self._guests.pop(episode, {})
            for sample in (*own.values(), *guests.values()):
                self.counts["trained" if sample.state == "taken" else "discarded/unused"] += 1
            self._closed.setdefault(episode, frozenset())
            self._over.add(episode)
        for episode in self._over.difference(expected):
            del self._closed[episode]
        self._over.intersection_update(expected)

    def admit(self, sample: Sample) -> None:
        """Store a sealed sample of another group (for a critic here), or new values of a stored sample."""
        sample_here = self._find(sample.id) if sample.n_tokens else self.get(sample.id)
        if sample_here is None:
            self.counts["put"] += 1
            sample.state = "sealed"
            self._guests.setdefault(sample.episode, {})[sample.node] = sample
            return
        for news in ("values", "proximal", "reference"):
            if getattr(sample, news) is not None:
                setattr(sample_here, news, getattr(sample, news))

    def get(self, id: str) -> Sample:
        """Return one sample by decision id. The error for a missing one tells what happened to it."""
        sample = self._find(id)
        if sample is None:
            fate = (
                "its episode is closed: it was dropped or retired"
                if DecisionId.of(id).episode in self._closed
                else "never stored, or retired with its step"
            )
            raise KeyError(f"no sample {id!r} in this group ({fate})")
        return sample

    def summary(self) -> dict[str, int]:
        """Return counts by state and by cause."""
        states = Counter(sample.state for sample in self)
        return {**{f"held/{state}": states[state] for state in ("open", "sealed", "taken")}, **self.counts}

    def state_dict(self) -> dict[str, object]:
        """Return tensors and plain data, for a checkpoint."""
        return {
            "samples": [s.plain() for nodes in self._samples.values() for s in nodes.values()],
            "guests": [s.plain() for nodes in self._guests.values() for s in nodes.values()],
            "closed": {e: sorted(nodes) for e, nodes in self._closed.items() if e not in self._over},
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Saved) -> None:
        self._samples, self._guests = {}, {}
        for name, store in (("samples", self._samples), ("guests", self._guests)):
            for sample in map(Sample.of, state[name]):
                store.setdefault(sample.episode, {})[sample.node] = sample
        self._closed = {episode: frozenset(nodes) for episode, nodes in state["closed"].items()}
        self._over = set()
        self.counts = Counter(state["counts"])

    def _find(self, id: str) -> Sample | None:
        name = DecisionId.of(id)
        own, guests = self._samples.get(name.episode, {}), self._guests.get(name.episode, {})
        return own.get(name.node) or guests.get(name.node)
