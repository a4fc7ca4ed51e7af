"""HTTP/2 by hand, so that a test can send what no library does. Frames of RFC 9113; heads without compression (RFC 7541)."""

import asyncio
import contextlib

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field, never indexed."""
    return b"\x10" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size, prefix = size - 127, b"\x7f"
    while size >= 128:
        prefix += bytes([size % 128 + 128])
        size //= 128
    return prefix + bytes([size]) + text


def call_head(method: str, *more: tuple[bytes, bytes]) -> bytes:
    """The header block of a gRPC call."""
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    )
    return b"".join(literal(name, value) for name, value in fields)


def call(stream: int, method: str, message: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A whole unary call."""
    data = b"\x00" + len(message).to_bytes(4, "big") + message
    return frame(HEADERS, END_HEADERS, stream, call_head(method, *more)) + frame(DATA, END_STREAM, stream, data)


@contextlib.asynccontextmanager
async def connected(port: int, hello: bytes = PREFACE + frame(SETTINGS)):
    """A connection that has said hello."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(hello)
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def frames(reader) -> list[tuple[int, int, int, bytes]]:
    """All frames until the peer closes."""
    found = []
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = await reader.readexactly(9)
            size = int.from_bytes(head[:3], "big")
            found.append((head[3], head[4], int.from_bytes(head[5:9], "big"), await reader.readexactly(size)))
    return found
