"""The `shm` connector: the source maps the target's KV memory and copies into it, on one host.

    target                                          source
    expose: Door (descriptors), SlotTable (windows) connect: knock ─▶ map memory and table
    open_window: fill a slot                        write: lock the slot, check key and ranges, copy, look if the target lives
    close_window: clear the key, try the lock

One-sided: the target's CPU takes no part. Copies run in threads and release the GIL (numpy); they look at the key and at
cancellation between pieces. Fencing is described in `slots.py`. Windows fence honest writers, also stopped and dying ones;
a process of the same user that was given the memory could write anywhere, so the door admits this user alone.

Does not know blocks or requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Region, Write
from kv_transfer.endings import run_to_end, until_done
from kv_transfer.handshake import session_key
from kv_transfer.region import sealable_memfd
from kv_transfer.shm_door import Door, Keys, is_alive, knock
from kv_transfer.slots import SlotReader, SlotTable, reopen, try_lock
from kv_transfer.windows import check_source, check_target, merge_ranges

KIND = "shm"
PIECE_BYTES = 4 << 20  # between two looks at the key: well under a millisecond


TryLock = Callable[[int, int, int], bool]


def probe_locks(lock: TryLock = try_lock) -> None:
    """OSError unless two descriptions of one memfd exclude each other."""
    fd = sealable_memfd("diptych-probe")
    try:
        other = reopen(fd, os.O_RDONLY)
        try:
            if not lock(fd, fcntl.F_WRLCK, 0) or lock(other, fcntl.F_RDLCK, 0):
                raise OSError("open-file-description locks do not exclude each other")
        finally:
            os.close(other)
    finally:
        os.close(fd)


def _probe_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.bind("")  # the system picks an abstract name


Probes = Sequence[tuple[str, Callable[[], None]]]
PROBES: Probes = (("memfd and its locks", probe_locks), ("abstract Unix sockets", _probe_socket))


def why_not(probes: Probes = PROBES) -> str | None:
    """What this machine lacks for `shm`, in words; None when it can be used."""
    for name, probe in probes:
        try:
            probe()
        except (OSError, AttributeError) as error:
            return f"{name}: {error}"
    return None


class _Mapped:
    """One target's memory and window table, mapped into this process. Owns both and the connection.

    `users` counts the copies under way; it belongs to the event loop's thread.
    """

    def __init__(self, keys: Keys) -> None:
        self.connection = keys.connection
        self.users = 0
        # Mapped whole at once: a page fault in the middle of a copy makes it twenty times slower.
        memory = mmap.mmap(keys.memory_fd, keys.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(keys.memory_fd)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self._slots = SlotReader(keys.table_fd)

    @property
    def alive(self) -> bool:
        """Whether the target's process still is."""
        return is_alive(self.connection)

    def copy(
        self, source: NDArray[np.uint8], key: int, writes: Sequence[Write], pieces: tuple[int, threading.Event]
    ) -> None:
        """Copy in pieces; runs in a thread. TransferFailed when the window closes, the caller leaves or the target dies."""
        piece_bytes, stop = pieces
        with self._slots.inside(key) as ranges:
            for write in writes:
                check_target(ranges, write.target_offset, write.length)
            for write in writes:
                for at in range(0, write.length, piece_bytes):
                    if stop.is_set():
                        raise TransferFailed("shm: given up by the caller")
                    if not self._slots.is_open(key):
                        raise TransferFailed("shm: the window was closed during the write")
                    n = min(piece_bytes, write.length - at)
                    to, of = write.target_offset + at, write.source_offset + at
                    np.copyto(self._bytes[to : to + n], source[of : of + n])
        if not self.alive:
            raise TransferFailed("shm: the target is gone")

    def close(self) -> None:
        """Not while a copy runs. The mapping goes with its last view, which is this one.

        Given up here and not with this object: the error of a failed copy has it in its traceback, and waits for the collector.
        """
        self.connection.close()
        self._slots.close()
        self._bytes = np.empty(0, dtype=np.uint8)


