"""The HTTP door's socket: uvicorn on a port of our own, and connections that do not wait for a client for ever.

    accepted ──▶ a request arrives whole ──▶ its answer is written ──▶ idle (keep-alive) ──▶ …
                    │ not within stall_s          │ not read for stall_s      │ keep_alive_s     or its host has vanished
                    └──────────▶ cut ◀────────────┘                           └──▶ closed

How many there may be at once is `router.http.guests`'s; what comes before this over TLS is `router.http.tls`'s.
A connection that is cut looks to the application like a client that has left. Does not know requests or answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
from collections.abc import Iterator
from http import HTTPStatus

import uvicorn
from starlette.types import ASGIApp

from contracts.errors import ConfigError
from observability.log import get_logger
from router.config import HttpConfig
from router.http.arrival import waited_s
from router.http.guests import Guest, Guests
from router.http.protocol import BoundedHttp
from router.http.tls import TlsListener
from router.http.visit import SCOPE_KEY, Visit, Visits
from rpc.server import join_address
from rpc.tls import TlsFiles
from rpc.tls_context import server_context

log = get_logger(__name__)
_ACCEPTED_AT_ONCE = 64  # asyncio takes its backlog as this, too: thousands in one turn of the loop hold every answer up
_BYE_S = 1.0
SLOWEST_BYTES_S = 64 * 1024  # that a client may read: what waits for it is held in memory
_WAITING_TO_BE_ACCEPTED = 2048  # by the kernel


class HttpServer:
    """Owns the socket and its connections from `bind` to `stop`."""

    def __init__(self, config: HttpConfig, app: ASGIApp) -> None:
        self._config = config
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._guests = Guests(config.max_connections)
        self._door = _door(config.stall_s, self._guests)
        self._tls: TlsListener | None = None
        self._uvicorn_config = uvicorn.Config(
            app,
            http=self._door,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks for a client's address: it is only logged, as it is
            timeout_keep_alive=config.keep_alive_s,
            backlog=_ACCEPTED_AT_ONCE,
        )
        self._server = _Uvicorn(self._uvicorn_config)

    def bind(self) -> int:
        """Take the port and return it. Raises ConfigError when it cannot be had, or a TLS file cannot be used."""
        self._uvicorn_config.load()
        tls = self._config.tls
        context = server_context(TlsFiles(tls)) if tls is not None and tls.listens else None
        host, port = self._config.host.strip("[]"), self._config.port
        try:
            family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, proto)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _notice_vanished(self._socket, self._config.stall_s)
            self._socket.bind(place)
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
            raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from error
        if context is not None:
            self._tls = TlsListener(self._socket, context, self._guests, self._shaken)
        return int(self._socket.getsockname()[1])

    def _shaken(self, knock: Guest) -> asyncio.Protocol:
        """What uvicorn makes for a connection, for one whose handshake is over."""
        made = self._door(self._uvicorn_config, self._server.server_state, self._server.lifespan.state)
        made.knock = knock
        return made

    async def start(self) -> None:
        """Accept requests from now on."""
        assert self._socket is not None
        listening = [self._socket] if self._tls is None else []
        self._task = asyncio.ensure_future(self._server.serve(sockets=listening))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0)
        if self._task.done():
            await self._task
        self._socket.listen(_WAITING_TO_BE_ACCEPTED)
        if self._tls is not None:
            self._tls.start()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing, let running answers end within `grace_s`, cancel the rest. Idempotent."""
        if self._tls is not None:
            assert self._socket is not None
            await self._tls.stop()
            self._socket.close()
        task, self._task = self._task, None
        if task is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
            self._server.should_exit = True
            await task
        if self._socket is not None:
            self._socket.close()


