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
from types import SimpleNamespace

import grpc
from grpc.aio import Metadata

from contracts.clock import VirtualClock
from contracts.errors import DiptychError
from contracts.worker import ConnectorAddress
from rpc.server import ErrorInterceptor
from tests.faults.wire import Crossing, Edge, Verdict, Wire

_EDGES = {
    "Announce": (Edge.ANNOUNCE, Edge.ANNOUNCED),
    "Connect": (Edge.CONNECT, Edge.CONNECTED),
    "Reserve": (Edge.RESERVE, Edge.GRANT),
    "Commit": (Edge.COMMIT, Edge.COMMITTED),
    "Renew": (Edge.RENEW, Edge.RENEWED),
    "Abort": (Edge.ABORT, Edge.ABORTED),
    "run": Edge.RUN,
    "retarget": Edge.RETARGET,
    "tokens": Edge.FIRST_TOKEN,
    "handed_off": Edge.HANDED_OFF,
    "handoff_failed": Edge.HANDOFF_FAILED,
    "attach": Edge.ATTACH,
    "generate": Edge.GENERATE,
    "cancel": Edge.CANCEL,
}


class Process:
    """One life of a router or worker: a name, an address, and the methods it serves. Stands in for grpc.aio.Server."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.alive = True
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers) -> None:
        """What a stub generator calls; the registered handlers are the same."""

    def add_registered_method_handlers(self, service: str, handlers) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def handler(self, path: str) -> grpc.RpcMethodHandler:
        """With the interceptor that a real server has."""

        async def found(details) -> grpc.RpcMethodHandler:
            return self._handlers[path]

        handler = await ErrorInterceptor(60.0).intercept_service(found, SimpleNamespace(method=path))
        assert handler is not None
        return handler


class Aborted(Exception):
    """What a servicer's `context.abort` raises."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing) -> None:
        super().__init__(details)
        self.error = grpc.aio.AioRpcError(code, Metadata(), Metadata(*trailing), details)


class _Lost(Exception):
    """A message that will never arrive."""


class _Context:
    """As much of a ServicerContext as our servicers and the interceptor use."""

    def __init__(self, write: Callable[[object], None]) -> None:
        self._write = write

    async def write(self, message) -> None:
        self._write(message)

    async def abort(self, code, details="", trailing_metadata=()) -> None:
        raise Aborted(code, details, trailing_metadata)


