"""What strangers may send to the gRPC door: bytes that are no HTTP/2, floods, messages that are none. Others notice nothing."""

import asyncio
import random
from dataclasses import replace

import grpc
from google.rpc import code_pb2

from contracts.pb.diptych.v1 import blocks_pb2, decode_pb2, handoff_pb2, inference_pb2, prefill_pb2, registry_pb2
from engine.execution.fake import expected_tokens
from router.config import AdmissionConfig
from rpc.server import ServerConfig
from tests.integration.hostile import hostile_message
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
from tests.integration.pools import MODEL, Decoding, Setup, disaggregated, pools, request
from tests.integration.siege import ATTACKER, GENERATE, MEMORY_MIB, besieged, memory_mib

DOOR = ServerConfig(port=0, max_connections=24, max_streams=1000, hello_s=1.0)
METHOD = "/diptych.v1.Inference/Generate"
MESSAGE = GENERATE.SerializeToString()
KEY = (b"authorization", b"Bearer " + ATTACKER.encode())
METADATA = tuple((name.decode(), value.decode()) for name, value in (KEY,))
CANCEL = b"\x00\x00\x00\x08"


def head(stream, *more, flags=END_HEADERS):
    return frame(HEADERS, flags, stream, call_head(METHOD, KEY, *more))


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


