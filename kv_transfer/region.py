"""A worker's KV memory as connectors need it: one flat run of bytes that another process can map.

    SharedRegion(num_bytes) ── memfd + mmap ──▶ buffer (for the model runner), fd (for the `shm` connector)
                            └─ no memfd here ─▶ anonymous memory, fd is None

Owns the memory and its descriptor; `close` gives both back. Does not know blocks, layouts or who reads it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

MakeMemfd = Callable[[str], int]


def sealable_memfd(name: str) -> int:
    """A new memfd that may be sealed; raises OSError where the system has none."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class SharedRegion:
    """`num_bytes` zeroed bytes, page-aligned; committed by the system as they are touched.

    The memfd is sealed against shrinking and growing, so that no holder of the descriptor can make a mapping fault.
    `make_memfd` raises OSError where there is none: then the memory is this process's alone and `fd` is None.
    """

    def __init__(self, num_bytes: int, *, make_memfd: MakeMemfd = sealable_memfd) -> None:
        if num_bytes <= 0:
            raise ValueError(f"num_bytes: got {num_bytes}, must be at least 1")
        self._num_bytes = num_bytes
        self._fd = _memfd_of(num_bytes, make_memfd)
        self._map: mmap.mmap | None = mmap.mmap(-1 if self._fd is None else self._fd, num_bytes)
        self._buffer = memoryview(self._map)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self._num_bytes

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable, format "B"; not usable after `close`."""
        return self._buffer

    @property
    def fd(self) -> int | None:
        """The memfd, or None where the memory cannot be mapped by another process."""
        return self._fd

    def populate(self) -> None:
        """Have the system back every page now, some tenths of a second per GB, so that no write pays for it later.

        Zeroes bytes, so call it before anything is stored. Runs outside the GIL: fit for a thread.
        """
        np.frombuffer(self._buffer, dtype=np.uint8)[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Let go of descriptor and mapping. Idempotent.

        Views that others still hold stay valid: the mapping then lives until the last of them is gone.
        """
        if self._map is None:
            return
        kept, self._map = self._map, None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        try:
            self._buffer.release()
            kept.close()
        except BufferError:
            # Somebody (a tensor, a connector's thread) still looks at it: unmapped with their last view.
            del kept

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _memfd_of(num_bytes: int, make_memfd: MakeMemfd) -> int | None:
    try:
        fd = make_memfd("diptych-kv")
    except (OSError, AttributeError):  # refused here, or a system without memfd
        return None
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd
