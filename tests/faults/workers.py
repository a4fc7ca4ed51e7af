"""Workers of the world: the real ones on a fake model, small memory and little patience, with a connector that meets the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import decode_pb2_grpc, handoff_pb2_grpc, prefill_pb2_grpc
from contracts.worker import ConnectorAddress, WorkerInfo, WorkerKind, WorkerRef
from decode_service.decode_servicer import DecodeServicer
from decode_service.handoff_servicer import HandoffServicer
from decode_service.outputs import OutputConfig
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from engine.inline import inline
from engine.output import StepOutput
from kv_transfer.config import Integrity, ReceiverConfig, SenderConfig
from kv_transfer.connector import Write
from kv_transfer.digests import InlineDigester
from kv_transfer.links import Side
from kv_transfer.local import Delivery, LocalConnector, LocalHub, WriteFault
from prefill_service.peer import GrpcPeer, PeerPool
from prefill_service.run import RunConfig
from prefill_service.servicer import PrefillServicer
from prefill_service.worker import PrefillWorker
from rpc.announce import AnnounceConfig, Announcer, GrpcRegistryClient
from tests.faults.channel import opener
from tests.faults.network import Network
from tests.faults.process import Process
from tests.faults.wire import Crossing, Edge, Fault, Kind

MODEL = FakeModel(
    KVLayout("fake", "float32", 2, 1, 2, 16), vocab_size=1024, max_model_len=512, eos_token_ids=frozenset({0})
)
MODEL_NAME = "tiny"
SENDER = SenderConfig(
    reserve_timeout_s=2.0,
    call_timeout_s=0.5,
    commit_timeout_s=2.0,
    write_timeout_s=1.0,
    renew_every_s=0.04,
    integrity=Integrity.FULL,
)
ANSWERS = AnswerConfig(
    receiver=ReceiverConfig(lease_s=0.5, sweep_every_s=0.1, integrity=Integrity.FULL),
    outputs=OutputConfig(claim_wait_s=1.0, lost_memory_s=20.0),
)
ANNOUNCE = AnnounceConfig(interval_s=0.25, min_backoff_s=0.1, max_backoff_s=0.5)


def step_time_of(num_tokens: int) -> float:
    """Seconds: a decode step of 4 ms, a full chunk of 64 tokens of 23."""
    return 0.004 + 0.0003 * num_tokens


def step_time(output: StepOutput) -> float:
    """Of an engine's step."""
    return step_time_of(output.num_scheduled_tokens) if output.num_scheduled_tokens else 0.0


class Memory:
    """KV memory that no other process can map."""

    fd = None

    def __init__(self, num_bytes: int) -> None:
        self.buffer = memoryview(bytearray(num_bytes))


