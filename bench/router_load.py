"""The load client for a router alone: many streams at little cost of its own, over SSE, over gRPC, or past the router.

    RouterPlan ──(a process of its own: `python -m bench router-client`)──▶ RouterAnswer per request

A closed loop of `concurrency` requests, or with `rate` an open one, in which requests are sent at random (exponential) times
whether the ones before have ended or not. DIRECT asks the prefill worker itself, by a call for each prompt as a user's is at the
router, and ends with its first token: what a router adds is the difference. Bytes are kept and understood when all have come.
Does not know what is measured with it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import msgspec

from bench.http2 import Http2Connection, Stream, connect
from bench.load import LoadFailed, SseEvent
from bench.router_requests import PLAIN, Asked, Manner, grpc_messages, http_requests, metadata
from contracts.pb.diptych.v1 import inference_pb2, prefill_pb2, types_pb2

_GENERATE = "/diptych.v1.Inference/Generate"
_SESSION = "/diptych.v1.Prefill/Session"
_CONNECTIONS = 8  # that gRPC's streams share
_DEADLINE_S = 240.0
_EVENT = b"data: "
_CHUNKED_END = b"0\r\n\r\n"


class Door(StrEnum):
    """Where requests go in."""

    SSE = "sse"
    GRPC = "grpc"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """`num_requests` times the prompt `text` in one manner, each answered with `max_tokens`, to host:port.

    `rate` is requests per second, None for a closed loop, which sends nothing new after `stop_after_s`. DIRECT needs the
    worker's `ref` (id, epoch).
    """

    door: Door
    host: str
    port: int
    text: str
    max_tokens: int
    num_requests: int
    concurrency: int
    rate: float | None = None
    stop_after_s: float | None = None
    ref: tuple[str, int] = ("", 0)
    seed: int = 0
    manner: Manner = PLAIN

    @property
    def asked(self) -> Asked:
        """What all its requests have."""
        return Asked(self.host, self.text, self.max_tokens, self.manner)


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """One request: when it was sent, when something of it came (monotonic seconds), in how many messages, how many tokens."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    num_messages: int
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        """Sent to the first bytes of the answer."""
        return self.arrivals_s[0] - self.sent_s


Ask = Callable[[], Awaitable[RouterAnswer]]


def run_router_load(plan: RouterPlan) -> tuple[RouterAnswer, ...]:
    """Carry out `plan` in a process of its own. Raises LoadFailed."""
    return RunningLoad(plan).answers()


class RunningLoad:
    """A client process at work, whose answers go to a file: they are megabytes. Owns both until `answers`."""

    def __init__(self, plan: RouterPlan) -> None:
        self._out, self._said = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `answers`
        command = [sys.executable, "-m", "bench", "router-client"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._out, stderr=self._said)
        assert self._child.stdin is not None
        with self._child.stdin as pipe:
            pipe.write(msgspec.json.encode(plan))

    def answers(self) -> tuple[RouterAnswer, ...]:
        """Wait for them. Raises LoadFailed."""
        with self._out, self._said:
            if self._child.wait() != 0:
                self._said.seek(0)
                raise LoadFailed(self._said.read().decode("utf-8", "replace").strip()[-2000:])
            self._out.seek(0)
            return msgspec.json.decode(self._out.read(), type=tuple[RouterAnswer, ...])


def router_client_main() -> None:
    """The client process: a plan on stdin, answers on stdout."""
    import uvloop

    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=RouterPlan)
    answers = uvloop.run(carry_out(plan))
    sys.stdout.buffer.write(msgspec.json.encode(answers))


async def carry_out(plan: RouterPlan) -> tuple[RouterAnswer, ...]:
    """Carry out `plan` in this process. Raises LoadFailed, also when it takes longer than a few minutes."""
    try:
        async with asyncio.timeout(_DEADLINE_S), _asker(plan) as ask:
            return await (_closed(plan, ask) if plan.rate is None else _open(plan, plan.rate, ask))
    except TimeoutError as error:
        raise LoadFailed(f"{plan.door}: not done after {_DEADLINE_S:g} s") from error
    except OSError as error:
        raise LoadFailed(f"{plan.door}: {error}") from error


async def _closed(plan: RouterPlan, ask: Ask) -> tuple[RouterAnswer, ...]:
    answers: list[RouterAnswer] = []
    left = iter(range(plan.num_requests))

    stop_at = None if plan.stop_after_s is None else time.monotonic() + plan.stop_after_s

    async def work() -> None:
        for _ in left:
            if stop_at is not None and time.monotonic() > stop_at:
                return
            answers.append(await ask())

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(work())
    return tuple(answers)


async def _open(plan: RouterPlan, rate: float, ask: Ask) -> tuple[RouterAnswer, ...]:
    rng = random.Random(plan.seed)
    at = time.monotonic()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for _ in range(plan.num_requests):
            at += rng.expovariate(rate)
            await asyncio.sleep(at - time.monotonic())
            tasks.append(group.create_task(_one(ask)))
    return tuple(task.result() for task in tasks)


async def _one(ask: Ask) -> RouterAnswer:
    return await ask()


@asynccontextmanager
async def _asker(plan: RouterPlan) -> AsyncIterator[Ask]:
    """What sends one request of the plan, over connections that are there already."""
    if plan.door is Door.SSE:
        doors = _SseDoors(plan)
        yield doors.ask
        doors.close()
        return
    tls = None if plan.door is Door.DIRECT else plan.manner.context("h2")
    connections = [await connect(plan.host, plan.port, tls) for _ in range(_CONNECTIONS)]
    turn = itertools.count(plan.manner.first)
    direct, messages = _run_message(plan), grpc_messages(plan.asked)

    def ask() -> Awaitable[RouterAnswer]:
        number = next(turn)
        connection = connections[number % _CONNECTIONS]
        if plan.door is Door.DIRECT:
            return _ask_direct(connection, direct)
        stream = connection.call(_GENERATE, messages(number), metadata=metadata(plan.asked, number))
        return _ask_grpc(stream, plan)

    yield ask
    for connection in connections:
        connection.close()


