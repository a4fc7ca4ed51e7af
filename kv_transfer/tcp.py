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
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret, ProofKey
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Region, Write
from kv_transfer.endings import run_to_end, until_done
from kv_transfer.handshake import session_key
from kv_transfer.tcp_target import TargetLimits, TcpTarget
from kv_transfer.tcp_wire import (
    ACK_BYTES,
    MAX_RANGES,
    check_ack,
    greet,
    pack_write,
    receive_exactly,
    send_all,
    shut,
    wait_readable,
)
from kv_transfer.windows import WindowTable, check_source, merge_ranges

KIND = "tcp"
_CONNECT_TIMEOUT_S = 5.0
_MAX_THREADS = 32  # writes under way; further ones wait
_PER_TARGET = 4  # so that one target that has stopped cannot take all threads
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on close, throw away what is not sent yet


class _Line:
    """One connection to a target, used by one thread at a time; `cut` may come from another."""

    def __init__(self, host: str, port: int, limits: TargetLimits, key: ProofKey | None) -> None:
        self._stall_s = stall_s = limits.stall_s
        self._old_at = time.monotonic() + limits.session_s / 2  # the target's patience, of which a write needs some
        self._socket = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.settimeout(stall_s)
            greet(self._socket, key, min(stall_s, _CONNECT_TIMEOUT_S))
        except OSError:
            self._socket.close()
            raise

    @property
    def idle(self) -> bool:
        """Whether it can carry a frame: the target says nothing unasked, so something to read means its end. An old one is not
        used any more: its session expires.
        """
        return time.monotonic() < self._old_at and not wait_readable(self._socket, 0)

    def carry(self, memory: memoryview, key: int, writes: Sequence[Write]) -> None:
        """One frame and its acknowledgement; TransferFailed when refused, OSError when the line is broken."""
        ranges = [ByteRange(write.target_offset, write.length) for write in writes]
        parts = [memory[write.source_offset : write.source_offset + write.length] for write in writes if write.length]
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


class _Job:
    """One write in a thread, which the event loop may stop at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: _Line | None = None
        self._stopped = False

    def begin(self, line: _Line) -> bool:
        """From now on `stop` cuts this line; False when it was stopped already."""
        with self._lock:
            self._line = line
            return not self._stopped

    def end(self) -> None:
        """The line is not this job's any more."""
        with self._lock:
            self._line = None

    def stop(self) -> None:
        """Called by the event loop."""
        with self._lock:
            self._stopped = True
            if self._line is not None:
                self._line.cut()


class _Target:
    """The lines to one address; methods run in threads unless said otherwise. `turns` and `users` belong to the event loop."""

    def __init__(self, address: ConnectorAddress, limits: TargetLimits, key: ProofKey | None) -> None:
        self._key = key
        self._host, self._port = split_address(address)
        self._name = f"{KIND}:{address.address}"
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self.turns = asyncio.Semaphore(_PER_TARGET)
        self.users = 0

    def connect(self) -> None:
        """Make sure of a line; TransferFailed when there can be none."""
        self._keep(self._take())

    def write(self, memory: memoryview, key: int, writes: Sequence[Write], job: _Job) -> None:
        """See Connector.write."""
        line = self._take()
        if not job.begin(line):
            self._keep(line)
            raise TransferFailed(f"{self._name}: given up by the caller")
        try:
            line.carry(memory, key, writes)
        except TransferFailed:
            job.end()
            self._keep(line)
            raise
        except OSError as error:
            job.end()
            line.close(reset=True)
            raise TransferFailed(f"{self._name}: {error}") from error
        job.end()
        self._keep(line)

    def close_ended(self) -> bool:
        """Close the lines whose other end has gone; whether no idle one is left. Does not block: for the event loop."""
        with self._lock:
            ended = [line for line in self._idle if not line.idle]
            self._idle = [line for line in self._idle if line not in ended]
            for line in ended:
                line.close()
            return not self._idle

    def close(self) -> None:
        """Not while a thread uses a line."""
        for line in self._idle:
            line.close()
        self._idle.clear()

    def _take(self) -> _Line:
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None:
                break
            if line.idle:
                return line
            line.close()
        try:
            return _Line(self._host, self._port, self._limits, self._key)
        except OSError as error:
            raise TransferFailed(f"{self._name}: {error}") from error

    def _keep(self, line: _Line) -> None:
        with self._lock:
            self._idle.append(line)


class TcpConnector:
    """See Connector. Listens at `host` (`port` 0: any free one).

    Others reach it at `advertised`, a host and a port; a part that is None is the one it listens at. With a `secret` both
    sides of each connection prove that they know it before a byte is written.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: tuple[str | None, int | None] = (None, None),
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
        self._reached: dict[ConnectorAddress, _Target] = {}
        self._working: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=_MAX_THREADS, thread_name_prefix="kv-tcp-write")

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
        host, port = self._advertised[0] or self._where[0], self._advertised[1] or self._target.port
        return ConnectorAddress(KIND, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector."""
        return self._windows.open(merge_ranges(ranges, len(self._exposed())))

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._windows.close(key)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector."""
        async with self._turn(address) as target:
            await self._in_thread(target.connect, _Job())

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector. Cancelling cuts the connection, so that a target that has stopped does not hold the caller."""
        memory = self._exposed()
        check_source(writes, len(memory))
        async with self._turn(address) as target:
            for first in range(0, max(1, len(writes)), MAX_RANGES):
                job = _Job()
                frame = writes[first : first + MAX_RANGES]
                await self._in_thread(partial(target.write, memory, key, frame, job), job)

    async def close(self) -> None:
        """See Connector."""
        for work in tuple(self._working):
            await until_done(work)
        self._threads.shutdown()
        self._windows.close_all()
        if self._target is not None:
            await asyncio.to_thread(self._target.close)
            self._target = None
        for target in self._reached.values():
            target.close()
        self._reached.clear()
        self._memory = None

    def _exposed(self) -> memoryview:
        if self._memory is None:
            raise TransferFailed("tcp: closed, or exposes no memory")
        return self._memory

    @asynccontextmanager
    async def _turn(self, address: ConnectorAddress) -> AsyncIterator[_Target]:
        self._exposed()
        if address not in self._reached:
            self._forget_ended()
            self._reached[address] = _Target(address, self._limits, self._key)
        target = self._reached[address]
        target.users += 1
        try:
            async with target.turns:
                yield target
        finally:
            target.users -= 1

    def _forget_ended(self) -> None:
        """Let go of targets that have ended: each life of a peer has an address of its own, which nobody asks for again."""
        for address, target in list(self._reached.items()):
            if target.close_ended() and not target.users:
                del self._reached[address]

    async def _in_thread(self, work: Callable[[], None], job: _Job) -> None:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._working.add(running)
        running.add_done_callback(self._working.discard)
        await run_to_end(running, job.stop)


def split_address(address: ConnectorAddress) -> tuple[str, int]:
    """Host and port; TransferFailed when it is not an address of this kind."""
    host, _, port = address.address.rpartition(":")
    if address.kind != KIND or not host or not port.isdigit() or int(port) > 65_535:
        raise TransferFailed(f"tcp: {address.kind}:{address.address} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
