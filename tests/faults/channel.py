"""gRPC without gRPC: channels whose calls reach servicers in the same event loop, as bytes, over the wire.

    stub ── message → bytes ──▶ Wire ──▶ bytes → message ── ErrorInterceptor ──▶ servicer
         ◀─ AioRpcError or bytes → message ── Wire ◀── status or bytes ──

Stubs, serialisers, the interceptor and the translation of errors are the real ones; what is not there is HTTP/2. A call that
its caller gives up is cancelled at the server one latency later. A process that has died neither sends nor hears anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from grpc.aio import Metadata

from rpc.channel import ChannelOpener
from tests.faults.messages import EDGES, apart, edge_of, ids_of
from tests.faults.network import Network
from tests.faults.process import Aborted, Context, Process, unavailable
from tests.faults.wire import Crossing, Edge, Verdict


class _Lost(Exception):
    """A message that will never arrive."""


def opener(network: Network, source: Process) -> ChannelOpener:
    """For what runs in this process."""
    return lambda address, config=None: InProcessChannel(network, source, address)


class InProcessChannel(grpc.aio.Channel):
    """From one process to an address, whoever is there."""

    def __init__(self, network: Network, source: Process, address: str) -> None:
        self.network, self.source, self.address = network, source, address
        self.calls: dict[_Call, None] = {}
        self._state = grpc.ChannelConnectivity.IDLE
        self._changed = asyncio.Event()
        self._connecting: asyncio.Task | None = None
        network.channels[self] = None

    @property
    def closed(self) -> bool:
        return self._state is grpc.ChannelConnectivity.SHUTDOWN

    def unary_unary(self, method, request_serializer=None, response_deserializer=None, _registered_method=False):
        codec = _Codec(method, request_serializer, response_deserializer)

        def call(request, *, timeout=None, **_):
            made = _Unary(self, codec)
            return self.network.spawn(made.run(request, timeout))

        return call

    def stream_stream(self, method, request_serializer=None, response_deserializer=None, _registered_method=False):
        codec = _Codec(method, request_serializer, response_deserializer)
        return lambda requests: _Stream(self, codec, requests)

    def unary_stream(self, method, *codecs, **options):
        """Stubs make one for each method of a service, such as Health's Watch; our processes call none between them."""

        def call(request, **_):
            raise NotImplementedError(f"{method}: no process of ours calls it")

        return call

    stream_unary = unary_stream

    async def close(self, grace=None) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self.network.channels.pop(self, None)
        self._become(grpc.ChannelConnectivity.SHUTDOWN)
        for call in list(self.calls):
            call.snap()

    def get_state(self, try_to_connect=False):
        if try_to_connect and self._state is grpc.ChannelConnectivity.IDLE:
            self._become(grpc.ChannelConnectivity.CONNECTING)
            self._connecting = self.network.spawn(self._connect())
        return self._state

    async def wait_for_state_change(self, last_observed_state) -> None:
        while self._state is last_observed_state:
            await self._changed.wait()

    def broke(self) -> None:
        """Its connection, if it had one."""
        if self._state is grpc.ChannelConnectivity.READY:
            self._become(grpc.ChannelConnectivity.IDLE)

    def _become(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _connect(self) -> None:
        await self.network.clock.sleep(self.network.wire.latency_s())
        await self.channel_ready()
        self._become(grpc.ChannelConnectivity.READY)

    async def channel_ready(self) -> None:
        while True:
            if self.closed:
                raise grpc.aio.UsageError("Channel is closed.")
            if self.source.alive and self.network.find(self.address) is not None:
                return
            await self.network.clock.sleep(0.05)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc) -> None:
        await self.close()


