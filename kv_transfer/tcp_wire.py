"""The `tcp` connector's wire: what a source sends and a target answers, and the limits that a stranger meets.

    with a cluster secret the second HELLO of both, between which they prove themselves: see `greet` and `meet`
    source ── HELLO ──▶ target        source ── WRITE header, ranges, the bytes ──▶ target       (many on one connection)
           ◀── HELLO ──                      ◀── ACK key, status ──

All little-endian. A frame that is not one of these, or claims more than the region holds, ends its connection. Frames from
an honest source are acknowledged also when they are refused: their bytes are read and thrown away, so that the connection
stays in step. A key is of one grant, and so of one life of each side: an acknowledgement names the key that it is for, and is
not taken for another's.

Does not know sockets' options, threads or windows.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from select import POLLIN, POLLRDHUP, poll

from contracts.errors import TransferFailed
from contracts.secret import NONCE_BYTES, PROOF_BYTES, ProofKey
from kv_transfer.connector import ByteRange
from kv_transfer.handshake import ANSWER_BYTES, SourceHandshake, TargetHandshake

logger = logging.getLogger(__name__)

HELLO = b"DIPTTCP\x02"
HELLO_PROVEN = b"DIPTTCP\x03"
MAX_RANGES = 65_536  # of one frame: 1 MiB of header
_WRITE_MAGIC = 0x4B565752
_ACK_MAGIC = 0x4B564143
_HEADER = struct.Struct("<IIQQ")  # magic, number of ranges, key, bytes that follow the ranges
_ACK = struct.Struct("<IIQ")  # magic, status, key
ACK_BYTES = _ACK.size
HEADER_BYTES = _HEADER.size
RANGE_BYTES = 16
_MAX_BUFFERS = 512  # per system call; IOV_MAX is 1024


class Status(IntEnum):
    """How a write ended at the target."""

    LANDED = 0
    CLOSED = 1  # no such window, or closed before the last byte
    OUTSIDE = 2  # some bytes were aimed outside the window
    FAILED = 3  # the target could not fetch them (`nixl`)


class BadFrame(OSError):
    """The other side does not speak this protocol, or is too slow."""


class Ended(BadFrame, ConnectionError):
    """The other side has closed the connection in the middle of something."""


def greet(sock: socket.socket, key: ProofKey | None, timeout_s: float) -> None:
    """The source's part of the beginning. BadFrame says what is wrong with the other side; nothing was written then."""
    ours = HELLO if key is None else HELLO_PROVEN
    sock.sendall(ours)
    theirs = bytes(receive_exactly(sock, len(ours), timeout_s))
    if theirs != ours and theirs in (HELLO, HELLO_PROVEN):
        raise BadFrame(f"only one side has a cluster secret, and that is {'the other' if key is None else 'ours'}")
    if theirs != ours:
        raise BadFrame("it is not one of ours")
    if key is None:
        return
    handshake = SourceHandshake(key, bytes(receive_exactly(sock, NONCE_BYTES, timeout_s)))
    sock.sendall(handshake.answer)
    try:
        welcome = receive_exactly(sock, PROOF_BYTES, timeout_s)
    except ConnectionError as error:
        raise BadFrame("it does not accept our cluster secret") from error
    if not handshake.accepts(bytes(welcome)):
        raise BadFrame("it has another cluster secret")


def meet(sock: socket.socket, key: ProofKey | None, timeout_s: float) -> None:
    """The target's part, all of it within `timeout_s`. BadFrame unless the other side may write under keys that it has."""
    deadline = time.monotonic() + timeout_s
    ours = HELLO if key is None else HELLO_PROVEN
    theirs = bytes(receive_exactly(sock, len(ours), timeout_s))
    if theirs in (HELLO, HELLO_PROVEN):
        sock.sendall(ours)
    if theirs != ours:
        raise BadFrame(
            "not one of ours" if theirs not in (HELLO, HELLO_PROVEN) else "only one side has a cluster secret"
        )
    if key is None:
        return
    handshake = TargetHandshake(key)
    sock.sendall(handshake.nonce)
    welcome = handshake.welcome(bytes(receive_exactly(sock, ANSWER_BYTES, deadline - time.monotonic())))
    if welcome is None:
        raise BadFrame("it does not know our cluster secret")
    sock.sendall(welcome)


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes a write's bytes."""

    num_ranges: int
    key: int
    num_bytes: int


