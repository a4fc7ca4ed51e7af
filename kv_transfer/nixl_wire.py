"""What the two ends of the `nixl` connector say to each other over their control connection, after `tcp_wire`'s greeting.

    source ── INTRODUCTION agent, region ──▶ target      reads a few bytes of it     ◀── ACK 0, status ──
           ── ASK header, (source, target, length) … ──▶  reads them all             ◀── ACK key, status ──
           ── end of what is sent: it gives up ──▶        stops after the piece that is under way, and answers

All little-endian. The target reads: so it is the target's own side that knows when nothing can land any more. Does not know NIXL.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.connector import Write
from kv_transfer.nixl_agent import Place
from kv_transfer.tcp_wire import HEADER_BYTES, BadFrame, Header, pack_header, receive_exactly, unpack_header

MAX_WRITES = 32_768  # of one frame: 768 KiB
_MAGIC = b"DIPTNIX\x01"
# Magic; bytes of the name and of the metadata; the region's address and bytes; its device; its kind of memory.
_INTRODUCTION = struct.Struct("<8sIIQQI8s")
_MAX_NAME_BYTES = 256
_MAX_METADATA_BYTES = 1 << 20
_ROW_BYTES = 24


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who a source is: its agent, and the region that is read from."""

    name: str
    metadata: bytes
    place: Place


def pack_introduction(who: Introduction) -> bytes:
    """What a source says first."""
    name, place = who.name.encode(), who.place
    where = (place.address, place.num_bytes, place.device, place.memory.encode())
    return _INTRODUCTION.pack(_MAGIC, len(name), len(who.metadata), *where) + name + who.metadata


def receive_introduction(sock: socket.socket, timeout_s: float) -> Introduction:
    """BadFrame when it is none."""
    raw = receive_exactly(sock, _INTRODUCTION.size, timeout_s)
    magic, name_bytes, metadata_bytes, address, num_bytes, device, memory = _INTRODUCTION.unpack(raw)
    if magic != _MAGIC or name_bytes > _MAX_NAME_BYTES or metadata_bytes > _MAX_METADATA_BYTES:
        raise BadFrame("it does not introduce itself as a nixl source")
    name = bytes(receive_exactly(sock, name_bytes, timeout_s))
    metadata = bytes(receive_exactly(sock, metadata_bytes, timeout_s))
    kind = memory.rstrip(b"\0").decode(errors="replace")
    if kind not in ("DRAM", "VRAM"):
        raise BadFrame(f"memory of kind {kind!r} cannot be read")
    return Introduction(name.decode(errors="replace"), metadata, Place(address, num_bytes, kind, device))


def pack_ask(key: int, writes: Sequence[Write]) -> bytes:
    """Ask the target to fetch these under `key`."""
    flat = [number for w in writes for number in (w.source_offset, w.target_offset, w.length)]
    total = sum(write.length for write in writes)
    return pack_header(Header(len(writes), key, total)) + struct.pack(f"<{len(flat)}Q", *flat)


def receive_ask(sock: socket.socket, region_bytes: int, timeout_s: float) -> tuple[int, tuple[Write, ...]]:
    """Key and writes of a frame; BadFrame when it is none, or is beyond the limits."""
    header = unpack_header(receive_exactly(sock, HEADER_BYTES, timeout_s), region_bytes)
    if header.num_ranges > MAX_WRITES:
        raise BadFrame(f"a frame of {header.num_ranges} writes is beyond all limits")
    raw = receive_exactly(sock, _ROW_BYTES * header.num_ranges, timeout_s)
    flat = struct.unpack(f"<{3 * header.num_ranges}Q", raw)
    writes = tuple(Write(*row) for row in zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    if sum(write.length for write in writes) != header.num_bytes:
        raise BadFrame("the writes of a frame do not add up")
    return header.key, writes
