"""The target side of the `tcp` connector: receives straight into the KV memory.

Each connection has a thread of its own (`listener.py`). Before each receive it waits for bytes outside the window; inside
the window it only takes what is there, without waiting, so closing a window never waits for a peer. Bytes that come after the
close land in a scratch buffer. Does not know the source side or what the bytes mean.
"""

from __future__ import annotations

import socket

from contracts.errors import TransferFailed
from contracts.secret import ProofKey
from kv_transfer.listener import Listener, TargetLimits, frame_begins
from kv_transfer.tcp_wire import (
    HEADER_BYTES,
    RANGE_BYTES,
    BadFrame,
    Header,
    Status,
    pack_ack,
    receive_exactly,
    unpack_header,
    unpack_ranges,
    wait_readable,
)
from kv_transfer.windows import Window, WindowTable, check_target, still_open

_SCRATCH_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20  # received at a time inside a window


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
        self._stall_s = terms[0].stall_s
        self._listener = Listener("tcp", where, terms, self._serve)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.port

    def close(self) -> None:
        """End every connection and wait for their threads; no byte lands after this. Blocks briefly."""
        self._listener.close()

    def _serve(self, connection: socket.socket, expires_at: float) -> None:
        while frame_begins(connection, expires_at):
            header = unpack_header(receive_exactly(connection, HEADER_BYTES, self._stall_s), len(self._memory))
            connection.sendall(pack_ack(self._receive(connection, header), header.key))

    def _receive(self, connection: socket.socket, header: Header) -> Status:
        raw = receive_exactly(connection, RANGE_BYTES * header.num_ranges, self._stall_s)
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
        return Status.LANDED if header.num_bytes or still_open(window) else Status.CLOSED

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
        if not wait_readable(connection, self._stall_s):
            raise BadFrame(f"no byte for {self._stall_s:g} s within a write")
