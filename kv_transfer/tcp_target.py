"""The target side of the `tcp` connector: accepts sources and receives straight into the KV memory.

One thread accepts, one thread serves each connection with blocking waits; so a slow, dead or hostile source costs its own
thread and nothing else. Before each receive the thread waits for bytes outside the window; inside the window it only takes
what is there, without waiting, so closing a window never waits for a peer. Bytes that come after the close land in a scratch
buffer. Does not know the source side or what the bytes mean.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass

from contracts.errors import TransferFailed
from contracts.secret import ProofKey
from kv_transfer.tcp_wire import (
    HEADER_BYTES,
    RANGE_BYTES,
    BadFrame,
    Header,
    Status,
    meet,
    pack_ack,
    receive_exactly,
    shut,
    unpack_header,
    unpack_ranges,
    wait_readable,
)
from kv_transfer.windows import Window, WindowTable, check_target
from observability.seldom import Seldom

logger = logging.getLogger(__name__)

_SCRATCH_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20  # received at a time inside a window


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


class TcpTarget:
    """Listens from construction to `close`. Writes into `memory`, which it does not own, where `windows` allow it."""

    def __init__(
        self,
        memory: memoryview,
        windows: WindowTable,
        where: tuple[str, int],
        terms: tuple[TargetLimits, ProofKey | None],
    ) -> None:
        """`terms`: what sources may cost, and what they prove themselves with, if they must."""
        self._memory = memory
        self._windows = windows
        self._limits, self._key = terms
        host, port = where
        self._listener = socket.create_server((host, port), family=_family(host), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[
            socket.socket, None
        ] = {}  # those of them that have not introduced themselves, oldest first
        self._closing = threading.Event()
        self._seldom = Seldom()
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection and wait for their threads; no byte lands after this. Blocks briefly."""
        with self._lock:
            self._closing.set()
            threads = [self._thread, *self._connections.values()]
            for connection in self._connections:
                shut(connection)
        shut(self._listener)
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(0.1):  # out of descriptors, perhaps: others may be given back
                    logger.warning("tcp: cannot accept: %s", error)
                continue
            with self._lock:
                if self._closing.is_set() or len(self._connections) >= self._limits.max_connections:
                    self._warn("tcp: %s turned away: %d connections", peer, len(self._connections))
                    connection.close()
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Give it a thread. Called with the lock held."""
        if len(self._strangers) >= self._limits.max_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            shut(oldest)  # its thread does the rest
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-tcp", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: others may end
            self._warn("tcp: a connection was turned away: %s", error)
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
            while _frame_begins(connection, expires_at):
                header = unpack_header(
                    receive_exactly(connection, HEADER_BYTES, self._limits.stall_s), len(self._memory)
                )
                connection.sendall(pack_ack(self._receive(connection, header), header.key))
        except OSError as error:
            if not self._closing.is_set():
                self._warn("tcp: a connection was ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                del self._connections[connection]
                connection.close()

    def _warn(self, said: str, *about: object) -> None:
        more = self._seldom.due()
        if more is not None:
            logger.warning(said + " (%d more before)", *about, more)

    def _receive(self, connection: socket.socket, header: Header) -> Status:
        raw = receive_exactly(connection, RANGE_BYTES * header.num_ranges, self._limits.stall_s)
        ranges = unpack_ranges(raw, header)
        window = self._windows.get(header.key)
        if window is None:
            self._discard(connection, header.num_bytes)
            return Status.CLOSED
        try:
            for one in ranges:
                check_target(window.ranges, one.offset, one.length)
        except TransferFailed:
            self._discard(connection, header.num_bytes)
            return Status.OUTSIDE
        landed = 0
        for one in ranges:
            got = self._land(connection, window, self._memory[one.offset : one.offset + one.length])
            landed += got
            if got < one.length:
                self._discard(connection, header.num_bytes - landed)
                return Status.CLOSED
        return Status.LANDED if self._still(window, header) else Status.CLOSED

    def _still(self, window: Window, header: Header) -> bool:
        """Whether a write may be acknowledged; a frame without bytes has not looked at its window yet."""
        if header.num_bytes:
            return True
        if not window.enter():
            return False
        window.leave()
        return True

    def _land(self, connection: socket.socket, window: Window, into: memoryview) -> int:
        """Receive into the memory until it is full or the window closes; the number of bytes that landed."""
        got = 0
        while got < len(into):
            self._await_bytes(connection)
            if not window.enter():
                break
            try:
                n = connection.recv_into(into[got : got + _PIECE_BYTES], 0, socket.MSG_DONTWAIT)
            finally:
                window.leave()
            if n == 0:
                raise BadFrame("the connection ended within a write")
            got += n
        return got

    def _discard(self, connection: socket.socket, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(_SCRATCH_BYTES, num_bytes)))
        while num_bytes:
            self._await_bytes(connection)
            n = connection.recv_into(scratch[: min(len(scratch), num_bytes)])
            if n == 0:
                raise BadFrame("the connection ended within a refused write")
            num_bytes -= n

    def _await_bytes(self, connection: socket.socket) -> None:
        if not wait_readable(connection, self._limits.stall_s):
            raise BadFrame(f"no byte for {self._limits.stall_s:g} s within a write")


def _frame_begins(connection: socket.socket, expires_at: float) -> bool:
    """Wait for the next frame; whether one comes before the session expires. Nothing to peek at is an orderly end between two."""
    left_s = expires_at - time.monotonic()
    if left_s <= 0 or not wait_readable(connection, left_s):
        return False
    return time.monotonic() < expires_at and bool(connection.recv(1, socket.MSG_PEEK))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
