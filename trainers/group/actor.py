"""Link between the controller and a group in a Ray actor.

All calls of one tick of the controller's event loop travel in one message. Answers come back in batches: each message
holds all that are ready by then. So the number of Ray's messages does not grow with the number of calls, and the
controller is the limit, not Ray (`unitymas bench star`).

    controller   ask, ask, ask ── post(parcel) ──▶ actor     a parcel: (ticket, call) …
                                ◀── take()  ──────            a batch: (ticket, answer or exception) …

The calls of one link begin in the order in which they were asked, across messages too.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import platform
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...agents.answers import Answer, DecisionId
from ...agents.basics.failures import GroupLost
from ...agents.policies import Call
from ..algorithms.algorithm import Algorithm, Needs
from ..config.group_settings import GroupSpec
from ..controller.statistics.table import Signal, ValueSummary
from .cluster import release
from .contract import GroupReport, Peer

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

    from .sample_store import Sample, SampleRow

T = TypeVar("T")

Parcel = list[tuple[int, bytes]]
"""Calls of one tick, each packed by itself, so that one that cannot travel harms no other: ticket, (method, arguments)."""
Answers = list[tuple[int, bytes]]
"""Answers that are ready: ticket, (success, the value or the exception)."""


class ActorLink:
    """Controller's end of the link: `await link.ask("generate", policy, call)`. It belongs to one event loop."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor, self.loop, self.name = actor, asyncio.get_running_loop(), uuid.uuid4().hex
        self.tickets, self.parcels = itertools.count(), itertools.count()
        self.outbox: Parcel = []
        self.open: dict[int, asyncio.Future[object]] = {}
        self.reader: asyncio.Task[None] | None = None

    async def ask(self, method: str, *arguments: object) -> Any:
        """Return the actor's answer, or raise the exception that was raised in the actor."""
        ticket = self.tell(method, *arguments)
        answer = self.open[ticket] = self.loop.create_future()
        if self.reader is None or self.reader.done():
            self.reader = self.loop.create_task(self._read())
        try:
            return await answer
        finally:
            del self.open[ticket]

    def tell(self, method: str, *arguments: object) -> int:
        """Put a call into the parcel of this tick. Return its ticket. The caller need not wait for the answer."""
        try:
            packed = pickle.dumps((method, arguments), protocol=5)
        except Exception as error:
            raise TypeError(f"{method}: an argument cannot be sent to a Ray actor: {error}") from error
        ticket = next(self.tickets)
        self.outbox.append((ticket, packed))
        if len(self.outbox) == 1:
            self.loop.call_soon(self._send)
        return ticket

    def _send(self) -> None:
        outbox, self.outbox = self.outbox, []
        self.actor.post.remote(self.name, next(self.parcels), outbox)

    async def _read(self) -> None:
        """Read batches while an answer is awaited. If the actor is gone, all open calls fail."""
        try:
            while self.open:
                for ticket, packed in await self.actor.take.remote(self.name):
                    answer = self.open.get(ticket)
                    if answer is not None and not answer.done():  # otherwise its caller was cancelled
                        settle(answer, packed)
                await asyncio.sleep(0)  # callers continue first, and their next calls make one parcel
        except Exception as error:
            for answer in self.open.values():
                if not answer.done():
                    answer.set_exception(error)


def settle(answer: asyncio.Future[object], packed: bytes) -> None:
    """Give a caller the value or the exception."""
    try:
        success, value = pickle.loads(packed)
    except Exception as error:
        success, value = False, TypeError(f"an answer of the group cannot be read here: {error}")
    if success:
        answer.set_result(value)
    else:
        answer.set_exception(value)


