"""A worker announces itself through whatever the router does, and logs only changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from contracts.clock import VirtualClock, settle
from contracts.errors import DiptychError, StaleEpoch, Unavailable, WorkerLost
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import registry_pb2, registry_pb2_grpc
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from rpc.announce import AnnounceConfig, Announcer, GrpcRegistryClient
from rpc.server import RpcServer, ServerConfig

INFO = WorkerInfo(
    ref=WorkerRef("prefill-0", 11),
    kind=WorkerKind.PREFILL,
    address="127.0.0.1:1",
    model_name="tiny",
    layout=KVLayout("tiny", "float32", 1, 1, 4, 4),
    connectors=("shm", "tcp"),
    max_model_len=64,
    num_blocks=8,
)


class Recorder:
    """A registry in this process that can be away."""

    def __init__(self) -> None:
        self.away = False
        self.refusal: DiptychError = Unavailable("away")
        self.loads: list[WorkerLoad] = []
        self.attempts = 0
        self.left: list[WorkerRef] = []
        self.closed = False

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        self.attempts += 1
        if self.away:
            raise self.refusal
        self.loads.append(load)
        return 3.0

    async def leave(self, ref: WorkerRef) -> int:
        if self.away:
            raise Unavailable("away")
        self.left.append(ref)
        return 3

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def running(recorder: Recorder, clock: VirtualClock, load: WorkerLoad) -> AsyncIterator[Announcer]:
    announcer = Announcer(recorder, INFO, lambda: load, clock, AnnounceConfig(1.0, 0.25, 1.0))
    task = asyncio.create_task(announcer.run())
    await settle()
    yield announcer
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_one_sign_of_life_per_interval() -> None:
    recorder, clock = Recorder(), VirtualClock()
    async with running(recorder, clock, WorkerLoad(num_running=3)):
        assert recorder.loads == [WorkerLoad(num_running=3)]
        await clock.advance(3.0)
        assert len(recorder.loads) == 4


async def test_a_word_that_is_wanted_soon_is_said_now() -> None:
    recorder, clock = Recorder(), VirtualClock()
    async with running(recorder, clock, WorkerLoad()) as announcer:
        announcer.soon()
        announcer.soon()
        await settle()
        assert len(recorder.loads) == 2
        recorder.away = True
        announcer.soon()
        await settle()
        recorder.away = False
        announcer.soon()
        await settle()
        assert len(recorder.loads) == 3, "also while it backs off"
        await clock.advance(0.9)
        assert len(recorder.loads) == 3
        await clock.advance(0.1)
        assert len(recorder.loads) == 4


async def test_a_word_that_is_wanted_while_one_is_on_its_way_is_another_one() -> None:
    class Slow(Recorder):
        async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
            ttl_s = await super().announce(info, load)
            await clock.sleep(0.5)
            return ttl_s

    recorder, clock = Slow(), VirtualClock()
    async with running(recorder, clock, WorkerLoad()) as announcer:
        announcer.soon()
        await clock.advance(0.5)
        assert len(recorder.loads) == 2


async def test_absence_is_survived_with_back_off_and_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recorder, clock = Recorder(), VirtualClock()
    recorder.away = True
    async with running(recorder, clock, WorkerLoad()):
        await clock.advance(0.25 + 0.5 + 1.0 + 1.0)
        assert recorder.attempts == 5
        recorder.away = False
        await clock.advance(3.0)
        recorder.away = True
        await clock.advance(3.0)
        recorder.refusal = StaleEpoch("prefill-0", 12, 11)
        await clock.advance(3.0)
    away = "registry does not take us; going on and trying again"
    assert [r.getMessage() for r in caplog.records] == [away, "announced", away, away]


@pytest.mark.parametrize("away", [False, True])
async def test_farewell_is_best_effort_and_closes(away: bool) -> None:
    recorder = Recorder()
    recorder.away = away
    num_others = await Announcer(recorder, INFO, WorkerLoad, VirtualClock()).leave()
    assert num_others == (0 if away else 3)
    assert recorder.left == ([] if away else [INFO.ref])
    assert recorder.closed


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    def __init__(self) -> None:
        self.heard: list[registry_pb2.AnnounceRequest | registry_pb2.LeaveRequest] = []

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: object) -> registry_pb2.AnnounceResponse:
        self.heard.append(request)
        return registry_pb2.AnnounceResponse(ttl_s=5)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: object) -> registry_pb2.LeaveResponse:
        self.heard.append(request)
        return registry_pb2.LeaveResponse(num_others=2)


async def test_over_grpc() -> None:
    servicer = RegistryServicer()
    server = RpcServer(ServerConfig(), ())
    registry_pb2_grpc.add_RegistryServicer_to_server(servicer, server.grpc_server)
    client = GrpcRegistryClient(f"127.0.0.1:{await server.start()}")
    assert await client.announce(INFO, WorkerLoad(kv_usage=0.5)) == 5
    assert await client.leave(INFO.ref) == 2
    await server.stop(0)
    with pytest.raises(WorkerLost):
        await client.announce(INFO, WorkerLoad())
    with pytest.raises(WorkerLost):
        await client.leave(INFO.ref)
    await client.close()
    announced, left = servicer.heard
    assert isinstance(announced, registry_pb2.AnnounceRequest)
    assert (announced.info.ref.worker_id, announced.load.kv_usage) == ("prefill-0", 0.5)
    assert isinstance(left, registry_pb2.LeaveRequest)
    assert left.ref.epoch == 11