def _notice_vanished(listener: socket.socket, stall_s: float) -> None:
    """A client whose machine or network is gone says nothing, also not that it has left: its connections end after about
    `stall_s` without a sign of it, whether we send or wait. Accepted sockets inherit this from `listener`.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, seconds in ((socket.TCP_KEEPIDLE, stall_s / 2), (socket.TCP_KEEPINTVL, stall_s / 6)):
            listener.setsockopt(socket.IPPROTO_TCP, option, max(1, round(seconds)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(stall_s * 1e3)))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's, not a server's."""
        yield


class _Connection(BoundedHttp):
    """One connection, cut when its client does not go on. uvicorn itself only watches connections between requests."""

    stall_s: float
    guests: Guests
    knock: Guest | None = None  # who it was during its handshake
    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's: a client has connected and owes a request."""
        self._visits = Visits()
        super().connection_made(transport)
        if self.knock is not None:
            self.guests.leave(self.knock)
        if self.guests.come(self):
            self._await_request()
        else:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "as many connections as this server takes are being served")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: over."""
        for timer in (self._arriving, self._unread):
            if timer is not None:
                timer.cancel()
        self.guests.leave(self)
        self._visits.leave()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """asyncio's: the client says nothing more, which ends the connection; `connection_lost` comes a turn of the loop later."""
        self._visits.leave()
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        """asyncio's: some bytes. Empty lines begin no request, and yet end uvicorn's wait for one: then ours begins."""
        super().data_received(data)
        between = self.cycle is None or self.cycle.response_complete
        if between and self._arriving is None and self.timeout_keep_alive_task is None:
            self._await_request()

    def on_message_begin(self) -> None:
        """The parser's: the first byte of a request."""
        super().on_message_begin()
        self._visit = Visit(waited_s(self.transport))
        if self._arriving is None:
            self._await_request()

    def on_headers_complete(self) -> None:
        """The parser's: what follows is the body."""
        self.scope[SCOPE_KEY] = self._visit  # type: ignore[literal-required]
        super().on_headers_complete()
        self._visits.begin(self.cycle, self._visit)

    def on_message_complete(self) -> None:
        """The parser's: the last byte of a request."""
        self._visit.whole = True
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        if not self.cycle.response_complete:
            self.guests.serve(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """uvicorn's: the last byte of an answer is written."""
        self._visits.answered()
        if not self.pipeline:
            self.guests.answered(self)
        super().on_response_complete()

    def shutdown(self) -> None:
        """uvicorn's: the server stops. Over TLS an idle client would hold that up: it does not say that it has heard the end."""
        idle = self.cycle is None or self.cycle.response_complete
        super().shutdown()
        if idle and self.knock is not None and not self.transport.get_write_buffer_size():
            self.loop.call_later(_BYE_S, self.transport.abort)

    def make_room(self) -> None:
        """See Guest."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """asyncio's: the client reads slower than we write."""
        super().pause_writing()
        if self._unread is None:
            self._look_unread()

    def resume_writing(self) -> None:
        """asyncio's: it has caught up."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _await_request(self) -> None:
        self._arriving = self.loop.call_later(self.stall_s, self._overdue)

    def _look_unread(self, most: float = math.inf) -> None:
        """A large answer is written at once, and takes a slow line minutes: who reads on is not cut."""
        left = self.transport.get_write_buffer_size()
        if left > most:
            _cut(self, "it does not read its answer")
        else:
            self._unread = self.loop.call_later(self.stall_s, self._look_unread, left - SLOWEST_BYTES_S * self.stall_s)

    def _overdue(self) -> None:
        if self.flow.read_paused or self.pipeline:  # it is we who do not read: a request before it is being served
            self._await_request()
        else:
            _cut(self, "its request does not arrive")


def _cut(connection: _Connection, why: str) -> None:
    log.info("connection cut", client=str(connection.client), reason=why, stall_s=connection.stall_s)
    connection.transport.abort()  # close() would wait for the client to read what is written already


def _door(limit_s: float, those: Guests) -> type[_Connection]:
    """Connections that are cut after `limit_s`, among `those`; uvicorn makes them by their class alone."""

    class Patient(_Connection):
        stall_s = limit_s
        guests = those

    return Patient