@dataclass(frozen=True, slots=True)
class ActorPeer:
    """Connection from one group's actor to another's. Samples travel between the two, and never through the
    controller.
    """

    actor: ActorHandle
    name: str

    async def admit(self, samples: Sequence[Sample]) -> None:
        """Send samples. Errors of the other actor are raised here. If that actor is gone, the error names it."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            await self.actor.receive.remote(samples)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise GroupLost(f"group {self.name!r} is gone: {str(error).strip().splitlines()[0]}") from error


class ActorCaller:
    """Caller of an actor, over the link of the running event loop. If the actor is gone, the error is a lost group with
    its name.
    """

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self.name, self.actor = name, actor
        self._link: ActorLink | None = None

    @property
    def link(self) -> ActorLink:
        """Return the link of the running event loop."""
        if self._link is None or self._link.loop is not asyncio.get_running_loop():
            self._link = ActorLink(self.actor)
        return self._link

    async def begin(self) -> None:
        """Wait until the actor has started. Its node must have the same versions of libraries as this process."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            there = await self.actor.begin.remote()
        except RayActorError as error:
            lines = str(error).strip().splitlines()
            if getattr(error, "actor_init_failed", False):  # its own code raised, and would do so again
                raise RuntimeError(
                    f"{self.name} cannot start on its node: {lines[-1]}; all nodes need the same packages and files"
                ) from error
            raise GroupLost(f"{self.name} is gone while it starts: {lines[0]}") from error
        except RayTaskError as error:
            raise error.cause from error
        check_versions(self.name, there)

    async def _ask(self, method: str, *arguments: object) -> Any:
        return await self._lost(self.link.ask(method, *arguments))

    async def _lost(self, answer: Awaitable[T]) -> T:
        """Await an answer. If the actor is gone, raise a lost group with its name."""
        from ray.exceptions import RayActorError

        try:
            return await answer
        except RayActorError as error:
            cause = str(error).strip().splitlines()[0]
            raise GroupLost(f"{self.name} is gone: {cause}") from error

    def abandon(self) -> None:
        """Stop the actor without waiting."""
        import ray

        ray.kill(self.actor)


