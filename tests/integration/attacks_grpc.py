"""What an attacker says to a gRPC door, byte by byte, and how he listens."""

import asyncio
from contextlib import suppress

import grpc

from tests.integration.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call,
    call_head,
    connected,
    frame,
    frames,
    literal,
)
from tests.integration.siege import ATTACKER, GENERATE

METHOD = "/diptych.v1.Inference/Generate"
MESSAGE = GENERATE.SerializeToString()
KEY = (b"authorization", b"Bearer " + ATTACKER.encode())
METADATA = tuple((name.decode(), value.decode()) for name, value in (KEY,))
CANCEL = b"\x00\x00\x00\x08"


def head(stream, *more, flags=END_HEADERS, method=METHOD):
    return frame(HEADERS, flags, stream, call_head(method, KEY, *more))


def calls_and_cancels(make):
    return b"".join(make(i) + frame(RST_STREAM, 0, i, CANCEL) for i in range(1, 20_001, 2))


def continuations():
    more = (frame(CONTINUATION, 0, 1, literal(b"x-%d" % i, b"y" * 1000)) for i in range(10_000))
    return head(1, flags=0) + b"".join(more)


def priorities():
    return b"".join(frame(PRIORITY, 0, i * 2 + 1, b"\x00\x00\x00\x00\x01") for i in range(50_000))


def metadata():
    more = (frame(CONTINUATION, 0, 1, literal(b"x", b"y" * 15_000)) for _ in range(20))
    return head(1, flags=0) + b"".join(more) + frame(CONTINUATION, END_HEADERS, 1)


HALF = b"\x00\x00\x00\xff\xff"  # the length of a message, and nothing of it
FLOODS = {  # bytes after the preface and settings
    "rapid reset": lambda: calls_and_cancels(lambda i: call(i, METHOD, MESSAGE, KEY)),
    "rapid reset of heads": lambda: calls_and_cancels(head),
    "continuation": continuations,
    "empty continuation": lambda: head(1, flags=0) + frame(CONTINUATION, 0, 1) * 50_000,
    "ping": lambda: frame(PING, 0, 0, b"12345678") * 50_000,
    "settings": lambda: frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\xff\xff") * 50_000,
    "empty data": lambda: head(1) + frame(DATA, 0, 1) * 50_000,
    "priority": priorities,
    "unknown frames": lambda: frame(99, 0, 0, b"x" * 10_000) * 1000,
    "large metadata": metadata,
    "streams without a message": lambda: b"".join(head(i) for i in range(1, 8001, 2)),
    "half a message": lambda: b"".join(head(i) + frame(DATA, 0, i, HALF) for i in range(1, 801, 2)),
}


def nonsense():
    """Each is a whole connection's bytes."""
    hello = PREFACE + frame(SETTINGS)
    yield "no HTTP/2", b"\x00" * 100
    yield "HTTP/1.1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500
    yield "half a preface", PREFACE[:10]
    yield "settings of a wrong size", PREFACE + frame(SETTINGS, 0, 0, b"12345")
    yield "settings that are no settings", PREFACE + frame(SETTINGS, 0, 0, b"\x00\x05\xff\xff\xff\xff")
    yield "a frame over the limit", hello + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"
    yield "data on no stream", hello + frame(DATA, 0, 0, b"x")
    yield "an even stream", hello + head(2)
    yield "a stream twice", hello + call(1, METHOD, MESSAGE, KEY) * 2
    yield "windows that overflow", hello + head(1) + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff") * 3
    yield "a window of nothing", hello + frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x00")
    yield "continuation of nothing", hello + frame(CONTINUATION, END_HEADERS, 1, b"")
    yield "a head that does not decompress", hello + frame(HEADERS, END_HEADERS, 1, b"\xff" * 50)
    yield "a head cut in two by data", hello + head(1, flags=0) + frame(DATA, END_STREAM, 1, b"")
    yield "goaway and on", hello + frame(GOAWAY, 0, 0, b"\x00" * 8) + call(1, METHOD, MESSAGE, KEY)
    yield "a length over the limit", hello + head(1) + frame(DATA, 0, 1, b"\x00\xff\xff\xff\xff")
    yield "compressed by nothing known", hello + head(1) + frame(DATA, END_STREAM, 1, b"\x01\x00\x00\x00\x04abcd")


async def send(port, data, hello=b""):
    """All of it, as far as it is taken, and wait a little for what comes."""
    async with connected(port, hello) as (reader, writer):
        heard = asyncio.ensure_future(frames(reader))
        try:
            for begin in range(0, len(data), 1 << 16):
                writer.write(data[begin : begin + (1 << 16)])
                async with asyncio.timeout(0.5):
                    await writer.drain()
        except (OSError, TimeoutError):
            pass  # it is not read any more
        await asyncio.wait((heard,), timeout=0.3)
        heard.cancel()
        await asyncio.wait((heard,))


async def hear(reader, writer, ended, read):
    """Read until the server closes, into `ended` the streams that it ends. Reads as fast as it comes, and says so: who does not
    answer the server's pings is dead to it, and who grants no window would stop his own streams in the places that they have.
    `read` is a semaphore: released for each of our own pings that is answered, and so all that we sent before it was read.
    """
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            begin = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(begin[:3], "big"))
            if begin[3] == PING and not begin[4] & ACK:
                writer.write(frame(PING, ACK, payload=payload))
            elif begin[3] == PING:
                read.release()
            if begin[3] == DATA and payload:
                writer.write(frame(WINDOW_UPDATE, payload=len(payload).to_bytes(4, "big")))
            if (begin[3] == HEADERS and begin[4] & END_STREAM) or begin[3] == RST_STREAM:
                ended.add(int.from_bytes(begin[5:9], "big"))


async def call_once(channel):
    stub = channel.unary_stream(METHOD, lambda m: m, lambda m: m)
    request = stub(MESSAGE, timeout=10, metadata=METADATA)
    try:
        async for _ in request:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await request.code()
