"""The connector interface: moves bytes between registered regions and knows no requests.

    target side                                     source side
    expose(region)
    address() ────────────────────────────────────▶ connect(address)
    open_window(ranges) ──▶ key ──────────────────▶ write(address, key, writes)     lands, or raises TransferFailed
    close_window(key) ──▶ True when quiesced

The promise that everything above builds on: after `close_window(key)` has returned True, no byte written under that key
can land any more, whatever its writer does (is stopped, resumes, dies, lies). Until then the ranges must not be used
for anything else. A key is of one grant, and so of one life of each side: what an older life still sends, under whatever key it
had, lands nowhere. Capabilities are data. Does not know blocks, tokens, leases or peers' roles.

The four-method core (register, connect, write, close) is NIXL's; windows are this project's fencing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.worker import ConnectorAddress


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a connector can do; chosen by data, never by class."""

    kind: str
    same_process_only: bool
    same_host_only: bool
    one_sided: bool  # the target's CPU takes no part in a write
    preference: int  # `auto` takes the highest that both ends have


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of a region: offset and length in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Write:
    """Copy `length` bytes from the source's region at `source_offset` to the target's at `target_offset`."""

    source_offset: int
    target_offset: int
    length: int


class Region(Protocol):
    """A worker's KV memory as connectors see it: one flat run of bytes that lives as long as the worker."""

    @property
    def buffer(self) -> memoryview:
        """Writable bytes, format "B", one dimension."""
        ...

    @property
    def fd(self) -> int | None:
        """A file descriptor of the memory if it can be mapped by another process (a memfd), else None."""
        ...


class Connector(Protocol):
    """Moves bytes between regions. All methods but `write`'s copying itself are quick.

    One object serves both as target and as source. Not thread-safe: used from one event loop; the copying runs in
    threads of its own so that the loop never waits for memory or sockets.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this connector can do."""
        ...

    def expose(self, region: Region) -> None:
        """Take `region` as this side's memory, both to write from and to be written to. Called once, before all else."""
        ...

    def address(self) -> ConnectorAddress:
        """Where others reach this region."""
        ...

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """Let the holder of the returned key write into exactly these ranges. Keys are unguessable and never reused."""
        ...

    def close_window(self, key: int) -> bool:
        """Let no further write under `key` begin; True once none is under way. Ask again while False. Idempotent."""
        ...

    async def connect(self, address: ConnectorAddress) -> None:
        """Reach another side's region; raises TransferFailed. Idempotent; `write` connects by itself if need be."""
        ...

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """Copy, and return when all bytes have landed. Raises TransferFailed: then some may have landed.

        After that nothing reads the source any more; what a network still carries may land until the window is closed.

        Cancelling the caller does not stop a copy that runs: it is awaited first, so that the source may be reused as
        soon as this returns or raises.
        """
        ...

    async def close(self) -> None:
        """Let go of everything; every open window counts as closed. Idempotent."""
        ...