@dataclass(frozen=True)
class _Codec:
    path: str
    encode: Callable
    decode: Callable

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class _Call:
    """What both kinds of call share: who speaks to whom, and the end that comes from outside."""

    def __init__(self, channel: InProcessChannel, codec: _Codec) -> None:
        if channel.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        self.channel, self.codec = channel, codec
        self.network, self.wire = channel.network, channel.network.wire
        self.source, self.target = channel.source, channel.network.find(channel.address)
        self.network.calls[self] = None
        channel.calls[self] = None

    def over(self) -> None:
        self.network.calls.pop(self, None)
        self.channel.calls.pop(self, None)

    def snap(self) -> None:
        raise NotImplementedError

    def crossing(self, edge: Edge, ids: tuple[str, ...], streamed: bool, is_answer: bool) -> Crossing:
        assert self.target is not None
        ends = (self.source.name, self.target.name)
        return Crossing(edge, *(reversed(ends) if is_answer else ends), ids, streamed, is_answer)


class _Unary(_Call):
    def __init__(self, channel: InProcessChannel, codec: _Codec) -> None:
        super().__init__(channel, codec)
        self._outcome: asyncio.Future = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._transit: asyncio.Task | None = None
        self._late = False  # a fault holds the message back: it arrives although its caller has gone

    async def run(self, request, timeout):
        """The answer, an AioRpcError, or cancellation by the caller."""
        try:
            if not self.source.alive or self.target is None:
                await self.network.clock.sleep(self.wire.latency_s())
                raise unavailable("connection refused")
            self._transit = self.network.spawn(self._carry(request))
            async with asyncio.timeout(timeout):
                return self.codec.decode(await self._outcome)
        except TimeoutError as error:
            self._give_up()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), "Deadline Exceeded"
            ) from error
        except asyncio.CancelledError:
            self._give_up()
            raise
        finally:
            self.over()

    def snap(self) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(unavailable("connection lost"))
        if self._transit is not None:
            self._transit.cancel()

    def _give_up(self) -> None:
        async def reset() -> None:
            await self.network.clock.sleep(self.wire.latency_s())
            if self._transit is not None and not self._late:
                self._transit.cancel()

        self.network.spawn(reset())

    async def _carry(self, request) -> None:
        asked, answered = EDGES[self.codec.name]
        ids = ids_of(request)
        try:
            raw = await self._pass(self.crossing(asked, ids, False, False), lambda: self._served(request))
            await self._pass(self.crossing(answered, ids, False, True), lambda: _value(None))
        except (Aborted, grpc.aio.AioRpcError) as error:
            await self.network.clock.sleep(self.wire.latency_s())
            if not self._outcome.done():
                self._outcome.set_exception(error.error if isinstance(error, Aborted) else error)
        except _Lost:
            return  # its caller waits, until it does not any more
        else:
            if not self._outcome.done():
                self._outcome.set_result(raw)

    async def _pass(self, crossing: Crossing, deliver):
        assert self.target is not None
        fault = self.wire.meet(crossing)
        self._late = fault is not None
        match await self.wire.cross(crossing, fault):
            case Verdict.LOSE:
                raise _Lost
            case Verdict.BREAK_CALL:
                raise unavailable("reset by a fault")
            case Verdict.TWICE:
                self.network.spawn(self._again(deliver))
        self._late = False
        return await deliver()

    async def _again(self, deliver) -> None:
        await self.network.clock.sleep(20 * self.wire.latency_s())
        await deliver()

    async def _served(self, request) -> bytes:
        assert self.target is not None
        handler = await self.target.handler(self.codec.path)
        if not self.target.alive:
            raise unavailable("connection lost")
        answer = await handler.stream_unary(None, Context(lambda message: None, self.codec.encode(request)))
        if self.codec.name == "Reserve" and answer.HasField("grant"):
            self.network.keys.update({window.key: ids_of(request) for window in answer.grant.windows})
        return handler.response_serializer(answer)


async def _value(value):
    return value