async def test_a_flood_harms_nobody_else(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege:
        for name, flood in FLOODS.items():
            data = flood()
            await asyncio.gather(*(send(siege.grpc, data, PREFACE + frame(SETTINGS)) for _ in range(2)))
            await siege.good()
            assert memory_mib() - siege.memory < MEMORY_MIB, name


async def test_what_is_no_http2_harms_nobody(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege:
        for _, data in nonsense():
            await send(siege.grpc, data)


async def test_bytes_that_come_one_by_one_are_not_waited_for(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege:

        async def dribble():
            async with connected(siege.grpc, b"") as (reader, writer):
                try:
                    for byte in PREFACE:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.15)
                except OSError:
                    return True
                return reader.at_eof()

        assert all(await asyncio.gather(*(dribble() for _ in range(10)))), "closed after a second"


async def test_more_connections_than_may_be_are_closed_and_those_that_are_there_go_on(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege:
        channel = grpc.aio.insecure_channel(siege.running.target)
        await channel.channel_ready()
        silent = [await asyncio.open_connection("127.0.0.1", siege.grpc) for _ in range(60)]
        assert await call_once(channel) is grpc.StatusCode.OK, "whoever is connected"
        async with asyncio.timeout(10):
            for reader, writer in silent:
                await reader.read()  # the server has given them up
                writer.close()
        await channel.close()


async def call_once(channel):
    stub = channel.unary_stream(METHOD, lambda m: m, lambda m: m)
    request = stub(MESSAGE, timeout=10, metadata=METADATA)
    try:
        async for _ in request:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await request.code()


async def test_ten_thousand_open_streams(tmp_path):
    """Of one key. Ten may run or wait, the rest is refused, and who has another key is served."""
    number, connections = 1000, 10
    admission = AdmissionConfig(max_running=6, max_waiting=4)
    async with besieged(tmp_path, grpc=DOOR, admission=admission) as siege:
        siege.running.cluster.step_s = 0.005  # answers that take a while: other streams come in meanwhile

        async def flood():
            data = b"".join(call(i, METHOD, MESSAGE, KEY) for i in range(1, 2 * number, 2))
            async with connected(siege.grpc) as (reader, writer):
                heard = asyncio.ensure_future(ends(reader, writer, number))
                writer.write(data)
                async with asyncio.timeout(60):
                    await writer.drain()
                    return await heard

        ended = await asyncio.gather(*(flood() for _ in range(connections)))
        assert ended == [number] * connections, "each stream got its end"
        shed = sum(
            [await siege.running.metric("diptych_shed_requests_total", reason=r) for r in ("full", "pushed_out")]
        )
        assert shed > 100, f"{shed} were refused"


async def ends(reader, writer, number):
    """How many streams have ended, when `number` have. Reads as fast as it comes, and says so: who does not answer the
    server's pings is dead to it, and who grants no window would stop his own streams in the places that they have.
    """
    ended = set()
    while len(ended) < number:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == PING and not head[4] & ACK:
            writer.write(frame(PING, ACK, payload=payload))
        if head[3] == DATA and payload:
            writer.write(frame(WINDOW_UPDATE, payload=len(payload).to_bytes(4, "big")))
        if head[3] == HEADERS and head[4] & END_STREAM:
            ended.add(head[5:9])
    return len(ended)


GOOD_CODES = {
    code_pb2.Code.Name(code)
    for code in (
        code_pb2.OK,
        code_pb2.INVALID_ARGUMENT,
        code_pb2.NOT_FOUND,
        code_pb2.FAILED_PRECONDITION,
        code_pb2.RESOURCE_EXHAUSTED,
        code_pb2.UNAVAILABLE,
        code_pb2.DEADLINE_EXCEEDED,
        code_pb2.UNIMPLEMENTED,
    )
}


def methods(*files):
    return [
        method for file in files for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods
    ]


async def ask(channel, method, payloads, timeout_s=0.3):
    """The code with which a call ends that sends these bytes."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        make = channel.stream_stream if method.server_streaming else channel.stream_unary
    else:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
    given = iter(payloads) if method.client_streaming else payloads[0]
    request = make(path, lambda m: m, lambda m: m)(given, timeout=timeout_s, metadata=METADATA)
    try:
        if method.server_streaming:
            async for _ in request:
                pass
        else:
            await request
    except grpc.aio.AioRpcError as error:
        if error.details() == "Internal error from Core":  # this client's own, when it writes on after the end
            return "OK", ""
        return error.code().name, error.details()
    return "OK", ""


def rubbish(chance, method):
    """Bytes that are no message, and messages that say what nobody should."""
    yield [chance.randbytes(chance.randrange(1, 200))]
    yield [b"\xff" * 20]
    yield [b"\x0a" * 5000]  # fields within fields
    whole = hostile_message(method.input_type, chance).SerializeToString()
    yield [whole[: len(whole) // 2]]
    for _ in range(12):
        yield [hostile_message(method.input_type, chance).SerializeToString() for _ in range(3)]


async def hostile_to_all(channel, whose):
    for method in whose:
        for payloads in rubbish(random.Random(method.full_name), method):
            code, details = await ask(channel, method, payloads)
            assert code in GOOD_CODES, (method.full_name, code, details, payloads)


async def test_messages_that_are_none_are_refused_by_name(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege, grpc.aio.insecure_channel(siege.running.target) as channel:
        await hostile_to_all(channel, methods(inference_pb2, registry_pb2))


async def test_a_message_over_the_limit_is_refused_unread(tmp_path):
    door = replace(DOOR, max_request_bytes=100_000)
    async with besieged(tmp_path, grpc=door) as siege, grpc.aio.insecure_channel(siege.running.target) as channel:
        (generate, *_) = methods(inference_pb2)
        for size in (100_001, 8_000_000):
            code, details = await ask(channel, generate, [b"\x0a" * size], timeout_s=5.0)
            assert code == "RESOURCE_EXHAUSTED"
            assert "100000" in details
        code, _ = await ask(channel, generate, [GENERATE.SerializeToString()], timeout_s=5.0)
        assert code == "OK"


async def test_workers_refuse_them_too():
    async with pools(Setup()) as workers:
        async with grpc.aio.insecure_channel(workers.prefill[0].address) as channel:
            await hostile_to_all(channel, methods(prefill_pb2))
        async with grpc.aio.insecure_channel(workers.decode[0].address) as channel:
            await hostile_to_all(channel, methods(decode_pb2, handoff_pb2, blocks_pb2))
        await workers.idle()


async def test_a_flood_at_a_worker_ends_nothing_that_runs():
    async with pools(Setup(step_s=0.005)) as workers:
        decoding, asked = Decoding(workers.decode[0]), request(24, 200)
        running = asyncio.create_task(disaggregated(workers, decoding, asked))
        for name in ("rapid reset of heads", "ping", "settings", "continuation", "half a message"):
            for worker in (workers.prefill[0], workers.decode[0]):
                await send(worker.server.port, FLOODS[name](), PREFACE + frame(SETTINGS))
        async with asyncio.timeout(20):
            answer = await running
        assert answer.token_ids == expected_tokens(asked, MODEL)
        await decoding.close()
        await workers.idle()