class ShmConnector:
    """See Connector. `piece_bytes` is how much is copied between two looks at the key.

    With a `secret` both sides prove that they know it before memory is handed out.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES, secret: ClusterSecret | None = None) -> None:
        self._key = session_key(secret, KIND)
        self._piece_bytes = piece_bytes
        self._memory: NDArray[np.uint8] | None = None
        self._table: SlotTable | None = None
        self._door: Door | None = None
        self._targets: dict[str, _Mapped] = {}
        self._knocking: dict[str, asyncio.Task[_Mapped]] = {}
        self._copies: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kv-shm")

    @property
    def capabilities(self) -> Capabilities:
        """The best between processes of one host."""
        return Capabilities(KIND, same_process_only=False, same_host_only=True, one_sided=True, preference=50)

    def expose(self, region: Region) -> None:
        """See Connector. ConfigError when the region cannot be mapped by others."""
        if region.fd is None:
            raise ConfigError("connector: shm needs KV memory in a memfd, which this machine did not give")
        self._memory = np.frombuffer(region.buffer, dtype=np.uint8)
        self._table = SlotTable()
        self._door = Door((region.fd, len(region.buffer)), self._table.reader_fd, self._key)

    def address(self) -> ConnectorAddress:
        """See Connector; the abstract socket's name."""
        if self._door is None:
            raise TransferFailed("shm: closed, or exposes no memory")
        return ConnectorAddress(KIND, self._door.name)

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector; NoRoom when the table is full."""
        if self._table is None:
            raise TransferFailed("shm: closed, or exposes no memory")
        return self._table.open(merge_ranges(ranges, len(self._exposed())))

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._table is None or self._table.close_window(key)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector."""
        await self._reach(address)

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector."""
        source = self._exposed()
        check_source(writes, len(source))
        target = await self._reach(address)
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        copy = loop.run_in_executor(self._threads, target.copy, source, key, writes, (self._piece_bytes, stop))
        target.users += 1
        self._copies.add(copy)
        copy.add_done_callback(lambda ended: self._copied(ended, target))
        await run_to_end(copy, stop.set)

    async def close(self) -> None:
        """See Connector."""
        for knocking in tuple(self._knocking.values()):
            await until_done(knocking)
        for copy in tuple(self._copies):
            await until_done(copy)
        self._threads.shutdown()
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._table is not None:
            self._table.close()
            self._table = None
        for name in tuple(self._targets):
            self._let_go(name)
        self._memory = None

    def _exposed(self) -> NDArray[np.uint8]:
        if self._memory is None:
            raise TransferFailed("shm: closed, or exposes no memory")
        return self._memory

    async def _reach(self, address: ConnectorAddress) -> _Mapped:
        if address.kind != KIND:
            raise TransferFailed(f"shm: cannot reach an address of kind {address.kind}")
        known = self._targets.get(address.address)
        if known is not None:
            return known
        self._exposed()
        knocking = self._knocking.get(address.address)
        if knocking is None:
            knocking = asyncio.ensure_future(self._map(address.address))
            knocking.add_done_callback(_seen)
            self._knocking[address.address] = knocking
        return await asyncio.shield(knocking)

    async def _map(self, name: str) -> _Mapped:
        loop = asyncio.get_running_loop()
        try:
            target = await loop.run_in_executor(self._threads, lambda: _Mapped(knock(name, self._key)))
        finally:
            del self._knocking[name]
        self._targets[name] = target
        # The door says nothing more: readable means that its process has ended. Its memory must not be kept for it.
        loop.add_reader(target.connection, self._let_go, name)
        return target

    def _let_go(self, name: str) -> None:
        target = self._targets.pop(name)
        asyncio.get_running_loop().remove_reader(target.connection)
        if not target.users:
            target.close()

    def _copied(self, copy: asyncio.Future[None], target: _Mapped) -> None:
        self._copies.discard(copy)
        target.users -= 1
        if not target.users and target not in self._targets.values():
            target.close()


def _seen(knocking: asyncio.Future[_Mapped]) -> None:
    """Its failure is an answer to whoever waits for it. That all of them were cancelled meanwhile is no fault to be logged."""
    _ = knocking.cancelled() or knocking.exception()