class WiredConnector(LocalConnector):
    """A local connector whose writes meet the wire."""

    def __init__(self, hub: LocalHub, owner: str, network: Network) -> None:
        self._planned = WriteFault()
        super().__init__(hub, network.clock, lambda index: self._planned)
        self._owner = owner
        self._network = network

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        network, wire = self._network, self._network.wire
        crossing = Crossing(Edge.WRITE, self._owner, network.connectors[address], network.keys.get(key, ()), False)
        fault = wire.meet(crossing)
        half = sum(write.length for write in writes) // 2
        self._planned = WriteFault(stall_s=wire.latency_s(), landed_bytes=half)
        if network.failing_writes > 0:
            network.failing_writes -= 1
            self._planned = WriteFault(Delivery.FAIL, landed_bytes=half)
        if fault is not None:
            await self._meet(fault, crossing, half)
        if fault is not None and fault.kind is Kind.DUPLICATE:
            self._network.spawn(self._again(address, key, writes))
        await super().write(address, key, writes)

    async def _meet(self, fault: Fault, crossing: Crossing, half: int) -> None:
        wire = self._network.wire
        match fault.kind:
            case Kind.DROP:
                self._planned = WriteFault(Delivery.DROP)
            case Kind.ERROR:
                delivery = (Delivery.FAIL, Delivery.CORRUPT, Delivery.LOSE)[fault.seed % 3]
                self._planned = WriteFault(delivery, landed_bytes=half, flipped_bit=fault.seed * 7919)
            case Kind.DELAY:
                self._planned = WriteFault(delay_s=fault.delay_s)
            case Kind.REORDER:
                self._planned = WriteFault(stall_s=fault.delay_s, landed_bytes=half)
            case Kind.RESTART:
                assert wire.surgeon is not None
                wire.surgeon.restart(crossing.source if fault.seed % 2 else crossing.target)
            case Kind.DUPLICATE:
                pass
            case _:
                await wire.apply(fault, crossing)

    async def _again(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """The same bytes once more, from memory that is perhaps another request's by now: lands in its own window or nowhere."""
        await self._clock.sleep(0.02)
        await super().write(address, key, writes)


@dataclass
class Life:
    """One life of one worker."""

    ref: WorkerRef
    kind: WorkerKind
    process: Process
    worker: PrefillWorker | DecodeWorker
    engine: Engine
    connector: WiredConnector
    num_blocks: int
    announcing: asyncio.Task[None]


@dataclass(frozen=True)
class Place:
    """Where workers live."""

    network: Network
    hub: LocalHub


def launch(place: Place, ref: WorkerRef, kind: WorkerKind, num_blocks: int) -> Life:
    """A worker begins to live: it serves, and announces itself to the router until it is told to stop."""
    network, clock = place.network, place.network.clock
    memory = Memory(num_blocks * MODEL.layout.block_bytes)
    connector = WiredConnector(place.hub, ref.worker_id, network)
    connector.expose(memory)
    network.connectors[connector.address()] = ref.worker_id
    runner = FakeRunner(MODEL, num_blocks, memory.buffer)
    engine = Engine(runner, EngineConfig(SchedulerConfig(max_num_batched_tokens=64)), clock)
    side = Side(ref, MODEL.layout, (connector,), clock, digester=InlineDigester(memory))
    process = Process(ref.worker_id, f"{ref.worker_id}:1")
    worker = _decode(side, engine, process) if kind is WorkerKind.DECODE else _prefill(side, engine, process, network)
    network.join(process)
    worker.start()
    info = WorkerInfo(ref, kind, process.address, MODEL_NAME, MODEL.layout, ("local",), MODEL.max_model_len, num_blocks)
    client = GrpcRegistryClient("router:1", 0.5, opener(network, process))
    announcing = asyncio.ensure_future(Announcer(client, info, worker.load, clock, ANNOUNCE).run())
    return Life(ref, kind, process, worker, engine, connector, num_blocks, announcing)


def _decode(side: Side, engine: Engine, process: Process) -> DecodeWorker:
    worker = DecodeWorker(side, engine, ANSWERS, inline(step_time))
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker.desk), process)
    handoff_pb2_grpc.add_HandoffServicer_to_server(HandoffServicer(worker.receiver), process)
    return worker


def _prefill(side: Side, engine: Engine, process: Process, network: Network) -> PrefillWorker:
    reach = opener(network, process)
    peers = PeerPool(network.clock, lambda ref, address: GrpcPeer(ref, address, reach), grace_s=1.0)
    worker = PrefillWorker(side, engine, peers, RunConfig(SENDER, hold_s=2.0), inline(step_time))
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker), process)
    return worker


def held(life: Life) -> list[str]:
    """What a worker holds for requests, in words."""
    life.engine.check_integrity()
    assert not life.worker.fatal.done(), life.worker.fatal.result()
    left = []
    usage = life.engine.load().kv_usage
    if life.engine.has_work or usage:
        left.append(f"engine works or holds {usage:.3f} of its blocks")
    if life.connector.writable():
        left.append("a window is open")
    if isinstance(life.worker, PrefillWorker):
        if life.worker._runs:
            left.append(f"runs {list(life.worker._runs)}")
        if life.worker._settling:
            left.append("runs settle")
    else:
        if counts := dict(life.worker.receiver.counts()):
            left.append(f"hand-offs {counts}")
        if life.worker.receiver._asking:
            left.append("reserves")
        if life.worker._book.num_open:
            left.append(f"answers {list(life.worker._book._answers)}")
    return left
