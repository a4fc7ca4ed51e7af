"""Windows of the `shm` connector: a table of slots in shared memory, and one kernel lock per slot.

    slot: key, number of ranges, ranges (offset, length)        one byte of the file's lock space per slot

    writer (another process)                     target
    lock slot shared ─ refused: closed           close: key = 0, then try the lock exclusively
    key still there? ─ no: closed                       got it  ─▶ nobody is inside and nobody can get in: quiesced
    copy, looking at the key now and then               refused ─▶ a writer is inside: ask again
    unlock

The locks are open-file-description locks: the kernel drops them when their holder dies, and keeps them when it is stopped.
So a writer that is stopped in mid-copy keeps its slot fenced until it goes on (it then sees that its key is gone) or dies.
Every write opens the table anew, so that its lock is its own. A key names its slot in its low bits; the rest is random.

The table is read-only for writers. Does not know sockets or the memory that the ranges point into.
"""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from contracts.errors import NoRoom, TransferFailed
from kv_transfer.connector import ByteRange
from kv_transfer.region import sealable_memfd

NUM_SLOTS = 1024
SLOT_BITS = 10
MAX_RANGES = 16_383
WORDS_PER_SLOT = 2 + 2 * MAX_RANGES  # 64-bit words; a multiple of the page size, and memory only where a slot was used
TABLE_BYTES = NUM_SLOTS * WORDS_PER_SLOT * 8
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def try_lock(fd: int, kind: int, slot: int) -> bool:
    """Take the lock of `slot` for this open file description (F_RDLCK, F_WRLCK or F_UNLCK) without waiting."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another description holds it
        return False
    return True


def reopen(fd: int, flags: int) -> int:
    """A new open file description of the same file; raises OSError without /proc."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


class SlotTable:
    """The target's side. Owns the table's memory; `close` gives it back."""

    def __init__(self) -> None:
        self._fd = sealable_memfd("diptych-windows")
        os.ftruncate(self._fd, TABLE_BYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, TABLE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self.reader_fd = reopen(self._fd, os.O_RDONLY)  # what writers get
        self._free = list(range(NUM_SLOTS))  # a heap: low slots first, so that little memory is touched
        self._open: dict[int, int] = {}  # key → slot, also while it is closing

    def open(self, ranges: Sequence[ByteRange]) -> int:
        """The key of a new window over merged `ranges`; NoRoom when all slots are taken or the ranges are too many."""
        if len(ranges) > MAX_RANGES:
            raise NoRoom(f"a window of {len(ranges)} ranges; shm has room for {MAX_RANGES}")
        if not self._free:
            raise NoRoom(f"all {NUM_SLOTS} shm windows are in use")
        slot = heapq.heappop(self._free)
        key = (secrets.randbelow((1 << 53) - 1) + 1 << SLOT_BITS) | slot
        at = slot * WORDS_PER_SLOT
        for index, one in enumerate(ranges):
            self._words[at + 2 + 2 * index] = one.offset
            self._words[at + 3 + 2 * index] = one.length
        self._words[at + 1] = len(ranges)
        self._words[at] = key  # last: from here on it is open
        self._open[key] = slot
        return key

    def close_window(self, key: int) -> bool:
        """See Connector.close_window."""
        slot = self._open.get(key)
        if slot is None:
            return True
        self._words[slot * WORDS_PER_SLOT] = 0
        if not try_lock(self._fd, fcntl.F_WRLCK, slot):
            return False
        try_lock(self._fd, fcntl.F_UNLCK, slot)
        del self._open[key]
        heapq.heappush(self._free, slot)
        return True

    def close(self) -> None:
        """Close every window and let go of the memory; writers that still map it see no key in it."""
        for key in tuple(self._open):
            self.close_window(key)
        self._words.release()
        self._map.close()
        os.close(self.reader_fd)
        os.close(self._fd)


class SlotReader:
    """A writer's side, over the descriptor that it was given, which it owns. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, TABLE_BYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")

    def is_open(self, key: int) -> bool:
        """Whether the target still wants writes under `key`."""
        return key > 0 and self._words[_slot_of(key) * WORDS_PER_SLOT] == key

    @contextmanager
    def inside(self, key: int) -> Iterator[tuple[ByteRange, ...]]:
        """Keep the window from being quiesced while in the context; yields its ranges. TransferFailed when it is closed."""
        fd = reopen(self._fd, os.O_RDONLY)
        try:
            if key <= 0 or not try_lock(fd, fcntl.F_RDLCK, _slot_of(key)) or not self.is_open(key):
                raise TransferFailed("refused: the window is closed")
            at = _slot_of(key) * WORDS_PER_SLOT + 2
            words = self._words[at : at + 2 * self._words[at - 1]].tolist()
            yield tuple(ByteRange(*pair) for pair in zip(words[::2], words[1::2], strict=True))
        finally:
            os.close(fd)  # and with it the lock

    def close(self) -> None:
        """Let go of the table; not while a thread is `inside`."""
        self._words.release()
        self._map.close()
        os.close(self._fd)


def _slot_of(key: int) -> int:
    return key & (NUM_SLOTS - 1)
