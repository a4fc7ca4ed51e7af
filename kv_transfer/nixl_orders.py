"""What a worker and the process that runs NIXL for it say to each other, over two pairs of sockets that nobody else has.

    orders    worker ── Begin ──▶ process    ◀── Ready or Refused ──
                     ── Connect, Carry ──▶   ◀── Done, of the same number ──      Cancel: give that one up      Finish: close
    windows   process ── Ask, Enter, Leave ──▶ worker    ◀── Ranges, Entered, Left ──

The windows are the worker's: what it opens and closes holds at once, and when the process has died it knows that nobody is
inside any more. Does not know what is done about any of it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec

from kv_transfer.connector import Write

LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 28


class _Said(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Anything that one side says."""


class Begin(_Said, frozen=True):
    """What the process is to be: for a region of so many bytes, with these limits; `key` is None where nothing is proven."""

    num_bytes: int
    limits: tuple[int, int, float, float, float]  # TargetLimits, field by field
    key: bytes | None
    log_level: str


class Ready(_Said, frozen=True):
    """NIXL has taken the memory, and sources are let in."""


class Refused(_Said, frozen=True):
    """It has not, and why."""

    reason: str


class Connect(_Said, frozen=True):
    """See Connector.connect."""

    number: int
    kind: str
    address: str


class Carry(_Said, frozen=True):
    """See Connector.write; each write as source offset, target offset and length."""

    number: int
    kind: str
    address: str
    key: int
    writes: list[tuple[int, int, int]]


class Cancel(_Said, frozen=True):
    """Nobody wants the rest of that order; it is Done all the same, when it is over."""

    number: int


class Finish(_Said, frozen=True):
    """Close, and end."""


class Done(_Said, frozen=True):
    """An order is over; `failed` says why, None that it has succeeded."""

    number: int
    failed: str | None


class Ask(_Said, frozen=True):
    """What may be written under this key?"""

    key: int


class Ranges(_Said, frozen=True):
    """This, each as offset and length; None where there is no such window."""

    ranges: list[tuple[int, int]] | None


class Enter(_Said, frozen=True):
    """A piece begins to be read into this window: may it?"""

    key: int


class Entered(_Said, frozen=True):
    """Whether it may."""

    may: bool


class Leave(_Said, frozen=True):
    """The piece has ended."""

    key: int


class Left(_Said, frozen=True):
    """That has been taken in: what is said to the source afterwards finds the window without it."""


Order = Connect | Carry | Cancel | Finish
Outcome = Ready | Refused | Done
Question = Ask | Enter | Leave
Answer = Ranges | Entered | Left

_ENCODER = msgspec.msgpack.Encoder()
BEGINS = msgspec.msgpack.Decoder(Begin)
ORDERS = msgspec.msgpack.Decoder(Order)
BEGINNINGS = msgspec.msgpack.Decoder(Ready | Refused)
DONES = msgspec.msgpack.Decoder(Done)
QUESTIONS = msgspec.msgpack.Decoder(Question)
RANGES = msgspec.msgpack.Decoder(Ranges)
ENTERED = msgspec.msgpack.Decoder(Entered)
LEFT = msgspec.msgpack.Decoder(Left)


def pack(said: Begin | Order | Outcome | Question | Answer) -> bytes:
    """One message as it travels."""
    body = _ENCODER.encode(said)
    return LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> bytes | None:
    """The next message, for a decoder; None when the other side has ended. Blocks."""
    length = _exactly(sock, LENGTH.size)
    if length is None:
        return None
    (num_bytes,) = LENGTH.unpack(length)
    if num_bytes > _MOST_BYTES:
        raise OSError(f"a message of {num_bytes} bytes is beyond all limits")
    return _exactly(sock, num_bytes)


def flat(writes: Sequence[Write]) -> list[tuple[int, int, int]]:
    """Writes as Carry has them."""
    return [(w.source_offset, w.target_offset, w.length) for w in writes]


def _exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray(num_bytes)
    view, got = memoryview(data), 0
    while got < num_bytes:
        try:
            n = sock.recv_into(view[got:])
        except ConnectionError:  # it has died
            return None
        if n == 0:
            return None
        got += n
    return bytes(data)
