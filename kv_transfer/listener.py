"""The target half of connectors that are written to over connections: accepts sources, and gives each a thread of its own.

    accept ─▶ stranger ── introduces itself, proves itself where asked ─▶ frames until it goes or its session expires

A slow, dead or hostile source costs its own thread and nothing else; strangers are few and soon gone. What a frame is, and
what is done about it, is its owner's (`serve`). Does not know windows or memory.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from contracts.secret import ProofKey
from kv_transfer.tcp_wire import meet, shut, wait_readable
from observability.seldom import Seldom

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What a source may cost. `stall_s` is the longest silence within a frame, and the time for a header. A session is good for
    `session_s`: a frame that begins later is not read. Sources take a new connection, with new proofs, after half of it.

    Who has not introduced itself, and proven itself where that is asked for, has `hello_s` for it; of such there are at most
    `max_strangers`, the oldest of whom makes room for the next.
    """

    max_connections: int = 256
    max_strangers: int = 32
    stall_s: float = 10.0
    hello_s: float = 2.0
    session_s: float = 3600.0


Serve = Callable[[socket.socket, float], None]


class Listener:
    """Listens from construction to `close`, for a connector of this `kind`.

    `serve` is called in a connection's own thread, with the socket, which does not block, and the time at which its session
    expires; it returns when the other side ends between two frames, and raises OSError where something is wrong.
    """

    def __init__(
        self,
        kind: str,
        where: tuple[str, int] | socket.socket,
        terms: tuple[TargetLimits, ProofKey | None],
        serve: Serve,
    ) -> None:
        """Listens at an address, or through a socket of `listening`, whose it becomes.

        `terms`: what sources may cost, and what they prove themselves with, if they must.
        """
        self._kind = kind
        self._limits, self._key = terms
        self._frames = serve
        self._socket = where if isinstance(where, socket.socket) else listening(where)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        # Those of them that have not introduced themselves, the oldest first.
        self._strangers: dict[socket.socket, None] = {}
        self._closing = threading.Event()
        self._seldom = Seldom()
        self._thread = threading.Thread(target=self._accept, name=f"kv-{self._kind}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection and wait for their threads; no byte lands after this. Blocks briefly."""
        with self._lock:
            self._closing.set()
            threads = [self._thread, *self._connections.values()]
            for connection in self._connections:
                shut(connection)
        shut(self._socket)
        for thread in threads:
            thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if not self._closing.wait(0.1):  # out of descriptors, perhaps: others may be given back
                    logger.warning("%s: cannot accept: %s", self._kind, error)
                continue
            with self._lock:
                if self._closing.is_set() or len(self._connections) >= self._limits.max_connections:
                    self._warn("%s turned away: %d connections", peer, len(self._connections))
                    connection.close()
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Give it a thread. Called with the lock held."""
        if len(self._strangers) >= self._limits.max_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            shut(oldest)  # its thread does the rest
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"kv-{self._kind}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: others may end
            self._warn("a connection was turned away: %s", error)
            connection.close()
            return
        self._connections[connection] = thread
        self._strangers[connection] = None

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)  # every wait is a poll outside the window
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            meet(connection, self._key, min(self._limits.hello_s, self._limits.stall_s))
            with self._lock:
                self._strangers.pop(connection, None)
            expires_at = time.monotonic() + self._limits.session_s
            self._frames(connection, expires_at)
        except OSError as error:
            if not self._closing.is_set():
                self._warn("a connection was ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                del self._connections[connection]
                connection.close()

    def _warn(self, said: str, *about: object) -> None:
        more = self._seldom.due()
        if more is not None:
            logger.warning("%s: " + said + " (%d more before)", self._kind, *about, more)


def frame_begins(connection: socket.socket, expires_at: float) -> bool:
    """Wait for the next frame; whether one comes before the session expires. Nothing to peek at is an orderly end between two."""
    left_s = expires_at - time.monotonic()
    if left_s <= 0 or not wait_readable(connection, left_s):
        return False
    return time.monotonic() < expires_at and bool(connection.recv(1, socket.MSG_PEEK))


def listening(where: tuple[str, int]) -> socket.socket:
    """A socket that listens there (port 0: any free one); OSError where it cannot."""
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    return socket.create_server(where, family=family, backlog=128)
