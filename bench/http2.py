"""As much of HTTP/2 as a gRPC load client needs, so that the client's own work is not what is measured.

    one connection ── request ──▶ Stream: message, message, … , over        many streams on each connection

Frames are counted and kept, understood later. No header is decoded: how a call ended is told by its last message, which
says so in its own way, or is missing. Requests are small and answers within the window of 2 GiB that is opened at the start,
so there is no flow control to keep beyond that. grpc.aio's own client takes 20 to 98 µs of CPU a message; this takes about 3.
Does not know services or messages.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_WIDE = 2**31 - 1
_MAX_REQUEST_BYTES = 16_000  # one frame, well within the peer's first window
_HEAD_BYTES = 9


class Http2Error(RuntimeError):
    """The peer closed the connection or refused a stream."""


@dataclass(slots=True)
class Stream:
    """One call: when it was sent, when something came of it, and what."""

    sent_s: float
    ended: asyncio.Future[None]
    on_data: Callable[[Stream], None] | None = None
    arrivals_s: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def messages(self) -> list[bytes]:
        """The gRPC messages that came whole."""
        data = b"".join(self.parts)
        found, at = [], 0
        while at + 5 <= len(data):
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if at + 5 + size > len(data):
                break
            found.append(data[at + 5 : at + 5 + size])
            at += 5 + size
        return found


class Http2Connection(asyncio.Protocol):
    """One connection. Owns its streams until they end; those that are open when it breaks raise Http2Error."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._streams: dict[int, Stream] = {}
        self._next_id = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast("asyncio.Transport", transport)
        settings = (0x4).to_bytes(2, "big") + _WIDE.to_bytes(4, "big")  # INITIAL_WINDOW_SIZE of every stream
        widened = (_WIDE - 65_535).to_bytes(4, "big")
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, widened))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        for stream in self._streams.values():
            if not stream.ended.done():
                stream.ended.set_exception(Http2Error(f"the connection was closed: {exc}"))
        self._streams.clear()

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        if self._rest:
            data = self._rest + data
        at, now, size = 0, time.monotonic(), len(data)
        while at + _HEAD_BYTES <= size:
            length = int.from_bytes(data[at : at + 3], "big")
            end = at + _HEAD_BYTES + length
            if end > size:
                break
            stream_id = int.from_bytes(data[at + 5 : at + 9], "big")
            self._on_frame(data[at + 3], data[at + 4], stream_id, data[at + _HEAD_BYTES : end], now)
            at = end
        self._rest = data[at:]

    def call(
        self,
        path: str,
        message: bytes,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        more: bool = False,
        on_data: Callable[[Stream], None] | None = None,
    ) -> Stream:
        """Send one message to a method; `more` leaves our side of the stream open, until `reset`."""
        assert self._transport is not None, "not connected"
        if len(message) > _MAX_REQUEST_BYTES:
            raise ValueError(
                f"message: got {len(message)} bytes, at most {_MAX_REQUEST_BYTES} are sent without flow control"
            )
        stream_id, self._next_id = self._next_id, self._next_id + 2
        stream = Stream(time.monotonic(), asyncio.get_running_loop().create_future(), on_data)
        self._streams[stream_id] = stream
        block = b"\x83\x86" + b"".join(  # :method POST, :scheme http
            _literal(name, value)
            for name, value in (
                (":path", path),
                (":authority", self._authority),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                *metadata,
            )
        )
        body = b"\x00" + len(message).to_bytes(4, "big") + message
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, stream_id, block)
            + _frame(_DATA, 0 if more else _END_STREAM, stream_id, body)
        )
        return stream

    def close(self) -> None:
        """End every stream and the connection."""
        if self._transport is not None:
            self._transport.close()

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes, now: float) -> None:
        stream = self._streams.get(stream_id)
        if kind == _DATA and stream is not None:
            stream.arrivals_s.append(now)
            stream.parts.append(payload)
            if stream.on_data is not None:
                stream.on_data(stream)
        elif kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            self.connection_lost(Http2Error("the peer goes away"))
            return
        if stream is not None and (kind == _RST or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)):
            del self._streams[stream_id]
            if not stream.ended.done():
                stream.ended.set_result(None)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> Http2Connection:
    """A connection that calls can be made on. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Http2Connection(f"{host}:{port}"), host, port, ssl=tls)
    return connection


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    """A header in HPACK's plainest form, which neither side remembers."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 0x7F, "longer strings have their length in several bytes"
    return bytes((len(raw),)) + raw
