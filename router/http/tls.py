"""HTTPS connections before their first request: a handshake is a guest of the door, too, and has a time.

    accepted ──▶ a stranger among the guests ──handshake──▶ a connection of uvicorn's, a stranger again until its request is there
                      │ fails, or not within HELLO_S, or others need the room
                      └──▶ closed

asyncio tells nobody of a connection before its handshake is over, gives it a minute, and holds 50 KiB (300 without uvloop) for
each: whoever connected and said nothing took as many as he liked. Does not know HTTP or certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from contracts.clock import MonotonicClock
from contracts.upkeep import kept_up
from observability.log import get_logger
from router.http.guests import Guest, Guests

log = get_logger(__name__)
HELLO_S = 10.0
_PAUSE_S = 0.1  # when nothing can be accepted: others may give descriptors back


class TlsListener:
    """Owns the handshakes of `listener`, which it does not own, from `start` to `stop`."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        guests: Guests,
        make: Callable[[Guest], asyncio.Protocol],
    ) -> None:
        """`make` gets the guest whose place its connection takes."""
        self._listener = listener
        self._context = context
        self._guests = guests
        self._make = make
        self._accepting: asyncio.Task[None] | None = None
        self._greeting: dict[asyncio.Task[None], _Knock] = {}

    def start(self) -> None:
        """Accept from now on."""
        self._listener.setblocking(False)
        accepting = kept_up("https accept", self._accept, MonotonicClock(), lambda _: None)
        self._accepting = asyncio.ensure_future(accepting)

    async def stop(self) -> None:
        """Accept nothing, and end what has not become a connection. Idempotent."""
        accepting, self._accepting = self._accepting, None
        if accepting is None:
            return
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        for knock in self._greeting.values():
            knock.make_room()
        if self._greeting:
            await asyncio.wait(tuple(self._greeting))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a connection", reason=error)
                await asyncio.sleep(_PAUSE_S)
                continue
            knock = _Knock(connection)
            if not self._guests.come(knock):
                connection.close()  # there is no way to say more before the handshake
                continue
            greeting = asyncio.ensure_future(self._greet(knock))
            self._greeting[greeting] = knock
            greeting.add_done_callback(self._greeting.pop)

    async def _greet(self, knock: _Knock) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self._make(knock), knock.connection, ssl=self._context, ssl_handshake_timeout=HELLO_S
            )
        except OSError as error:
            log.debug("no TLS connection came about", reason=error)
        finally:
            self._guests.leave(knock)


class _Knock:
    """One that has connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def make_room(self) -> None:
        """See Guest. Who waits for the handshake hears that the other side has gone."""
        with contextlib.suppress(OSError):  # it has gone already
            self.connection.shutdown(socket.SHUT_RDWR)
