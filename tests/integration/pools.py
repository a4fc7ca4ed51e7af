"""Whole pools in one event loop: real workers, real gRPC on loopback, a fake model in real KV memory, any connector.

`pools(...)` starts them, `Caller` is a router in miniature. At the end of each test every block must be back.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import grpc

from contracts import wire, wire_handoff
from contracts.clock import MonotonicClock
from contracts.kv_layout import AS_IT_IS, KVLayout
from contracts.pb.diptych.v1 import (
    blocks_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from contracts.request import ErrorInfo, FinishReason, GenerationRequest, TokenDelta
from contracts.sampling import SamplingParams
from contracts.worker import WorkerRef
from decode_service.main import DecodeDoor
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from engine.execution.interface import ModelRunner, SampledToken, ScheduledBatch
from engine.execution.kv_storage import kv_tensor
from kernels.dispatch import choose
from kernels.packing import Form
from kv_transfer.choose import NetworkConfig, make_connectors
from kv_transfer.config import SenderConfig
from kv_transfer.connector import Connector
from kv_transfer.digests import ThreadDigester
from kv_transfer.links import Side, staged
from kv_transfer.local import FaultPlan, LocalConnector, LocalHub, no_faults
from kv_transfer.region import SharedRegion
from kv_transfer.staging import DeviceMemory, HostDevice, StagingArea
from observability.worker_metrics import WorkerMetrics
from prefill_service.main import PrefillDoor
from prefill_service.run import RunConfig
from prefill_service.worker import PrefillWorker
from rpc.channel import open_channel
from rpc.server import RpcServer, ServerConfig
from worker.block_servicer import BlockEventsServicer
from worker.packed_memory import PackedMemory
from worker.process import measure

MODEL = FakeModel(max_model_len=512, eos_token_ids=frozenset({0}))
PATIENCE_S = 20.0
FAST_SENDER = SenderConfig(reserve_timeout_s=5.0, renew_every_s=0.5)
_ids = itertools.count(1)


@dataclass(frozen=True)
class Setup:
    """How the pools of a test are."""

    num_prefill: int = 1
    num_decode: int = 1
    connector: str = "local"
    model: FakeModel = MODEL
    decode_model: FakeModel | None = None
    prefill_blocks: int = 128
    decode_blocks: int = 128
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(max_num_batched_tokens=64))
    run: RunConfig = field(default_factory=lambda: RunConfig(FAST_SENDER, hold_s=10.0))
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    faults: FaultPlan = no_faults  # of the first prefill worker's local connector
    step_s: float = 0.0
    real: RealModel | None = None  # in place of the fake ones
    epoch: int = 1  # of all its workers
    server: ServerConfig = field(default_factory=ServerConfig)  # of each
    staging_slots: int = 0  # of each, between its connectors and KV memory that is "on a device"; 0: none
    transfer_dtype: str = (
        AS_IT_IS  # a narrow form passes through staging, too: as many slots as blocks if none are said
    )
    decode_transfer_dtype: str | None = None  # where it is another


@dataclass(frozen=True)
class RealModel:
    """A model that computes: its layout, and how to put it on KV memory."""

    layout: KVLayout
    runner: Callable[[int, memoryview], ModelRunner]  # (num_blocks, buffer)


@dataclass
class Served:
    """One worker and where it is reached."""

    ref: WorkerRef
    worker: PrefillWorker | DecodeWorker
    server: RpcServer
    channel: grpc.aio.Channel
    region: SharedRegion
    metrics: WorkerMetrics
    staging: StagingArea | None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def idle(self) -> None:
        """Wait until the engine has let go of everything, then check its books."""

        def check(engine: Engine) -> bool:
            engine.check_integrity()
            return not engine.has_work and engine.load().kv_usage == 0.0

        await until(lambda: self.worker.driver.call(check))
        if (area := self.staging) is not None:
            await until(lambda: area.num_free == area.num_slots)


@dataclass
class Pools:
    prefill: list[Served]
    decode: list[Served]

    def target(self, decode: Served | None = None, handoff_id: str | None = None) -> prefill_pb2.HandoffTarget:
        decode = decode or self.decode[0]
        return prefill_pb2.HandoffTarget(
            handoff_id=handoff_id or f"h-{next(_ids)}",
            decode=wire_handoff.worker_ref_to_pb(decode.ref),
            address=decode.address,
        )

    async def idle(self) -> None:
        for served in (*self.prefill, *self.decode):
            await served.idle()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition (a value, or an awaitable of one) to hold, at most PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.005)


def request(
    num_prompt: int,
    num_output: int,
    sampling: SamplingParams | None = None,
    *,
    salt: int | None = None,
    eos: bool = False,
) -> GenerationRequest:
    """A prompt like no other, unless the salt is given; only with `eos` may the answer end before num_output tokens."""
    number = next(_ids)
    salt = number if salt is None else salt
    prompt = tuple((salt * 31 + i * 7 + i * i % 13) % (MODEL.vocab_size - 1) + 1 for i in range(num_prompt))
    sampling = replace(sampling or SamplingParams(temperature=0.0), max_tokens=num_output, ignore_eos=not eos)
    return GenerationRequest(f"r-{number}", prompt, sampling)


@asynccontextmanager
async def pools(setup: Setup | None = None) -> AsyncIterator[Pools]:
    setup = setup or Setup()
    hub = LocalHub()
    async with AsyncExitStack() as stack:
        made = Pools([], [])
        for index in range(setup.num_decode):
            made.decode.append(await _decode(setup, index, hub, stack))
        for index in range(setup.num_prefill):
            made.prefill.append(await _prefill(setup, index, hub, stack))
        yield made
        for served in (*made.prefill, *made.decode):
            assert not served.worker.fatal.done(), served.worker.fatal.result()


async def _decode(setup: Setup, index: int, hub: LocalHub, stack: AsyncExitStack) -> Served:
    setup = replace(setup, transfer_dtype=setup.decode_transfer_dtype or setup.transfer_dtype)
    engine, connectors, region, area = _engine(
        setup, setup.decode_model or setup.model, setup.decode_blocks, (hub, stack)
    )
    ref = WorkerRef(f"decode-{index}", setup.epoch)
    layout = setup.real.layout if setup.real else (setup.decode_model or setup.model).layout
    side = _side(ref, layout.sent_as(setup.transfer_dtype), engine, (connectors, region, stack))
    side = side if area is None else staged(side, area, sends=False)
    return await _serve(DecodeDoor(setup.answers), side, engine, (setup, region, stack))


async def _prefill(setup: Setup, index: int, hub: LocalHub, stack: AsyncExitStack) -> Served:
    faults = setup.faults if index == 0 else no_faults
    engine, connectors, region, area = _engine(setup, setup.model, setup.prefill_blocks, (hub, stack), faults)
    ref = WorkerRef(f"prefill-{index}", setup.epoch)
    layout = setup.real.layout if setup.real else setup.model.layout
    side = _side(ref, layout.sent_as(setup.transfer_dtype), engine, (connectors, region, stack))
    side = side if area is None else staged(side, area, sends=True)
    return await _serve(PrefillDoor(setup.run), side, engine, (setup, region, stack))


def _engine(
    setup: Setup,
    model: FakeModel,
    num_blocks: int,
    around: tuple[LocalHub, AsyncExitStack],
    faults: FaultPlan = no_faults,
) -> tuple[Engine, list[Connector], SharedRegion, StagingArea | None]:
    hub, stack = around
    clock = MonotonicClock()
    layout = (setup.real.layout if setup.real else model.layout).sent_as(setup.transfer_dtype)
    region = SharedRegion((setup.staging_slots or num_blocks) * layout.sent_block_bytes)
    stack.callback(region.close)
    memory, area = region.buffer, None
    if setup.staging_slots or setup.transfer_dtype != AS_IT_IS:
        memory = memoryview(bytearray(b"\xff") * (num_blocks * layout.block_bytes))  # NaN wherever nothing was written
        area = StagingArea(_device(memory, region, layout, num_blocks), region, layout.sent_block_bytes)
        stack.callback(area.close)
    connectors: list[Connector]
    if setup.connector == "local":
        connectors = [LocalConnector(hub, clock, faults)]
    else:
        connectors = list(make_connectors((setup.connector,), NetworkConfig()))
    for connector in connectors:
        stack.push_async_callback(connector.close)
        connector.expose(region)
    runner: ModelRunner
    if setup.real is not None:
        runner = setup.real.runner(num_blocks, memory)
    else:
        runner = FakeRunner(model, num_blocks, memory, step_s=setup.step_s)
    return Engine(runner, EngineConfig(setup.scheduler), clock), connectors, region, area


def _device(memory: memoryview, region: SharedRegion, layout: KVLayout, num_blocks: int) -> DeviceMemory:
    if layout.transfer_dtype == AS_IT_IS:
        return HostDevice(memory, region.buffer)
    cache = kv_tensor(memory, layout, num_blocks)
    packing = choose("cpu", cache.dtype).packing(cache, cast("Form", layout.transfer_dtype))
    return PackedMemory(cache, packing, region.buffer, layout.sent_block_bytes)


def _side(
    ref: WorkerRef, layout: KVLayout, engine: Engine, memory: tuple[list[Connector], SharedRegion, AsyncExitStack]
) -> Side:
    connectors, region, stack = memory
    digester = ThreadDigester(region)
    stack.callback(digester.close)
    return Side(ref, layout, connectors, engine.clock, digester=digester)


async def _serve(
    door: PrefillDoor | DecodeDoor, side: Side, engine: Engine, around: tuple[Setup, SharedRegion, AsyncExitStack]
) -> Served:
    setup, region, stack = around
    server = RpcServer(setup.server, ())
    metrics = WorkerMetrics("tiny", door.kind.value)
    metrics.born(side.ref.epoch)
    layout, caching = side.layout, setup.scheduler.enable_prefix_caching
    metrics.aliases.describe(layout.block_size, len(region.buffer) // layout.block_bytes, caching, layout.dtype)
    worker = door.open(side, engine, server.grpc_server, metrics)
    measure(worker, engine, metrics)
    stack.push_async_callback(worker.stop)
    stack.push_async_callback(server.stop, 0)
    blocks_pb2_grpc.add_BlockEventsServicer_to_server(BlockEventsServicer(side.ref, worker.blocks), server.grpc_server)
    port = await server.start()
    worker.start()
    channel = open_channel(f"127.0.0.1:{port}")
    stack.push_async_callback(channel.close)
    return Served(side.ref, worker, server, channel, region, metrics, side.staging)


@contextmanager
def held(served: Served) -> Iterator[None]:
    """Until the block is left no step of this engine ends, once it has begun."""
    runner, gate = served.worker.driver._engine._runner, threading.Event()
    execute = runner.execute

    def wait_and_execute(batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        gate.wait(PATIENCE_S)
        return execute(batch)

    runner.execute = wait_and_execute  # type: ignore[method-assign]
    try:
        yield
    finally:
        gate.set()


class Decoding:
    """One decode session; deltas are sorted by request."""

    def __init__(self, served: Served) -> None:
        self._ref = wire_handoff.worker_ref_to_pb(served.ref)
        self.call = decode_pb2_grpc.DecodeStub(served.channel).Session()
        self._writing = asyncio.Lock()
        self.deltas: dict[str, list[TokenDelta]] = {}
        self._reading = asyncio.ensure_future(self._read())
        self._news = asyncio.Condition()
        self.error: grpc.aio.AioRpcError | None = None

    async def attach(self, handoff_id: str, wait_s: float = PATIENCE_S) -> None:
        attach = decode_pb2.Attach(handoff_id=handoff_id, wait_s=wait_s)
        await self._write(decode_pb2.DecodeCommand(decode=self._ref, attach=attach))

    async def generate(self, asked: GenerationRequest) -> None:
        generate = decode_pb2.GenerateAlone(request=wire.request_to_pb(asked))
        await self._write(decode_pb2.DecodeCommand(decode=self._ref, generate=generate))

    async def cancel(self, request_id: str) -> None:
        cancel = decode_pb2.Cancel(request_ids=[request_id])
        await self._write(decode_pb2.DecodeCommand(decode=self._ref, cancel=cancel))

    async def some(self, request_id: str, count: int) -> list[TokenDelta]:
        """The deltas of a request once there are `count` of them, or it ended."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(self._of(request_id)) >= count or self._ended(request_id))
        return self._of(request_id)

    async def whole(self, request_id: str) -> list[TokenDelta]:
        """All deltas of a request."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: self._ended(request_id) or self.error is not None)
        return self._of(request_id)

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.wait((self._reading,))

    async def _write(self, command: decode_pb2.DecodeCommand) -> None:
        async def write() -> None:
            async with self._writing:  # gRPC takes one write at a time
                await self.call.write(command)

        await asyncio.shield(asyncio.ensure_future(write()))  # a cancelled write would cancel the whole call

    def _of(self, request_id: str) -> list[TokenDelta]:
        return self.deltas.get(request_id, [])

    def _ended(self, request_id: str) -> bool:
        return any(delta.finish_reason is not None for delta in self._of(request_id))

    async def _read(self) -> None:
        try:
            async for batch in self.call:
                async with self._news:
                    for message in batch.deltas:
                        delta = wire.delta_from_pb(message)
                        self.deltas.setdefault(delta.request_id, []).append(delta)
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            async with self._news:
                self.error = error
                self._news.notify_all()


class Prefilling:
    """One request on a Prefill.Session of its own."""

    def __init__(self, served: Served) -> None:
        self._ref = wire_handoff.worker_ref_to_pb(served.ref)
        self._request_id = ""
        self._events: list[prefill_pb2.PrefillEvent] = []
        self.call = prefill_pb2_grpc.PrefillStub(served.channel).Session()

    async def run(self, asked: GenerationRequest, target: prefill_pb2.HandoffTarget) -> None:
        self._request_id = asked.request_id
        run = prefill_pb2.PrefillRun(request=wire.request_to_pb(asked), target=target)
        await self.call.write(prefill_pb2.PrefillCommand(prefill=self._ref, run=run))

    async def retarget(self, target: prefill_pb2.HandoffTarget) -> None:
        again = prefill_pb2.Retarget(request_id=self._request_id, target=target)
        await self.call.write(prefill_pb2.PrefillCommand(prefill=self._ref, retarget=again))

    async def event(self) -> prefill_pb2.PrefillEvent:
        while not self._events:
            async with asyncio.timeout(PATIENCE_S):
                batch = await self.call.read()
            assert isinstance(batch, prefill_pb2.PrefillBatch), "the session has ended"
            self._events.extend(batch.events)
        return self._events.pop(0)

    async def first(self) -> TokenDelta:
        event = await self.event()
        assert event.WhichOneof("event") == "tokens", event
        return wire.delta_from_pb(event.tokens)

    async def ended(self) -> None:
        """In good order."""
        event = await self.event()
        assert event.WhichOneof("event") == "ended", event
        assert not event.ended.HasField("error"), event
        self.call.cancel()

    async def refused(self) -> ErrorInfo:
        """Why it ended, whatever it said before."""
        while not (event := await self.event()).HasField("ended"):
            pass
        self.call.cancel()
        return wire.error_info_from_pb(event.ended.error)


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    deltas: tuple[TokenDelta, ...]
    handed_off: prefill_pb2.HandedOff | None


def joined(deltas: list[TokenDelta], handed_off: prefill_pb2.HandedOff | None = None) -> Answer:
    """The whole answer; the indices must have no gap."""
    token_ids: list[int] = []
    for delta in deltas:
        assert delta.error is None, delta.error
        assert delta.first_index == len(token_ids), "lost or doubled tokens"
        token_ids.extend(delta.token_ids)
    return Answer(tuple(token_ids), deltas[-1].finish_reason, tuple(deltas), handed_off)


async def disaggregated(
    made: Pools, decoding: Decoding, asked: GenerationRequest, prefill: int = 0, decode: int = 0
) -> Answer:
    """One request through both pools, as a router drives it."""
    target = made.target(made.decode[decode])
    prefilling = Prefilling(made.prefill[prefill])
    await decoding.attach(target.handoff_id)
    await prefilling.run(asked, target)
    first = await prefilling.first()
    if first.finish_reason is not None:
        await prefilling.ended()
        await decoding.cancel(target.handoff_id)
        return joined([first])
    event = await prefilling.event()
    assert event.WhichOneof("event") == "handed_off", event
    await prefilling.ended()
    rest = await decoding.whole(target.handoff_id)
    return joined([first, *rest], event.handed_off)
