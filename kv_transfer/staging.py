"""KV memory that connectors cannot move as it is (on a device, or to travel in a narrow form): through a staging area.

    source   device ──fetch──▶ slots (lent for one write) ──Connector.write──▶ the other side      StagedConnector
    target   the other side ──Connector.write──▶ slots (of one lease) ──place──▶ device, then adopt    StagedPool

The area is one host region of slots, each as long as a block that travels. It is what connectors expose: a grant's block
numbers are slots. A slot goes back only when no copy and no write can still touch it: on the source after `Connector.write`,
which is over when it returns or raises; on the target with its lease, which is given back or adopted once its windows are
quiesced. A request's blocks are the engine's only after the last copy into them.

What the prefix cache has lies in that memory and is not read here: seals of cached blocks are neither kept nor compared.
Does not know devices beyond two copies (`DeviceMemory`), nor states of hand-offs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol

from contracts.errors import ConfigError, InvalidRequest
from contracts.request import GenerationRequest
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Connector, Region, Write
from kv_transfer.digests import Digester
from kv_transfer.endings import run_to_end
from kv_transfer.pool import KVPool, LeaseT

# Slots that one write takes at most: others go on meanwhile, and a first piece leaves early.
_LENT_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Copy:
    """`length` bytes between the device at `device_offset` and the staging area at `host_offset`."""

    device_offset: int
    host_offset: int
    length: int


class DeviceMemory(Protocol):
    """KV memory that the CPU cannot address, or that is packed on its way. Block n lies at n slots' lengths, whatever it takes
    there. Calls return when all bytes have arrived; used from one thread at a time.
    """

    def to_host(self, copies: Sequence[Copy]) -> None:
        """From the device into the staging area."""
        ...

    def to_device(self, copies: Sequence[Copy]) -> None:
        """From the staging area to the device."""
        ...

    def blank(self, block_id: int, num_tokens: int) -> None:
        """Clear the cells of a block from `num_tokens` on, if they would have a say in what others make of the block."""
        ...


class HostDevice:
    """A DeviceMemory that is the host's after all: for tests of the hand-off, and where there is no device."""

    def __init__(self, device: memoryview, staging: memoryview) -> None:
        self._device = device
        self._staging = staging

    def to_host(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        for c in copies:
            there = self._device[c.device_offset : c.device_offset + c.length]
            self._staging[c.host_offset : c.host_offset + c.length] = there

    def to_device(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        for c in copies:
            here = self._staging[c.host_offset : c.host_offset + c.length]
            self._device[c.device_offset : c.device_offset + c.length] = here

    def blank(self, block_id: int, num_tokens: int) -> None:
        """See DeviceMemory: bytes travel as they are."""


class StagingArea:
    """The slots of `region`, `slot_bytes` each, and the thread that copies. Borrows both memories; used from one event loop."""

    def __init__(self, device: DeviceMemory, region: Region, slot_bytes: int) -> None:
        self.region = region
        self.slot_bytes = slot_bytes
        self.num_slots = region.buffer.nbytes // slot_bytes
        if self.num_slots == 0:
            raise ConfigError(f"kv_staging: {region.buffer.nbytes} bytes, a block has {slot_bytes}")
        self._device = device
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-staging")

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` slots, or None when there are fewer. They are the caller's until `give`."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    async def lend(self, most: int) -> tuple[int, ...]:
        """At least one slot and at most `most`; waits while there is none."""
        while not self._free:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    # Ours had come, in the turn in which we were cancelled: it is somebody else's now.
                    self._wake()
                raise
        slots = tuple(self._free.pop() for _ in range(min(most, len(self._free))))
        self._wake()
        return slots

    def give(self, slots: Sequence[int]) -> None:
        """The caller's slots are free: nothing reads or writes them any more."""
        self._free.extend(slots)
        self._wake()

    async def fetch(self, copies: Sequence[Copy]) -> None:
        """Device to slots. When this has returned or raised, also by cancellation, nothing is copied any more."""
        copying = asyncio.get_running_loop().run_in_executor(self._thread, self._device.to_host, copies)
        await run_to_end(copying, lambda: None)

    async def place(self, copies: Sequence[Copy]) -> None:
        """Slots to device; as `fetch`."""
        copying = asyncio.get_running_loop().run_in_executor(self._thread, self._device.to_device, copies)
        await run_to_end(copying, lambda: None)

    async def blank(self, block_id: int, num_tokens: int) -> None:
        """See DeviceMemory; as `fetch`."""
        clearing = asyncio.get_running_loop().run_in_executor(self._thread, self._device.blank, block_id, num_tokens)
        await run_to_end(clearing, lambda: None)

    def close(self) -> None:
        """Wait for the copy under way and end the thread. Idempotent."""
        self._thread.shutdown()

    def _wake(self) -> None:
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class StagedConnector:
    """A Connector whose source is a DeviceMemory: what it writes passes through lent slots. All else is the inner connector's."""

    def __init__(self, inner: Connector, area: StagingArea) -> None:
        self._inner = inner
        self._area = area

    @property
    def capabilities(self) -> Capabilities:
        """See Connector."""
        return self._inner.capabilities

    def expose(self, region: Region) -> None:
        """See Connector; `region` is the staging area's."""
        self._inner.expose(region)

    def address(self) -> ConnectorAddress:
        """See Connector."""
        return self._inner.address()

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector."""
        return self._inner.open_window(ranges)

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._inner.close_window(key)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector."""
        await self._inner.connect(address)

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector; `source_offset` is the device's."""
        area = self._area
        pieces = deque(_pieces(writes, area.slot_bytes))
        while pieces:
            slots = await area.lend(min(len(pieces), _LENT_AT_ONCE))
            try:
                some = [(pieces.popleft(), slot * area.slot_bytes) for slot in slots]
                await area.fetch([Copy(piece.source_offset, at, piece.length) for piece, at in some])
                await self._inner.write(address, key, [Write(at, p.target_offset, p.length) for p, at in some])
            finally:
                area.give(slots)

    async def close(self) -> None:
        """See Connector."""
        await self._inner.close()


class StagedDigester:
    """A Digester of a device's memory: `inner` reads the slots that blocks were fetched into."""

    def __init__(self, inner: Digester, area: StagingArea) -> None:
        self._inner = inner
        self._area = area

    async def digests(self, ranges: Sequence[ByteRange]) -> tuple[bytes, ...]:
        """See Digester; a range is no longer than a slot."""
        area, left = self._area, deque(ranges)
        found: list[bytes] = []
        while left:
            slots = await area.lend(min(len(left), _LENT_AT_ONCE))
            try:
                some = [(left.popleft(), slot * area.slot_bytes) for slot in slots]
                await area.fetch([Copy(r.offset, at, r.length) for r, at in some])
                found.extend(await self._inner.digests([ByteRange(at, r.length) for r, at in some]))
            finally:
                area.give(slots)
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class StagedLease(Generic[LeaseT]):
    """A lease of the inner pool, and slots for those of its blocks that travel; see ReservedLease."""

    inner: LeaseT
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    slots: tuple[int, ...]
    cached_seals: tuple[bytes | None, ...] = ()


class StagedPool(Generic[LeaseT]):
    """A KVPool whose grants name slots; blocks of `block_size` tokens are copied to the device when they are adopted."""

    def __init__(self, inner: KVPool[LeaseT], area: StagingArea, block_size: int) -> None:
        self._inner = inner
        self._area = area
        self._block_size = block_size

    async def reserve(
        self, handoff_id: str, num_tokens: int, block_hashes: tuple[bytes, ...]
    ) -> StagedLease[LeaseT] | None:
        """See KVPool. Of cached blocks the grant has the engine's own numbers, which nobody writes to."""
        lease = await self._inner.reserve(handoff_id, num_tokens, block_hashes)
        if lease is None:
            return None
        cached = lease.num_cached_tokens // self._block_size
        needed = len(lease.block_ids) - cached
        slots = self._area.take(needed)
        if slots is None:
            await self._inner.release(lease)
            if needed > self._area.num_slots:
                room = self._area.num_slots * self._block_size
                raise InvalidRequest(
                    "num_tokens", num_tokens, f"the KV staging area has room for {room} tokens at once"
                )
            return None
        return StagedLease(lease, (*lease.block_ids[:cached], *slots), lease.num_cached_tokens, slots)

    async def adopt(
        self,
        request: GenerationRequest,
        lease: StagedLease[LeaseT],
        num_computed_tokens: int,
        seals: Sequence[bytes] = (),
    ) -> None:
        """See KVPool. `seals` are dropped: those of cached blocks are not known here."""
        del seals
        size = self._area.slot_bytes
        blocks = lease.inner.block_ids[len(lease.inner.block_ids) - len(lease.slots) :]
        copies = [Copy(b * size, s * size, size) for b, s in zip(blocks, lease.slots, strict=True)]
        try:
            await self._area.place(copies)
        except BaseException:
            await self.release(lease)
            raise
        self._area.give(lease.slots)
        await self._inner.adopt(request, lease.inner, num_computed_tokens, ())

    async def release(self, lease: StagedLease[LeaseT], spoiled: Sequence[int] = ()) -> None:
        """See KVPool."""
        self._area.give(lease.slots)
        await self._inner.release(lease.inner, spoiled)


def _pieces(writes: Sequence[Write], most: int) -> list[Write]:
    """The same copies, none longer than `most` bytes."""
    return [
        Write(w.source_offset + at, w.target_offset + at, min(most, w.length - at))
        for w in writes
        for at in range(0, w.length, most)
    ]
