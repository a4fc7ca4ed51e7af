"""Digests of blocks: what prefill read and what decode finds must be the same bytes.

    Integrity   off       no block is read, no ticket carries digests
                sampled   about one block in SAMPLED_ONE_IN, chosen by hand-off id and position, and always the last one sent
                full      every block sent

Both sides choose the same blocks from the same facts. The choice differs from hand-off to hand-off, so that no position stays
unseen, and a hand-off that is tried again is looked at elsewhere. The last block is always chosen: it is the one written last.
A block is digested whole, because it travels whole. A digest is XXH3-128: memory speed; it finds accidents, not forgers
(docs/security.md says what keeps those out).

Does not know tickets, windows or states.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import xxhash

from contracts.errors import ConfigError
from kv_transfer.config import Integrity
from kv_transfer.connector import ByteRange, Region
from kv_transfer.endings import run_to_end

SAMPLED_ONE_IN = 8


class Digester(Protocol):
    """Reads this worker's KV memory."""

    async def digests(self, ranges: Sequence[ByteRange]) -> tuple[bytes, ...]:
        """One digest per range, of 16 bytes. When this has returned or raised, also by cancellation, nothing reads any more."""
        ...


class InlineDigester:
    """Reads in the event loop: deterministic on any clock, for small blocks within one process (see `local`)."""

    def __init__(self, region: Region) -> None:
        self._region = region

    async def digests(self, ranges: Sequence[ByteRange]) -> tuple[bytes, ...]:
        """See Digester."""
        return tuple(_digest(self._region.buffer, r) for r in ranges)


class ThreadDigester:
    """Reads in a thread of its own, so that the event loop waits for no memory. `close` before the region goes.

    xxhash keeps the interpreter while it reads, so after each `at_once_bytes` (well under a millisecond) the thread steps back
    for others, which costs some tens of microseconds.
    """

    def __init__(self, region: Region, at_once_bytes: int = 16 << 20) -> None:
        self._region = region
        self._at_once_bytes = at_once_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    async def digests(self, ranges: Sequence[ByteRange]) -> tuple[bytes, ...]:
        """See Digester."""
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read, tuple(ranges))
        return await run_to_end(reading, lambda: None)

    def close(self) -> None:
        """Wait for the reads under way and end the thread. Idempotent."""
        self._thread.shutdown()

    def _read(self, ranges: tuple[ByteRange, ...]) -> tuple[bytes, ...]:
        found: list[bytes] = []
        num_bytes = 0
        for r in ranges:
            found.append(_digest(self._region.buffer, r))
            num_bytes += r.length
            if num_bytes >= self._at_once_bytes:
                time.sleep(0)
                num_bytes = 0
        return tuple(found)


def digester_for(integrity: Integrity, digester: Digester | None) -> Digester | None:
    """Who digests under this setting; None when nobody needs to. ConfigError when blocks shall be digested and nobody can."""
    if integrity is Integrity.OFF:
        return None
    if digester is None:
        raise ConfigError(f"integrity: got {integrity.value}, but this worker has no digester")
    return digester


def chosen_blocks(integrity: Integrity, handoff_id: str, first: int, num_blocks: int) -> tuple[int, ...]:
    """Which of the blocks `first` to `num_blocks` - 1, those that are sent, are digested. A pure function of its arguments."""
    if integrity is Integrity.OFF:
        return ()
    if integrity is Integrity.FULL:
        return tuple(range(first, num_blocks))
    start, last = zlib.crc32(handoff_id.encode()), num_blocks - 1
    return tuple(i for i in range(first, num_blocks) if i == last or (start + i) % SAMPLED_ONE_IN == 0)


def _digest(buffer: memoryview, r: ByteRange) -> bytes:
    return xxhash.xxh3_128_digest(buffer[r.offset : r.offset + r.length])
