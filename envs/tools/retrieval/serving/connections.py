"""Connections of a server among strangers: how many, for how long, and who leaves when there is no room.

Whoever sends no complete request holds a place for a few seconds at most, and leaves first: a newcomer takes the place
that has been idle longest, of its own address when that has enough, else of the address that holds most. So sockets
that are opened and left alone never keep a client out. aiohttp alone closes no connection that sends nothing, and
counts none.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp.web import Application


@dataclass(slots=True)
class _Connection:
    transport: asyncio.Transport
    address: str
    timer: asyncio.TimerHandle | None = None
    answering: bool = False


class Connections:
    """The connections of one aiohttp server, each known by its protocol object.

    most, most_each: connections in all, and of one address.
    slots, slots_each: requests that are answered at once, in all and for one address.
    first, idle: seconds until a connection must have sent its first request, and until it must send another.
    """

    def __init__(
        self, *, most: int, most_each: int, slots: int, slots_each: int, first: float, idle: float
    ) -> None:
        self.most = min(most, descriptors() // 2)
        self.most_each, self.slots, self.slots_each = most_each, slots, slots_each
        self.first, self.idle = first, idle
        self._all: dict[object, _Connection] = {}  # who has been idle longest stands first
        self._each: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()

    def watch(self, app: Application) -> None:
        """Look at every connection of the server that a runner will make of `app`."""
        make_server = app._make_handler  # called by every runner; the one place at which it can be reached

        def make_watched(**options: Any) -> object:
            server: Any = make_server(**options)
            made, lost = server.connection_made, server.connection_lost

            def connection_made(protocol: object, transport: asyncio.Transport) -> None:
                made(protocol, transport)
                self.made(protocol, transport)

            def connection_lost(protocol: object, error: BaseException | None = None) -> None:
                lost(protocol, error)
                self.lost(protocol)

            server.connection_made, server.connection_lost = connection_made, connection_lost
            return server

        object.__setattr__(app, "_make_handler", make_watched)  # aiohttp warns of other ways to set it

    def made(self, protocol: object, transport: asyncio.Transport) -> None:
        """Take a connection in; another leaves for it where there is no room, or else it leaves itself."""
        address = _address(transport)
        self._all[protocol] = new = _Connection(transport, address)
        self._each[address] += 1
        self._wait(new, self.first)
        if self._each[address] > self.most_each:
            self._close_idlest(address)
        elif len(self._all) > self.most:
            self._close_idlest(self._each.most_common(1)[0][0])

    def lost(self, protocol: object) -> None:
        """Forget a connection that has ended."""
        if connection := self._all.pop(protocol, None):
            _stop(connection)
            self._each[connection.address] -= 1
            self._each += Counter()  # addresses without a connection are forgotten

    @contextmanager
    def request(self, protocol: object) -> Iterator[None]:
        """A request whose headers are there: its body has a time limit of its own, and then the next has."""
        connection = self._all.get(protocol)
        if connection is not None:
            _stop(connection)
        try:
            yield
        finally:
            if protocol in self._all:
                self._all[protocol] = connection = self._all.pop(protocol)
                self._wait(connection, self.idle)

    @contextmanager
    def slot(self, protocol: object) -> Iterator[bool]:
        """A place to answer a complete request, or False when all are taken; while it is answered nobody ends it."""
        connection = self._all.get(protocol)
        if connection is None or not self.has_slot(protocol):
            yield False
            return
        connection.answering = True
        self._busy[connection.address] += 1
        try:
            yield True
        finally:
            connection.answering = False
            self._busy[connection.address] -= 1
            self._busy += Counter()

    def has_slot(self, protocol: object) -> bool:
        """Tell whether a request of this connection could be answered now."""
        connection = self._all.get(protocol)
        mine = self._busy[connection.address] if connection else 0
        return self._busy.total() < self.slots and mine < self.slots_each

    def _wait(self, connection: _Connection, seconds: float) -> None:
        _stop(connection)
        connection.timer = asyncio.get_running_loop().call_later(seconds, connection.transport.abort)

    def _close_idlest(self, address: str) -> None:
        """Close the connection of an address that has been idle longest; the newest, where all others are answered."""
        for connection in self._all.values():
            closing = connection.transport.is_closing()
            if connection.address == address and not connection.answering and not closing:
                connection.transport.abort()
                return


def _stop(connection: _Connection) -> None:
    if connection.timer is not None:
        connection.timer.cancel()
        connection.timer = None


def _address(transport: asyncio.Transport) -> str:
    """Return the address that connects, as far as addresses can be told apart: an IPv4 address, or the 64 bits that name an IPv6 network."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return ""
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address) >> 64 << 64))


def descriptors() -> int:
    """Files that this process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return 2048
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
