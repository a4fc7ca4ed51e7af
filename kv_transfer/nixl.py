"""The `nixl` connector: NIXL over UCX, for networks with RDMA and for device memory; over sockets `tcp` is faster.

    source: Lines ── asks, over a control connection ──▶ target: reads the source's memory in the window (`nixl_target.py`)
            makes progress while it waits                        answers when all is there

It reads, where others write: a write of NIXL's lands whenever its writer's machine gets to it, and no target can take its leave
back. What the target reads itself, it knows the end of. Which memory is meant is data (`Place`): the host's, or a GPU's.

The control connection is greeted as `tcp`'s is, with a proof where there is a secret. UCX's own sockets and queues prove
nothing (docs/security.md). Does not know blocks or requests.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret, ProofKey
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Region, Write
from kv_transfer.handshake import session_key
from kv_transfer.lines import Lines, OpenLine, join_address, split_address
from kv_transfer.listener import TargetLimits
from kv_transfer.nixl_agent import Agent, Pause, Place, has_rdma
from kv_transfer.nixl_target import NixlTarget
from kv_transfer.nixl_wire import MAX_WRITES, Introduction, pack_ask, pack_introduction
from kv_transfer.tcp_wire import ACK_BYTES, BadFrame, check_ack, greet, receive_exactly, wait_readable
from kv_transfer.windows import WindowTable, check_source, merge_ranges

KIND = "nixl"
_CONNECT_TIMEOUT_S = 5.0
_CUT_PATIENCE_S = 2.0  # how long a write that was given up waits for the target to have stopped
_LONGEST_PAUSE_S = 200e-6
_WITH_RDMA, _WITHOUT = 30, 5  # below `shm` always; above `tcp` where there is RDMA


def host_memory(region: Region) -> Place:
    """Where a region in this process's own memory lies."""
    memory = np.frombuffer(region.buffer, dtype=np.uint8)
    return Place(memory.ctypes.data, memory.nbytes)


class _Line:
    """One control connection to a target, used by one thread at a time; `cut` may come from another."""

    def __init__(self, where: tuple[str, int], agent: Agent, limits: TargetLimits, key: ProofKey | None) -> None:
        self._agent = agent
        self._stall_s = limits.stall_s
        self._old_at = time.monotonic() + limits.session_s / 2
        self._cut = threading.Event()
        self._socket = socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.settimeout(limits.stall_s)
            greet(self._socket, key, min(limits.stall_s, _CONNECT_TIMEOUT_S))
            self._socket.sendall(pack_introduction(Introduction(agent.name, agent.metadata, agent.place)))
            self._answer(0)
        except BaseException:
            self.close(reset=True)
            raise

    @property
    def idle(self) -> bool:
        """See Line; a line that was cut, or is old, is not used any more."""
        return time.monotonic() < self._old_at and not self._cut.is_set() and not wait_readable(self._socket, 0)

    def carry(self, key: int, writes: Sequence[Write]) -> None:
        """See Line."""
        self._socket.sendall(pack_ask(key, writes))
        self._answer(key)

    def cut(self) -> None:
        """See Line: says that nobody wants the rest. The answer is still waited for, for a while."""
        self._cut.set()
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side was faster
            return

    def close(self, *, reset: bool = False) -> None:
        """See Line. After a failure the target may still be reading: it gets to the end of it if we go on making progress."""
        self._socket.close()
        if reset:
            self._agent.linger(self._stall_s)

    def _answer(self, key: int) -> None:
        """Wait for it, making progress meanwhile."""
        pause, began = Pause(_LONGEST_PAUSE_S), time.monotonic()
        cut_at: float | None = None
        while not wait_readable(self._socket, 0):
            self._agent.progress()
            now = time.monotonic()
            if cut_at is None and self._cut.is_set():
                cut_at = now
            if now - began > self._stall_s or (cut_at is not None and now - cut_at > _CUT_PATIENCE_S):
                raise BadFrame("no answer in time")
            pause.wait()
        check_ack(receive_exactly(self._socket, ACK_BYTES, self._stall_s), key)


class NixlConnector:
    """See Connector. Listens for control connections at `host` (`port` 0: any free one); UCX picks ports of its own.

    Others reach it at `advertised`, as with `tcp`. `place_of` says where a region lies, by default in the host's memory.
    """

    def __init__(
        self,
        where: tuple[str, int] = ("127.0.0.1", 0),
        advertised: tuple[str | None, int | None] = (None, None),
        limits: TargetLimits | None = None,
        secret: ClusterSecret | None = None,
        place_of: Callable[[Region], Place] = host_memory,
    ) -> None:
        self._key = session_key(secret, KIND)
        self._where = where
        self._advertised = advertised
        self._limits = limits or TargetLimits()
        self._place_of = place_of
        self._preference = _WITH_RDMA if has_rdma() else _WITHOUT
        self._agent: Agent | None = None
        self._windows = WindowTable()
        self._target: NixlTarget | None = None
        self._lines = Lines(KIND, self._route, MAX_WRITES)

    @property
    def capabilities(self) -> Capabilities:
        """Any host, and any memory; only RDMA makes it better than `tcp`."""
        return Capabilities(
            KIND, same_process_only=False, same_host_only=False, one_sided=False, preference=self._preference
        )

    def expose(self, region: Region) -> None:
        """See Connector. ConfigError when NIXL does not take the memory, or it cannot listen where it was told to."""
        try:
            self._agent = Agent(self._place_of(region))
        except TransferFailed as error:
            raise ConfigError(f"connector: {error.message}") from error
        try:
            self._target = NixlTarget(self._agent, self._windows, self._where, (self._limits, self._key))
        except OSError as error:
            self._agent.close()
            self._agent = None
            host, port = self._where
            raise ConfigError(f"connector: nixl cannot listen on {host}:{port}: {error}") from error

    def address(self) -> ConnectorAddress:
        """See Connector; that of the control connection."""
        if self._target is None:
            raise TransferFailed("nixl: closed, or exposes no memory")
        host, port = self._advertised[0] or self._where[0], self._advertised[1] or self._target.port
        return join_address(KIND, host, port)

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector."""
        return self._windows.open(merge_ranges(ranges, self._exposed().place.num_bytes))

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._windows.close(key)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector. Also that the target can read a few bytes from here has been seen then."""
        self._exposed()
        await self._lines.connect(address)

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector. A target that does not answer may still read from us what we reuse: nobody believes that any more."""
        check_source(writes, self._exposed().place.num_bytes)
        await self._lines.write(address, key, writes)

    async def close(self) -> None:
        """See Connector."""
        await self._lines.finish()
        self._windows.close_all()
        target, agent = self._target, self._agent
        self._target = self._agent = None
        if target is not None and agent is not None:
            await asyncio.to_thread(target.close)
            await asyncio.to_thread(agent.close)
        self._windows = WindowTable()  # what was still being read has ended with the agent

    def _exposed(self) -> Agent:
        if self._agent is None:
            raise TransferFailed("nixl: closed, or exposes no memory")
        return self._agent

    def _route(self, address: ConnectorAddress) -> OpenLine:
        where = split_address(address, KIND)
        return lambda: _Line(where, self._exposed(), self._limits, self._key)
