"""What strangers may send to the gRPC door: bytes that are no HTTP/2, floods, messages that are none. Others notice nothing."""

import asyncio
import random
from dataclasses import replace

import grpc
from google.rpc import code_pb2

from contracts.pb.diptych.v1 import (
    blocks_pb2,
    decode_pb2,
    handoff_pb2,
    inference_pb2,
    prefill_pb2,
    registry_pb2,
    types_pb2,
)
from contracts.pb.diptych.v1 import inference_pb2 as pb
from engine.execution.fake import expected_tokens
from router.config import AdmissionConfig
from rpc.server import ServerConfig
from tests.integration.attacks_grpc import FLOODS, METADATA, call_once, head, hear, nonsense, send
from tests.integration.hostile import hostile_message
from tests.integration.http2_frames import (
    DATA,
    END_STREAM,
    PING,
    PREFACE,
    SETTINGS,
    connected,
    frame,
)
from tests.integration.pools import MODEL, Decoding, Setup, disaggregated, pools, request
from tests.integration.siege import GENERATE, MEMORY_MIB, besieged, memory_mib

DOOR = ServerConfig(port=0)
SMALL_DOOR = replace(DOOR, max_connections=24, hello_s=1.0, stall_s=1.0, idle_s=1.0)


async def flood(port, name):
    await asyncio.gather(*(send(port, FLOODS[name](), PREFACE + frame(SETTINGS)) for _ in range(2)))


async def test_a_flood_harms_nobody_else(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege:
        for name in FLOODS:
            await siege.attack(flood, siege.grpc, name)
            await siege.good()
            assert memory_mib() - siege.memory < MEMORY_MIB, name


async def send_nonsense(port):
    for _, data in nonsense():
        await send(port, data)


async def test_what_is_no_http2_harms_nobody(tmp_path):
    async with besieged(tmp_path, grpc=DOOR) as siege:
        await siege.attack(send_nonsense, siege.grpc)


async def test_bytes_that_come_one_by_one_are_not_waited_for(tmp_path):
    async with besieged(tmp_path, grpc=SMALL_DOOR) as siege:

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
    async with besieged(tmp_path, grpc=replace(SMALL_DOOR, idle_s=60.0)) as siege:
        channel = grpc.aio.insecure_channel(siege.running.target)
        await channel.channel_ready()
        silent = [await asyncio.open_connection("127.0.0.1", siege.grpc) for _ in range(60)]
        assert await call_once(channel) is grpc.StatusCode.OK, "whoever is connected"
        async with asyncio.timeout(10):
            for reader, writer in silent:
                await reader.read()  # the server has given them up
                writer.close()
        await channel.close()


LONG = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=(5, 6, 7)), sampling=types_pb2.SamplingParams(max_tokens=100, seed=3)
).SerializeToString()
SPOKEN = 200  # streams of each connection


async def open_streams(port, connections, number, folder):
    """Open them and say nothing; then ask on the last of them; then stay. Returns how many of those have ended.

    A server that has too many ends the oldest: the last of each connection come when all others of all connections are there.
    """
    ended = [set() for _ in range(connections)]
    read = [asyncio.Semaphore(0) for _ in range(connections)]
    last = range(2 * (number - SPOKEN) + 1, 2 * number, 2)
    first, heads = (b"".join(map(head, those)) for those in (range(1, last.start, 2), last))
    asks = b"".join(frame(DATA, END_STREAM, i, b"\x00" + len(LONG).to_bytes(4, "big") + LONG) for i in last)
    lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
    hearing = [asyncio.ensure_future(hear(*line, *more)) for line, *more in zip(lines, ended, read, strict=True)]

    async def say(data):
        for _, writer in lines:
            writer.write(data + frame(PING, payload=bytes(8)))
        await asyncio.gather(*(semaphore.acquire() for semaphore in read))

    await say(PREFACE + frame(SETTINGS) + first)
    for step, data in (("open", heads), ("asked", asks)):
        await say(data)
        (folder / step).touch()
        await there(folder / f"{step} seen")
    num_ended = sum(len(those.intersection(last)) for those in ended)
    for (_, writer), task in zip(lines, hearing, strict=True):
        writer.transport.abort()
        await task
    return num_ended


async def there(path, limit_s=60.0):
    async with asyncio.timeout(limit_s):
        while not path.exists():
            await asyncio.sleep(0.02)


async def test_ten_thousand_open_streams(tmp_path):
    """Of one key, held open: who has another key is served. Where they ask, ten run or wait and the rest is refused."""
    admission = AdmissionConfig(max_running=6, max_waiting=4)
    # Each open call takes some 20 KB; what ten thousand took, allocators keep.
    async with besieged(tmp_path, most_mib=400, grpc=DOOR, admission=admission) as siege:
        siege.running.cluster.step_s = 0.005  # answers that take a while: other streams come in meanwhile
        tasks = len(asyncio.all_tasks())
        attack = asyncio.ensure_future(siege.attack(open_streams, siege.grpc, 10, 1000, tmp_path))
        await there(tmp_path / "open")
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) < tasks + 4000:  # a crowd is held, the oldest beyond it are ended
                await asyncio.sleep(0.02)
        await siege.good()
        (tmp_path / "open seen").touch()
        await there(tmp_path / "asked")
        shed = 0.0
        async with asyncio.timeout(60):
            while shed < 9 * SPOKEN:
                await siege.good()
                reasons = ("full", "pushed_out")
                shed = sum([await siege.running.metric("diptych_shed_requests_total", reason=r) for r in reasons])
        (tmp_path / "asked seen").touch()
        assert await attack > 9 * SPOKEN


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