class _Stream(_Call):
    """Commands go in, events come out, each in order. What its caller does with it is what our legs do: read, and cancel."""

    def __init__(self, channel: InProcessChannel, codec: _Codec, requests: AsyncIterator) -> None:
        super().__init__(channel, codec)
        self._requests = requests
        self._commands: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_server: asyncio.Queue[object | None] = asyncio.Queue()
        self._to_client: asyncio.Queue[object | None] = asyncio.Queue()
        self._events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._ended = False
        spawn = self.network.spawn
        if not self.source.alive or self.target is None:
            self._fail(unavailable("connection refused"))
            self._parts: list[asyncio.Task] = []
            self._serving: asyncio.Task | None = None
            return
        self._serving = spawn(self._serve())
        self._parts = [spawn(self._pump()), spawn(self._carry(False)), spawn(self._carry(True))]

    def __aiter__(self):
        return self._read()

    async def _read(self):
        while True:
            event = await self._events.get()
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            yield self.codec.decode(event)

    def cancel(self) -> None:
        """By the caller."""
        self._end(None)

    def snap(self) -> None:
        self._end(unavailable("connection lost"))

    def _end(self, error: Exception | None) -> None:
        if self._ended:
            return
        if error is not None:
            self._fail(error)
        self._ended = True
        self.over()
        for part in self._parts:
            part.cancel()
        if self._serving is not None and not self._serving.done():
            self.network.spawn(self._reset(self._serving))

    async def _reset(self, serving: asyncio.Task) -> None:
        """The server hears of the end: its commands end, and its call is cancelled, not always in the same instant."""
        await self.network.clock.sleep(self.wire.latency_s())
        self._commands.put_nowait(None)
        if self.wire.latency_s() > 0.0005:
            await self.network.clock.sleep(0.0001)
        serving.cancel()

    def _fail(self, error: Exception) -> None:
        self._events.put_nowait(error)

    async def _pump(self) -> None:
        async for request in self._requests:
            self.network.note(request)
            self._to_server.put_nowait(request)
        self._to_server.put_nowait(None)

    async def _carry(self, to_client: bool) -> None:
        """One direction, in order."""
        queue = self._to_client if to_client else self._to_server
        while (message := await queue.get()) is not None:
            if isinstance(message, Exception):
                await self.network.clock.sleep(self.wire.latency_s())
                self._end(message)
                return
            for part in apart(message):
                await self._take(part, to_client)
                if self._ended:
                    return
        await self.network.clock.sleep(self.wire.latency_s())
        if to_client:
            self._events.put_nowait(None)
            self._end(None)
        else:
            self._commands.put_nowait(None)

    async def _take(self, message, to_client: bool) -> None:
        crossing = self.crossing(edge_of(message), ids_of(message), True, to_client)
        verdict = await self.wire.cross(crossing, self.wire.meet(crossing))
        if verdict in (Verdict.PASS, Verdict.PASS_THEN_BREAK):
            self._arrive(message, to_client)
        if verdict is Verdict.BREAK_LINK:
            assert self.target is not None
            self.network.cut(self.source, self.target)
        elif verdict is not Verdict.PASS:
            self._end(unavailable("reset by a fault"))

    def _arrive(self, message, to_client: bool) -> None:
        if to_client:
            self._events.put_nowait(message.SerializeToString())
        else:
            self._commands.put_nowait(self.codec.encode(message))

    async def _serve(self) -> None:
        assert self.target is not None
        handler = await self.target.handler(self.codec.path)
        try:
            await handler.stream_stream(_Commands(self._commands), Context(self._to_client.put_nowait))
        except Aborted as error:
            self._to_client.put_nowait(error.error)
        else:
            self._to_client.put_nowait(None)


class _Commands:
    def __init__(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queue = queue
        self._over = False

    def __aiter__(self):
        return self

    async def __anext__(self) -> bytes:
        raw = None if self._over else await self._queue.get()
        if raw is None:
            self._over = True
            raise StopAsyncIteration
        return raw