class RayGroup(ActorCaller):
    """Model group in an actor. Each method returns what the group's own method returns."""

    def __init__(self, spec: GroupSpec, actor: ActorHandle, reserved: PlacementGroup | None = None) -> None:
        super().__init__(f"group {spec.name!r}", actor)
        self.spec, self.reserved = spec, reserved

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Generate as the group does. If the caller here is cancelled, the request in the actor is cancelled, too."""
        link = self.link
        try:
            answer: Answer = await self._lost(link.ask("generate", policy, call, temperature, keep))
            return answer
        except asyncio.CancelledError:
            link.tell("cancel", call.episode, call.node)
            raise

    async def cancel(self, episode: str, node: str | None = None) -> int:
        answer: int = await self._ask("cancel", episode, node)
        return answer

    async def seal(self, episode: str, keep: Sequence[str]) -> list[DecisionId]:
        answer: list[DecisionId] = await self._ask("seal", episode, keep)
        return answer

    async def drop(self, episode: str, cause: str) -> int:
        answer: int = await self._ask("drop", episode, cause)
        return answer

    async def retire(self, episodes: Collection[str]) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("retire", episodes)
        return answer

    async def send(self, ids: Sequence[DecisionId], peer: Peer, news: bool = False) -> None:
        await self._ask("send", ids, peer, news)

    @property
    def peer(self) -> Peer:
        return ActorPeer(self.actor, self.spec.name)

    async def records(
        self, ids: Sequence[DecisionId], policy: str, algorithm: Algorithm, signals: Sequence[Signal]
    ) -> list[SampleRow]:
        answer: list[SampleRow] = await self._ask("records", ids, policy, algorithm, signals)
        return answer

    async def admit(self, samples: Sequence[Sample]) -> None:
        await self._ask("admit", samples)

    async def phase(self, name: str) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("phase", name)
        return answer

    async def values(
        self,
        policy: str,
        ids: Sequence[DecisionId],
        needs: Needs,
        critic: str | None = None,
        contexts: Mapping[DecisionId, str] | None = None,
    ) -> dict[DecisionId, ValueSummary]:
        answer: dict[DecisionId, ValueSummary] = await self._ask(
            "values", policy, ids, needs, critic, contexts
        )
        return answer

    async def prepare(self, policy: str, ids: Sequence[DecisionId]) -> None:
        await self._ask("prepare", policy, ids)

    async def update(
        self,
        policy: str,
        algorithm: Algorithm,
        signals: Sequence[Signal],
        minibatches: Sequence[Sequence[DecisionId]],
    ) -> dict[str, float]:
        answer: dict[str, float] = await self._ask("update", policy, algorithm, signals, minibatches)
        return answer

    async def publish(self, policy: str | None = None) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("publish", policy)
        return answer

    async def save(self, path: str | Path) -> None:
        await self._ask("save", path)

    async def load(self, path: str | Path) -> dict[str, int]:
        answer: dict[str, int] = await self._ask("load", path)
        return answer

    async def export(self, policy: str, path: str | Path) -> str:
        answer: str = await self._ask("export", policy, path)
        return answer

    async def adopt(self, policy: str, path: str | Path) -> None:
        await self._ask("adopt", policy, path)

    async def report(self) -> GroupReport:
        answer: GroupReport = await self._ask("report")
        return answer

    async def close(self) -> None:
        """Stop the actor and free its memory."""
        self.abandon()

    def abandon(self) -> None:
        """Stop the actor without waiting, and release its resources."""
        super().abandon()
        release(self.reserved)
        self.reserved = None


@dataclass(slots=True)
class LinkEnd:
    """One link at the actor's end."""

    expected: int = 0
    """Number of the parcel that must begin next."""
    early: dict[int, Parcel] = field(default_factory=dict)
    """Parcels that arrived before an earlier one."""
    ready: Answers = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class GroupActor:
    """Actor's end: a group that is called through links. It is constructed inside the actor."""

    def __init__(self, kind: Callable[..., Any], *arguments: object) -> None:
        self.obstacle: Exception | None = None
        try:
            self.group = kind(*arguments)
        except Exception as error:  # `begin` reports the error; Ray would report the death of an actor
            self.obstacle = error
        self.channels: dict[str, LinkEnd] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> dict[str, str]:
        """Return the versions of libraries here, when the group has started. Raise the error if it could not start."""
        if self.obstacle is not None:
            raise sendable(self.obstacle)
        return versions()

    async def post(self, link: str, number: int, parcel: Parcel) -> None:
        """Begin the calls of a parcel. Ray may deliver parcels in another order, so an early parcel waits."""
        channel = self.channels.setdefault(link, LinkEnd())
        channel.early[number] = parcel
        while (following := channel.early.pop(channel.expected, None)) is not None:
            channel.expected += 1
            for ticket, packed in following:
                task = asyncio.ensure_future(self._answer(channel, ticket, packed))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def take(self, link: str) -> Answers:
        """Return the answers that are ready. If there is none, wait for the first."""
        channel = self.channels.setdefault(link, LinkEnd())
        await channel.filled.wait()
        await asyncio.sleep(0)  # answers of the same tick join the batch
        batch, channel.ready = channel.ready, []
        channel.filled.clear()
        return batch

    async def receive(self, samples: Sequence[Sample]) -> None:
        """Receive samples that another group's actor sends."""
        await self.group.admit(samples)

    async def _answer(self, channel: LinkEnd, ticket: int, packed: bytes) -> None:
        outcome = await self._outcome(packed)
        channel.ready.append((ticket, outcome))
        channel.filled.set()

    async def _outcome(self, packed: bytes) -> bytes:
        try:
            method, arguments = pickle.loads(packed)
            return pickle.dumps((True, await getattr(self.group, method)(*arguments)), protocol=5)
        except asyncio.CancelledError:
            return pickle.dumps((False, RuntimeError("the group was closed during this call")))
        except Exception as error:
            return pickle.dumps((False, sendable(error)))


def versions() -> dict[str, str]:
    """Return the versions on which equal results depend."""
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("unitymas", "ray", "torch", "transformers")
    }


def check_versions(who: str, there: Mapping[str, str]) -> None:
    """Refuse a node with other versions than this one."""
    here = versions()
    other = [f"{name} {there[name]} instead of {here[name]}" for name in here if here[name] != there[name]]
    if other:
        raise ValueError(f"{who}: its node has {', '.join(other)}; install the same versions on all nodes")


def sendable(error: Exception) -> Exception:
    """Return the exception, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