def pack_write(key: int, ranges: Sequence[ByteRange]) -> bytes:
    """Header and ranges of a frame."""
    flat = [number for one in ranges for number in (one.offset, one.length)]
    total = sum(one.length for one in ranges)
    return pack_header(Header(len(ranges), key, total)) + struct.pack(f"<{len(flat)}Q", *flat)


def pack_header(header: Header) -> bytes:
    """What precedes a write's ranges."""
    return _HEADER.pack(_WRITE_MAGIC, header.num_ranges, header.key, header.num_bytes)


def unpack_header(raw: bytes | bytearray, region_bytes: int) -> Header:
    """BadFrame when it is none, or beyond the limits."""
    magic, num_ranges, key, num_bytes = _HEADER.unpack(raw)
    if magic != _WRITE_MAGIC:
        raise BadFrame("not a write frame")
    if num_ranges > MAX_RANGES or num_bytes > region_bytes:
        raise BadFrame(f"a frame of {num_ranges} ranges and {num_bytes} bytes is beyond all limits")
    return Header(num_ranges, key, num_bytes)


def unpack_ranges(raw: bytes | bytearray, header: Header) -> tuple[ByteRange, ...]:
    """The ranges of a frame; BadFrame when they do not add up to its bytes."""
    flat = struct.unpack(f"<{2 * header.num_ranges}Q", raw)
    ranges = tuple(ByteRange(*pair) for pair in zip(flat[::2], flat[1::2], strict=True))
    if sum(one.length for one in ranges) != header.num_bytes:
        raise BadFrame("the ranges of a frame do not add up")
    return ranges


def pack_ack(status: Status, key: int) -> bytes:
    """The answer to a write under `key`."""
    return _ACK.pack(_ACK_MAGIC, status, key)


def check_ack(raw: bytes | bytearray, key: int) -> None:
    """TransferFailed unless it says that all bytes landed, BadFrame unless it speaks of a write under `key`."""
    magic, status, written = _ACK.unpack(raw)
    if magic != _ACK_MAGIC or written != key:
        raise BadFrame("not an acknowledgement of this write")
    if status == Status.OUTSIDE:
        raise TransferFailed("refused: bytes outside the window")
    if status == Status.FAILED:
        raise TransferFailed("the target could not read our memory")
    if status != Status.LANDED:
        raise TransferFailed("refused: the window is closed")


def wait_readable(sock: socket.socket, timeout_s: float | None) -> bool:
    """Whether bytes (or the end) came within the time; None waits for ever, 0 not at all."""
    waiter = poll()
    waiter.register(sock, POLLIN | POLLRDHUP)
    return bool(waiter.poll(None if timeout_s is None else timeout_s * 1000))


def shut(sock: socket.socket) -> None:
    """End a connection, or listening, from any thread; whoever waits for it wakes up. Nothing where it has ended."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # the other side was faster
        logger.debug("tcp: shutdown: %s", error)


def receive_exactly(sock: socket.socket, num_bytes: int, timeout_s: float) -> bytearray:
    """So many bytes, all within `timeout_s` (a trickle does not prolong it); BadFrame or OSError otherwise."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    deadline = time.monotonic() + timeout_s
    got = 0
    while got < num_bytes:
        if not wait_readable(sock, max(0.0, deadline - time.monotonic())):
            raise BadFrame(f"nothing more within {timeout_s:g} s")
        n = sock.recv_into(view[got:])
        if n == 0:
            raise Ended("the connection ended")
        got += n
    return data


def send_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send every byte with few system calls and no copy here; each call within the socket's own timeout."""
    at = 0
    rest = list(buffers)
    while at < len(rest):
        sent = sock.sendmsg(rest[at : at + _MAX_BUFFERS])
        while at < len(rest) and sent >= len(rest[at]):
            sent -= len(rest[at])
            at += 1
        if at < len(rest):
            rest[at] = rest[at][sent:]