class Network:
    """Who is at which address, and every call under way."""

    def __init__(self, clock: VirtualClock, wire: Wire) -> None:
        self.clock = clock
        self.wire = wire
        self._at: dict[str, Process] = {}
        self._calls: dict[_Call, None] = {}  # an ordered set: one seed, one history
        self._tasks: set[asyncio.Task] = set()
        self.channels: dict[InProcessChannel, None] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}  # hand-off or request id → the prompt that it is for
        self.keys: dict[int, tuple[str, ...]] = {}  # window key → the hand-off that it was granted to
        self.failing_writes = 0
        self.connectors: dict[ConnectorAddress, str] = {}  # whose memory it is

    def note(self, command, before: str) -> None:
        """Remember what the ids of a command stand for; `before` is the hand-off that its stream was about so far."""
        match command.WhichOneof("command"):
            case "run":
                prompt = tuple(command.run.request.prompt_token_ids)
                self.prompts[command.run.target.handoff_id] = prompt
                self.prompts[command.run.request.request_id] = prompt
            case "generate":
                asked = command.generate.request
                self.prompts[asked.request_id] = tuple(asked.prompt_token_ids)
            case "retarget":
                self.prompts[command.retarget.handoff_id] = self.prompts[before]

    def join(self, process: Process) -> None:
        """It is reached at its address from now on."""
        self._at[process.address] = process

    def kill(self, process: Process) -> None:
        """It is gone: its calls, in and out, break."""
        process.alive = False
        del self._at[process.address]
        for call in [c for c in self._calls if process in (c.source, c.target)]:
            call.snap()
        for channel in [c for c in self.channels if process is c.source or process.address == c.address]:
            channel.broke()

    def cut(self, one: Process, other: Process) -> None:
        """The connection between two processes breaks, with every call on it."""
        for call in [c for c in self._calls if {c.source, c.target} == {one, other}]:
            call.snap()
        ends = {(one.name, other.address), (other.name, one.address)}
        for channel in [c for c in self.channels if (c.source.name, c.address) in ends]:
            channel.broke()

    def find(self, address: str) -> Process | None:
        return self._at.get(address)

    def opener(self, source: Process):
        """A ChannelOpener for what runs in this process."""
        return lambda address, config=None: InProcessChannel(self, source, address)

    def spawn(self, work) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._heard)
        return task

    @staticmethod
    def _heard(ended: asyncio.Task) -> None:
        """A call's error is its caller's; any other is a fault of this file or of the world, which must not go unheard."""
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, (Aborted, grpc.aio.AioRpcError, DiptychError)):
            context = {"message": "a message's way failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    @property
    def num_calls(self) -> int:
        """Under way."""
        return len(self._calls)

    async def quiet(self) -> None:
        """Wait for what is still on its way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def unavailable(why: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), why)


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

    def unary_stream(self, *args, **kwargs):
        raise NotImplementedError("no service of the workers has such a method")

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
        self.network._calls[self] = None
        channel.calls[self] = None

    def over(self) -> None:
        self.network._calls.pop(self, None)
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
        asked, answered = _EDGES[self.codec.name]
        ids = _ids(request)
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
        answer = await handler.unary_unary(self.codec.encode(request), _Context(lambda message: None))
        if self.codec.name == "Reserve" and answer.HasField("grant"):
            self.network.keys.update({window.key: _ids(request) for window in answer.grant.windows})
        return handler.response_serializer(answer)


async def _value(value):
    return value


class _Stream(_Call):
    """Commands go in, events come out, each in order. What its caller does with it is what our legs do: read, and cancel."""

    def __init__(self, channel: InProcessChannel, codec: _Codec, requests: AsyncIterator) -> None:
        super().__init__(channel, codec)
        self._requests = requests
        self._ids: tuple[str, ...] = ()
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
            self.network.note(request, self._ids[0] if self._ids else "")
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
            name = message.WhichOneof("event" if to_client else "command") if self._names(to_client) else ""
            self._ids = _ids(message) or self._ids
            crossing = self.crossing(_EDGES.get(name, Edge.DELTAS), self._ids, True, to_client)
            verdict = await self.wire.cross(crossing, self.wire.meet(crossing))
            if verdict in (Verdict.PASS, Verdict.PASS_THEN_BREAK):
                self._arrive(message, to_client)
            if verdict is Verdict.BREAK_LINK:
                assert self.target is not None
                self.network.cut(self.source, self.target)
            elif verdict is not Verdict.PASS:
                self._end(unavailable("reset by a fault"))
        await self.network.clock.sleep(self.wire.latency_s())
        if to_client:
            self._events.put_nowait(None)
            self._end(None)
        else:
            self._commands.put_nowait(None)

    def _names(self, to_client: bool) -> bool:
        return not (to_client and self.codec.name == "Session")

    def _arrive(self, message, to_client: bool) -> None:
        if to_client:
            self._events.put_nowait(message.SerializeToString())
        else:
            self._commands.put_nowait(self.codec.encode(message))

    async def _serve(self) -> None:
        assert self.target is not None
        handler = await self.target.handler(self.codec.path)
        try:
            await handler.stream_stream(_Commands(self._commands), _Context(self._to_client.put_nowait))
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


def _ids(message) -> tuple[str, ...]:
    """The hand-offs or requests that a message is about."""
    kind = type(message).__name__
    match kind:
        case "PrefillCommand":
            part = message.run.target if message.HasField("run") else message.retarget
            return (part.handoff_id,)
        case "DecodeCommand":
            which = message.WhichOneof("command")
            if which == "attach":
                return (message.attach.handoff_id,)
            return (message.generate.request.request_id if which == "generate" else message.cancel.request_id,)
        case "DecodeBatch":
            return tuple(delta.request_id for delta in message.deltas)
        case "ReserveRequest" | "AbortRequest":
            return (message.handoff_id,)
        case "CommitRequest":
            return (message.ticket.handoff_id,)
        case "RenewRequest":
            return tuple(message.handoff_ids)
        case _:
            return ()
