"""Windows: which bytes may be written under which key, and whether somebody is writing now.

    open ──close, nobody inside──▶ gone (quiesced)
     └──close, a writer inside──▶ closing ──last writer leaves, close again──▶ gone (quiesced)

Used by connectors whose target side carries out each write itself (`local`, `tcp`); `shm` keeps the same facts in shared
memory and kernel locks. Thread-safe. Does not know how bytes travel.
"""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections.abc import Sequence

from contracts.errors import TransferFailed
from kv_transfer.connector import ByteRange, Write


def merge_ranges(ranges: Sequence[ByteRange], num_bytes: int) -> tuple[ByteRange, ...]:
    """Sorted, adjacent and overlapping ones joined, empty ones dropped; ValueError when one is outside the region."""
    merged: list[ByteRange] = []
    for one in sorted(ranges, key=lambda r: r.offset):
        if one.offset < 0 or one.length < 0 or one.offset + one.length > num_bytes:
            raise ValueError(f"range {one.offset}+{one.length} is outside the region of {num_bytes} bytes")
        if one.length == 0:
            continue
        last = merged[-1] if merged else None
        if last is not None and one.offset <= last.offset + last.length:
            end = max(last.offset + last.length, one.offset + one.length)
            merged[-1] = ByteRange(last.offset, end - last.offset)
        else:
            merged.append(one)
    return tuple(merged)


def check_source(writes: Sequence[Write], num_bytes: int) -> None:
    """ValueError when a write reads outside the source's own region: a fault of the caller, not of the peer."""
    for write in writes:
        if write.source_offset < 0 or write.length < 0 or write.source_offset + write.length > num_bytes:
            raise ValueError(
                f"write of {write.length} bytes from {write.source_offset} is outside the region of {num_bytes} bytes"
            )


def check_target(ranges: Sequence[ByteRange], offset: int, length: int) -> None:
    """TransferFailed unless the bytes lie in one of `ranges`, which are sorted and merged."""
    if length == 0:
        return
    at = bisect_right(ranges, offset, key=lambda r: r.offset) - 1
    if at < 0 or offset + length > ranges[at].offset + ranges[at].length:
        raise TransferFailed(f"refused: bytes {offset}+{length} are outside the window")


class Window:
    """Leave to write into `ranges`. Writers `enter` before they touch a byte and `leave` after."""

    def __init__(self, ranges: tuple[ByteRange, ...]) -> None:
        self.ranges = ranges
        self._lock = threading.Lock()
        self._closed = False
        self._inside = 0

    def enter(self) -> bool:
        """Begin to write; False when the window is closed."""
        with self._lock:
            if self._closed:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """The writer that entered touches nothing any more."""
        with self._lock:
            self._inside -= 1

    def close(self) -> bool:
        """Let nobody enter from now on; True when nobody is inside."""
        with self._lock:
            self._closed = True
            return self._inside == 0


def still_open(window: Window) -> bool:
    """Whether a write without bytes, which has not looked at its window yet, may be acknowledged."""
    if not window.enter():
        return False
    window.leave()
    return True


class WindowTable:
    """All windows of one region by key. Keys are 63 random bits and never reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[int, Window] = {}

    def open(self, ranges: tuple[ByteRange, ...]) -> int:
        """The key of a new window over merged `ranges`."""
        with self._lock:
            key = secrets.randbits(63)
            self._windows[key] = Window(ranges)
        return key

    def get(self, key: int) -> Window | None:
        """The window that `key` opens, perhaps closing; None when there is none."""
        with self._lock:
            return self._windows.get(key)

    def close(self, key: int) -> bool:
        """See Connector.close_window; True also for a key that was never given out."""
        with self._lock:
            window = self._windows.get(key)
            if window is None:
                return True
            if not window.close():
                return False
            del self._windows[key]
            return True

    def close_all(self) -> bool:
        """Close every window; True when all are quiesced."""
        closed = [self.close(key) for key in tuple(self._windows)]  # each, also after a False
        return all(closed)

    def writable(self) -> tuple[ByteRange, ...]:
        """Every range that a write may still touch: of windows that are open, or closing with a writer inside."""
        with self._lock:
            return tuple(r for window in self._windows.values() for r in window.ranges)