async def _ask_grpc(stream: Stream, plan: RouterPlan) -> RouterAnswer:
    await stream.ended
    pieces = [inference_pb2.GenerateResponse.FromString(raw) for raw in stream.messages()]
    if not pieces or not pieces[-1].HasField("usage"):
        raise LoadFailed("gRPC: an answer ended without its last piece; the router's log says why")
    return _checked(stream, len(pieces), sum(len(piece.token_ids) for piece in pieces), plan)


def _run_message(plan: RouterPlan) -> bytes:
    """A prompt of as many tokens as the text has words: the fake worker does not look at it."""
    request = types_pb2.Request(
        request_id="direct",
        prompt_token_ids=range(300, 300 + len(plan.text.split())),
        sampling=types_pb2.SamplingParams(max_tokens=1),
    )
    target = prefill_pb2.HandoffTarget(handoff_id="direct", address="nobody:1")
    ref = types_pb2.WorkerRef(worker_id=plan.ref[0], epoch=plan.ref[1])
    run = prefill_pb2.PrefillRun(request=request, target=target)
    return prefill_pb2.PrefillCommand(prefill=ref, run=run).SerializeToString()


async def _ask_direct(connection: Http2Connection, message: bytes) -> RouterAnswer:
    stream = connection.call(_SESSION, message)
    await stream.ended
    events = [event for raw in stream.messages() for event in prefill_pb2.PrefillBatch.FromString(raw).events]
    if [event.WhichOneof("event") for event in events] != ["tokens", "ended"]:
        raise LoadFailed("the prefill worker did not answer with a token")
    return RouterAnswer(stream.sent_s, tuple(stream.arrivals_s), 1, 1)


def _checked(stream: Stream, num_messages: int, num_tokens: int, plan: RouterPlan) -> RouterAnswer:
    if num_tokens != plan.max_tokens:
        raise LoadFailed(f"{plan.door}: asked for {plan.max_tokens} tokens, got {num_tokens}")
    return RouterAnswer(stream.sent_s, tuple(stream.arrivals_s), num_messages, num_tokens)


class _SseDoors:
    """Keep-alive connections, each for one answer at a time; as many as are needed at once."""

    def __init__(self, plan: RouterPlan) -> None:
        self._plan = plan
        self._free: list[_SseConnection] = []
        self._turn = itertools.count(plan.manner.first)
        self._requests = http_requests(plan.asked)
        self._tls = plan.manner.context("http/1.1")

    async def ask(self) -> RouterAnswer:
        number, manner = next(self._turn), self._plan.manner
        connection = self._free.pop() if self._free else await self._connect()
        stream = connection.send(self._requests(number))
        if manner.left(number):
            await connection.leave()
            return _unheard(stream)
        await stream.ended
        if manner.refused(number):
            connection.transport.close()
            return _refused(stream)
        self._free.append(connection)
        return _sse_answer(stream, self._plan)

    def close(self) -> None:
        for connection in self._free:
            connection.transport.close()

    async def _connect(self) -> _SseConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_SseConnection, self._plan.host, self._plan.port, ssl=self._tls)
        return connection


class _SseConnection(asyncio.Protocol):
    transport: asyncio.Transport
    _stream: Stream | None = None

    def send(self, request: bytes) -> Stream:
        self._stream = Stream(time.monotonic(), asyncio.get_running_loop().create_future())
        self.transport.write(request)
        return self._stream

    async def leave(self) -> None:
        """Hear the first of the answer, and go."""
        assert self._stream is not None
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(stream: Stream) -> None:
            stream.on_data = None
            heard.set_result(None)

        self._stream.on_data = hear
        await heard
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        assert stream is not None, "nothing was asked"
        if stream.arrivals_s or _EVENT in data:  # a head that goes ahead is no token
            stream.arrivals_s.append(time.monotonic())
        stream.parts.append(data)
        if stream.on_data is not None:
            stream.on_data(stream)
        if data.endswith(_CHUNKED_END) or not stream.parts[0].startswith(b"HTTP/1.1 200"):
            self._end(stream)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._stream is not None:
            self._end(self._stream)

    def _end(self, stream: Stream) -> None:
        if not stream.ended.done():
            stream.ended.set_result(None)


def _unheard(stream: Stream) -> RouterAnswer:
    return RouterAnswer(stream.sent_s, tuple(stream.arrivals_s), 0, 0)


def _refused(stream: Stream) -> RouterAnswer:
    if not stream.parts or not stream.parts[0].startswith(b"HTTP/1.1 400"):
        raise LoadFailed(f"sse: what is wrong was not refused: {b''.join(stream.parts)[:200]!r}")
    return _unheard(stream)


def _sse_answer(stream: Stream, plan: RouterPlan) -> RouterAnswer:
    whole = b"".join(stream.parts)
    if not whole.startswith(b"HTTP/1.1 200") or not whole.endswith(_CHUNKED_END):
        raise LoadFailed(f"sse: {whole[-500:].decode('utf-8', 'replace')}")
    *chunks, last, done = [line[6:] for line in whole.split(b"\n") if line.startswith(b"data: ")]
    usage = msgspec.json.decode(last, type=SseEvent).usage
    if done != b"[DONE]" or usage is None:
        raise LoadFailed(f"sse: an answer ended with {last[:500].decode('utf-8', 'replace')}")
    return _checked(stream, len(chunks), usage.completion_tokens, plan)
