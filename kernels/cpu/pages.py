"""Memory for packed weights: in huge pages where the system gives them, given back when the last tensor in it is dropped.

A step reads every weight once: in pages of 4 KB that is a look into the page table every 64 lines. Weights come in all sizes,
so several share a chunk instead of wasting most of a huge page each. Does not know what lies in it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 64 << 20
# Of a start, so that no line of one weight is another's.
_ALIGN = 4096


class _Chunk(mmap.mmap):
    """One mapping, used from the front; a tensor made from it keeps it."""

    first: int
    used: int

    @classmethod
    def of(cls, size: int) -> _Chunk:
        """`size` usable bytes from a huge page's border on; OSError or MemoryError if there are none."""
        chunk = cls(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.first = -ctypes.addressof(ctypes.c_char.from_buffer(chunk)) % HUGE_PAGE
        chunk.used = 0
        # A wish: where the system has no huge pages, small ones serve.
        chunk.madvise(mmap.MADV_HUGEPAGE)
        return chunk


class Arena:
    """Hands out memory; keeps none alive itself. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.ref[_Chunk] | None = None

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeros, starting on a page's border."""
        needed = -(-num_bytes // _ALIGN) * _ALIGN
        with self._lock:
            chunk = self._open() if self._open is not None else None
            if chunk is None or chunk.used + needed > CHUNK:
                chunk = _Chunk.of(max(needed, CHUNK))
                self._open = weakref.ref(chunk)
            start = chunk.first + chunk.used
            chunk.used += needed
            return torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=start)


ARENA = Arena()
