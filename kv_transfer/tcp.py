"""The `tcp` connector: KV bytes over plain sockets, to any host, without a copy in Python on either side.

    source: sendmsg gathers from the KV memory        target: recv_into scatters into the KV memory (`tcp_target.py`)

A write is one frame and its acknowledgement (`tcp_wire.py`), in a thread, on a connection of its own that is kept for the
next. Not encrypted, and not protected against who alters the wire (docs/security.md). Socket buffers are left to the kernel's
auto-tuning, which goes further than SO_SNDBUF may without privileges. Does not know blocks or requests.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Sequence

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret, ProofKey
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Region, Write
from kv_transfer.handshake import session_key
from kv_transfer.lines import Lines, OpenLine, split_address
from kv_transfer.listener import TargetLimits
from kv_transfer.sessions import Advertised, open_session, reached_at
from kv_transfer.tcp_target import TcpTarget
from kv_transfer.tcp_wire import (
    ACK_BYTES,
    MAX_RANGES,
    check_ack,
    pack_write,
    receive_exactly,
    send_all,
    shut,
    wait_readable,
)
from kv_transfer.windows import WindowTable, check_source, merge_ranges

KIND = "tcp"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on close, throw away what is not sent yet


class _Line:
    """One connection to a target, used by one thread at a time; `cut` may come from another."""

    def __init__(self, where: tuple[str, int], memory: memoryview, limits: TargetLimits, key: ProofKey | None) -> None:
        self._memory = memory
        self._stall_s = stall_s = limits.stall_s
        self._old_at = time.monotonic() + limits.session_s / 2  # the target's patience, of which a write needs some
        self._socket = open_session(where, key, stall_s)

    @property
    def idle(self) -> bool:
        """Whether it can carry a frame: the target says nothing unasked, so something to read means its end. An old one is not
        used any more: its session expires.
        """
        return time.monotonic() < self._old_at and not wait_readable(self._socket, 0)

    def carry(self, key: int, writes: Sequence[Write]) -> None:
        """One frame and its acknowledgement; TransferFailed when refused, OSError when the line is broken."""
        ranges = [ByteRange(write.target_offset, write.length) for write in writes]
        parts = [
            self._memory[write.source_offset : write.source_offset + write.length] for write in writes if write.length
        ]
        send_all(self._socket, [memoryview(pack_write(key, ranges)), *parts])
        check_ack(receive_exactly(self._socket, ACK_BYTES, self._stall_s), key)

    def cut(self) -> None:
        """End whatever it is doing, from any thread."""
        shut(self._socket)

    def close(self, *, reset: bool = False) -> None:
        """Give the socket back; with `reset`, bytes not sent yet are thrown away."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()


class TcpConnector:
    """See Connector. Listens at `host` (`port` 0: any free one).

    Others reach it at `advertised`, a host and a port; a part that is None is the one it listens at. With a `secret` both
    sides of each connection prove that they know it before a byte is written.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: Advertised = (None, None),
        limits: TargetLimits | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        self._key = session_key(secret, KIND)
        self._where = (host, port)
        self._advertised = advertised
        self._limits = limits or TargetLimits()
        self._memory: memoryview | None = None
        self._windows = WindowTable()
        self._target: TcpTarget | None = None
        self._lines = Lines(KIND, self._route, MAX_RANGES)

    @property
    def capabilities(self) -> Capabilities:
        """Works everywhere, so it comes last."""
        return Capabilities(KIND, same_process_only=False, same_host_only=False, one_sided=False, preference=10)

    def expose(self, region: Region) -> None:
        """See Connector. ConfigError when it cannot listen where it was told to."""
        try:
            self._target = TcpTarget(region.buffer, self._windows, self._where, (self._limits, self._key))
        except OSError as error:
            host, port = self._where
            raise ConfigError(f"connector: tcp cannot listen on {host}:{port}: {error}") from error
        self._memory = region.buffer

    def address(self) -> ConnectorAddress:
        """See Connector; host:port, an IPv6 host in brackets."""
        if self._target is None:
            raise TransferFailed("tcp: closed, or exposes no memory")
        return reached_at(KIND, (self._where[0], self._target.port), self._advertised)

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector."""
        return self._windows.open(merge_ranges(ranges, len(self._exposed())))

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._windows.close(key)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector."""
        self._exposed()
        await self._lines.connect(address)

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector. Cancelling cuts the connection, so that a target that has stopped does not hold the caller."""
        check_source(writes, len(self._exposed()))
        await self._lines.write(address, key, writes)

    async def close(self) -> None:
        """See Connector."""
        await self._lines.finish()
        self._windows.close_all()
        if self._target is not None:
            await asyncio.to_thread(self._target.close)
            self._target = None
        self._memory = None

    def _exposed(self) -> memoryview:
        if self._memory is None:
            raise TransferFailed("tcp: closed, or exposes no memory")
        return self._memory

    def _route(self, address: ConnectorAddress) -> OpenLine:
        where = split_address(address, KIND)
        return lambda: _Line(where, self._exposed(), self._limits, self._key)
