"""Limits on the connections of a public server: their number, their time, and which one is closed when there are too many.

A client that sends no complete request keeps its connection for a few seconds only. If there are too many connections, the
one that has been idle longest is closed for the new one: one of the same address if this address has reached its limit, else
one of the address with the most connections. So idle sockets never keep a client out. aiohttp itself does not count
connections, and does not close silent ones.
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
class _PooledConnection:
    transport: asyncio.Transport
    address: str
    timer: asyncio.TimerHandle | None = None
    answering: bool = False


class Connections:
    """Connections of one aiohttp server, by protocol object.

    most, most_each: limits on connections, in all and of one address.
    slots, slots_each: limits on requests that are answered at the same time, in all and of one address.
    first, idle: seconds within which a connection must send its first request, and each further one.
    """

    def __init__(
        self, *, most: int, most_each: int, slots: int, slots_each: int, first: float, idle: float
    ) -> None:
        self.most = min(most, descriptors() // 2)
        self.most_each, self.slots, self.slots_each = most_each, slots, slots_each
        self.first, self.idle = first, idle
        self._all: dict[object, _PooledConnection] = {}  # the longest idle one first
        self._each: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()

    def watch(self, app: Application) -> None:
        """Watch every connection of the server that a runner makes from `app`."""
        make_server = app._make_handler  # every runner calls it; there is no other hook

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

        # a plain assignment causes a warning of aiohttp
        object.__setattr__(app, "_make_handler", make_watched)

    def made(self, protocol: object, transport: asyncio.Transport) -> None:
        """Add a connection. If there are too many, close the longest idle one, or this one if all others are busy."""
        address = _address(transport)
        self._all[protocol] = new = _PooledConnection(transport, address)
        self._each[address] += 1
        self._wait(new, self.first)
        if self._each[address] > self.most_each:
            self._close_idlest(address)
        elif len(self._all) > self.most:
            self._close_idlest(self._each.most_common(1)[0][0])

    def lost(self, protocol: object) -> None:
        """Remove a connection that has ended."""
        if connection := self._all.pop(protocol, None):
            _stop(connection)
            self._each[connection.address] -= 1
            self._each += Counter()  # drops addresses without a connection

    @contextmanager
    def request(self, protocol: object) -> Iterator[None]:
        """Mark a request whose headers have arrived. Its body has its own time limit; afterwards the next request has one."""
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
        """Take a slot for a complete request. Yield False if all are taken. The connection is not closed meanwhile."""
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
        """Tell whether a slot is free for a request of this connection."""
        connection = self._all.get(protocol)
        mine = self._busy[connection.address] if connection else 0
        return self._busy.total() < self.slots and mine < self.slots_each

    def _wait(self, connection: _PooledConnection, seconds: float) -> None:
        _stop(connection)
        connection.timer = asyncio.get_running_loop().call_later(seconds, connection.transport.abort)

    def _close_idlest(self, address: str) -> None:
        """Close an address's longest idle connection, or its newest one if all others are being answered."""
        for connection in self._all.values():
            closing = connection.transport.is_closing()
            if connection.address == address and not connection.answering and not closing:
                connection.transport.abort()
                return


def _stop(connection: _PooledConnection) -> None:
    if connection.timer is not None:
        connection.timer.cancel()
        connection.timer = None


def _address(transport: asyncio.Transport) -> str:
    """Return the client's address: an IPv4 address, or the 64 bits of an IPv6 network, whose hosts one client may all have."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return ""
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address) >> 64 << 64))


def descriptors() -> int:
    """Return the number of files that this process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return 2048
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
