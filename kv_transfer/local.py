"""The `local` connector: copies within one process, deterministic on a Clock, with faults on demand.

Product code, not a mock: a colocated pair uses it, tests and the simulator run the whole protocol on it. A write may be
delayed, fail after some bytes, vanish without an answer, be acknowledged although bytes are lost or a bit is flipped, or stop
half-way while it is inside the window, as a writer that was stopped by a signal does (the rest lands when it goes on, even if
the window was closed meanwhile: that is why the window does not count as quiesced before).

Does not know threads, processes or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from contracts.clock import Clock
from contracts.errors import TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Region, Write
from kv_transfer.endings import run_to_end, until_done
from kv_transfer.windows import WindowTable, check_source, check_target, merge_ranges

KIND = "local"


class Delivery(StrEnum):
    """What becomes of a write."""

    DELIVER = "deliver"  # all bytes land
    FAIL = "fail"  # `landed_bytes` land, then TransferFailed
    LOSE = "lose"  # `landed_bytes` land, the rest does not, and nobody notices
    CORRUPT = "corrupt"  # all bytes land, then the bit `flipped_bit` of them is the other one, and nobody notices
    DROP = "drop"  # nothing lands and nobody answers, until the caller gives up


@dataclass(frozen=True, slots=True)
class WriteFault:
    """How one write goes wrong. The default is a write without fault.

    `delay_s` passes before the first byte, outside the window. `stall_s` passes after `landed_bytes`, inside the window.
    """

    delivery: Delivery = Delivery.DELIVER
    delay_s: float = 0.0
    stall_s: float = 0.0
    landed_bytes: int = 0
    flipped_bit: int = 0  # counted over the bytes of the write in its order; modulo their number


FaultPlan = Callable[[int], WriteFault]


def no_faults(index: int) -> WriteFault:
    """The plan of a connector that does what it should; `index` counts the writes of one source."""
    del index
    return WriteFault()


class LocalHub:
    """Who can reach whom within this process. Owns nothing."""

    def __init__(self) -> None:
        self._connectors: dict[str, LocalConnector] = {}

    def join(self, connector: LocalConnector) -> str:
        """Make `connector` reachable; its address."""
        address = f"local-{len(self._connectors)}"
        self._connectors[address] = connector
        return address

    def find(self, address: ConnectorAddress) -> LocalConnector:
        """Raises TransferFailed when nobody has that address."""
        found = self._connectors.get(address.address) if address.kind == KIND else None
        if found is None:
            raise TransferFailed(f"nobody at {address.kind}:{address.address}")
        return found


class LocalConnector:
    """See Connector. `faults` is asked once per write that this side makes."""

    def __init__(self, hub: LocalHub, clock: Clock, faults: FaultPlan = no_faults) -> None:
        self._hub = hub
        self._clock = clock
        self._faults = faults
        self._address = ConnectorAddress(KIND, hub.join(self))
        self._buffer: memoryview | None = None
        self._windows = WindowTable()
        self._num_writes = 0
        self._copies: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Best of all where it is possible at all."""
        return Capabilities(KIND, same_process_only=True, same_host_only=True, one_sided=True, preference=100)

    def expose(self, region: Region) -> None:
        """See Connector."""
        self._buffer = region.buffer

    def address(self) -> ConnectorAddress:
        """See Connector."""
        return self._address

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector."""
        return self._windows.open(merge_ranges(ranges, len(self._memory())))

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._windows.close(key)

    def writable(self) -> tuple[ByteRange, ...]:
        """Every range that a write may still touch; what a test holds against the blocks that are free."""
        return self._windows.writable()

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector."""
        self._hub.find(address)._memory()

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector."""
        check_source(writes, len(self._memory()))
        target = self._hub.find(address)
        fault = self._faults(self._num_writes)
        self._num_writes += 1
        stop = asyncio.Event()
        copy = asyncio.ensure_future(self._carry(target, key, writes, (fault, stop)))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        await run_to_end(copy, stop.set)

    async def close(self) -> None:
        """See Connector."""
        self._closed = True
        for copy in tuple(self._copies):
            await until_done(copy)
        self._windows.close_all()
        self._buffer = None

    def _memory(self) -> memoryview:
        if self._buffer is None or self._closed:
            raise TransferFailed(f"{KIND}:{self._address.address} is closed or exposes no memory")
        return self._buffer

    async def _carry(
        self, target: LocalConnector, key: int, writes: Sequence[Write], plan: tuple[WriteFault, asyncio.Event]
    ) -> None:
        fault, stop = plan
        await self._pause(fault.delay_s, stop)
        if fault.delivery is Delivery.DROP:
            await stop.wait()
        if stop.is_set():
            raise TransferFailed("given up before the first byte")
        source, sink = self._memory(), target._memory()
        window = target._windows.get(key)
        if window is None or not window.enter():
            raise TransferFailed("refused: the window is closed")
        try:
            for write in writes:
                check_target(window.ranges, write.target_offset, write.length)
            rest = _copy(source, sink, writes, fault.landed_bytes)
            await self._clock.sleep(fault.stall_s)
            if fault.delivery is Delivery.FAIL:
                raise TransferFailed(f"connection lost after {fault.landed_bytes} bytes")
            if fault.delivery is Delivery.LOSE:
                return
            _copy(source, sink, rest, sum(write.length for write in rest))
            if fault.delivery is Delivery.CORRUPT:
                _flip(sink, writes, fault.flipped_bit)
        finally:
            window.leave()

    async def _pause(self, delay_s: float, stop: asyncio.Event) -> None:
        sleeping = asyncio.ensure_future(self._clock.sleep(delay_s))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((sleeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        sleeping.cancel()
        stopping.cancel()


def _copy(source: memoryview, target: memoryview, writes: Sequence[Write], num_bytes: int) -> list[Write]:
    """Copy the first `num_bytes` of `writes`; what is left of them."""
    rest: list[Write] = []
    for write in writes:
        now = min(write.length, num_bytes)
        num_bytes -= now
        target[write.target_offset : write.target_offset + now] = source[
            write.source_offset : write.source_offset + now
        ]
        if now < write.length:
            rest.append(Write(write.source_offset + now, write.target_offset + now, write.length - now))
    return rest


def _flip(target: memoryview, writes: Sequence[Write], bit: int) -> None:
    """Turn one bit of what `writes` brought."""
    byte, bit = divmod(bit % (8 * sum(write.length for write in writes)), 8)
    rest = iter(writes)
    write = next(rest)
    while byte >= write.length:
        byte -= write.length
        write = next(rest)
    target[write.target_offset + byte] ^= 1 << bit
