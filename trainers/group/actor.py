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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...agents.basics.failures import GroupLost

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from .sample_store import Sample

Parcel = list[tuple[int, bytes]]
"""Calls of one tick, each packed by itself, so that one that cannot travel harms no other: ticket, (method, arguments)."""
Batch = list[tuple[int, bytes]]
"""Answers that are ready: ticket, (success, the value or the exception)."""


class ActorLink:
    """The controller's end: `await link.ask("generate", policy, call)`. It belongs to one event loop."""

    def __init__(self, actor: ActorHandle) -> None:
        self.actor, self.loop, self.name = actor, asyncio.get_running_loop(), uuid.uuid4().hex
        self.tickets, self.parcels = itertools.count(), itertools.count()
        self.outbox: Parcel = []
        self.open: dict[int, asyncio.Future[object]] = {}
        self.reader: asyncio.Task[None] | None = None

    async def ask(self, method: str, *arguments: object) -> Any:
        """Return the actor's answer, or raise the very exception that was raised there."""
        ticket = self.tell(method, *arguments)
        answer = self.open[ticket] = self.loop.create_future()
        if self.reader is None or self.reader.done():
            self.reader = self.loop.create_task(self._read())
        try:
            return await answer
        finally:
            del self.open[ticket]

    def tell(self, method: str, *arguments: object) -> int:
        """Put a call into the parcel of this tick. Return its ticket; nobody needs to wait for the answer."""
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
        """Take batches while an answer is awaited. An actor that is gone fails all of them."""
        try:
            while self.open:
                for ticket, packed in await self.actor.take.remote(self.name):
                    answer = self.open.get(ticket)
                    if answer is not None and not answer.done():  # else its caller was cancelled
                        settle(answer, packed)
                await asyncio.sleep(0)  # callers go on first, and what they ask next makes one parcel
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
    """Way from one group's actor to another's: samples travel between the two, and never through the controller."""

    actor: ActorHandle
    name: str

    async def admit(self, samples: Sequence[Sample]) -> None:
        """Send samples. Errors there are raised here; an actor that is gone has a name."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            await self.actor.receive.remote(samples)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise GroupLost(f"group {self.name!r} is gone: {str(error).strip().splitlines()[0]}") from error


@dataclass(slots=True)
class LinkEnd:
    """One link at the actor's end."""

    expected: int = 0
    """Number of the parcel that begins next."""
    early: dict[int, Parcel] = field(default_factory=dict)
    """Parcels that overtook another one."""
    ready: Batch = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class GroupActor:
    """The actor's end: a group, asked through links. It is built inside the actor."""

    def __init__(self, kind: Callable[..., Any], *arguments: object) -> None:
        self.obstacle: Exception | None = None
        try:
            self.group = kind(*arguments)
        except Exception as error:  # told as it is by `begin`; Ray would tell it as the death of an actor
            self.obstacle = error
        self.channels: dict[str, LinkEnd] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> dict[str, str]:
        """Return the versions of what computes here, once the group stands. Raise what kept it from standing."""
        if self.obstacle is not None:
            raise sendable(self.obstacle)
        return versions()

    async def post(self, link: str, number: int, parcel: Parcel) -> None:
        """Begin the calls of a parcel. Ray may deliver parcels in another order: an early one waits."""
        channel = self.channels.setdefault(link, LinkEnd())
        channel.early[number] = parcel
        while (following := channel.early.pop(channel.expected, None)) is not None:
            channel.expected += 1
            for ticket, packed in following:
                task = asyncio.ensure_future(self._answer(channel, ticket, packed))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def take(self, link: str) -> Batch:
        """Return the answers that are ready; wait for the first."""
        channel = self.channels.setdefault(link, LinkEnd())
        await channel.filled.wait()
        await asyncio.sleep(0)  # what ends in the same tick goes along
        batch, channel.ready = channel.ready, []
        channel.filled.clear()
        return batch

    async def receive(self, samples: Sequence[Sample]) -> None:
        """Take in samples that another group's actor sends."""
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
    """Refuse a node that computes with other versions than this one."""
    here = versions()
    other = [f"{name} {there[name]} instead of {here[name]}" for name in here if here[name] != there[name]]
    if other:
        raise ValueError(f"{who}: its node has {', '.join(other)}; install the same versions on all nodes")


def sendable(error: Exception) -> Exception:
    """Return the exception itself, or its words where it does not survive the journey."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
