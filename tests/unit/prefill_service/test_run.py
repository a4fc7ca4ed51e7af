"""One run on a prefill worker against a decode side that does what the test says: order of giving back, late news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from contracts.clock import MonotonicClock
from contracts.errors import Draining, InvalidRequest, Unavailable, UnknownHandoff
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, Target
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    CommitResponse,
    ConnectRequest,
    ConnectResponse,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
)
from contracts.worker import WorkerRef
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner, expected_tokens
from engine.kv.lease import LeaseError
from engine.output import Retained
from kv_transfer.connector import ByteRange
from kv_transfer.handoff import SourceStep, TargetStep
from kv_transfer.links import Side
from kv_transfer.local import LocalConnector, LocalHub, WriteFault
from kv_transfer.region import SharedRegion
from prefill_service.run import RunConfig
from prefill_service.worker import PrefillWorker

MODEL = FakeModel(max_model_len=256)
BLOCKS = 16
CHUNKED = EngineConfig(SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=16))
D = WorkerRef("d", 1)


class DecodeSide:
    """Grants the first blocks of its own region, and writes down what it is asked."""

    def __init__(self, hub: LocalHub) -> None:
        self.connector = LocalConnector(hub, MonotonicClock())
        self.connector.expose(SharedRegion(BLOCKS * MODEL.layout.block_bytes))
        self.tickets: list[Ticket] = []
        self.aborted: list[str] = []
        self.connecting, self.may_connect = asyncio.Event(), asyncio.Event()
        self.may_connect.set()
        self.reserving = asyncio.Event()
        self.may_reserve = asyncio.Event()
        self.may_reserve.set()

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        self.connecting.set()
        await self.may_connect.wait()
        return ConnectResponse(request.prefill, D, (self.connector.address(),))

    async def reserve(self, request: ReserveRequest) -> Grant:
        self.reserving.set()
        await self.may_reserve.wait()
        block_ids = tuple(range(MODEL.layout.num_blocks_for(request.num_tokens)))
        key = self.connector.open_window([ByteRange(0, len(block_ids) * MODEL.layout.block_bytes)])
        return Grant(request.handoff_id, request.prefill, D, block_ids, 0, 10.0, ((self.connector.address(), key),))

    async def commit(self, ticket: Ticket) -> CommitResponse:
        self.tickets.append(ticket)
        return CommitResponse(ticket.handoff_id, ticket.prefill, D, 1)

    async def abort(self, request: AbortRequest) -> AbortResponse:
        self.aborted.append(request.handoff_id)
        return AbortResponse(request.handoff_id, request.prefill, D)

    async def renew(self, request: RenewRequest) -> RenewResponse:
        return RenewResponse(request.prefill, D, (), 10.0)


class Peers:
    def __init__(self, side: DecodeSide) -> None:
        self.side = side
        self.asked: list[tuple[WorkerRef, str]] = []

    def peer(self, decode: WorkerRef, address: str) -> DecodeSide:
        self.asked.append((decode, address))
        return self.side

    async def close(self) -> None:
        return


class Gate:
    """A fault plan that lets writes through, or holds them inside the window for ever."""

    def __init__(self) -> None:
        self.stall_s = 0.0

    def __call__(self, index: int) -> WriteFault:
        return WriteFault(stall_s=self.stall_s)


class Bench:
    def __init__(self, hold_s: float = 10.0, step_s: float = 0.0) -> None:
        hub, self.gate = LocalHub(), Gate()
        self.side = DecodeSide(hub)
        self.peers = Peers(self.side)
        clock, region = MonotonicClock(), SharedRegion(BLOCKS * MODEL.layout.block_bytes)
        self.connector = LocalConnector(hub, clock, self.gate)
        self.connector.expose(region)
        self.engine = Engine(FakeRunner(MODEL, BLOCKS, region.buffer, step_s=step_s), CHUNKED, clock)
        self.steps: list[SourceStep | TargetStep] = []
        side = Side(WorkerRef("p", 1), MODEL.layout, [self.connector], clock, self.steps.append)
        self.worker = PrefillWorker(side, self.engine, self.peers, RunConfig(hold_s=hold_s))
        self.targets: asyncio.Queue[Target | None] = asyncio.Queue()

    async def usage(self) -> float:
        def look(engine: Engine) -> float:
            engine.check_integrity()
            return engine.load().kv_usage

        return await self.worker.driver.call(look)


@asynccontextmanager
async def bench(hold_s: float = 10.0, step_s: float = 0.0) -> AsyncIterator[Bench]:
    made = Bench(hold_s, step_s)
    made.worker.start()
    yield made
    assert await made.usage() == 0.0
    await made.worker.stop()
    assert not made.worker.fatal.done()


def asked(max_tokens: int = 5, name: str = "r") -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(name, tuple(range(1, 41)), sampling)


TARGET = Target("h", D, "d:1")


async def test_the_ticket_is_all_that_decode_needs() -> None:
    async with bench() as made:
        events = [event async for event in made.worker.run(asked(), TARGET, made.targets)]
        first, done = events
        assert isinstance(first, FirstTokens)
        assert isinstance(done, HandedOff)
        (ticket,) = made.side.tickets
        assert ticket.request.output_token_ids == first.delta.token_ids == expected_tokens(asked(), MODEL)[:1]
        assert (ticket.request.request_id, ticket.num_computed_tokens) == ("h", 40)
        assert made.peers.asked == [(D, "d:1")]
        assert made.side.aborted == []


async def test_a_request_for_one_token_asks_nobody_for_room() -> None:
    async with bench() as made:
        events = [event async for event in made.worker.run(asked(max_tokens=1), TARGET, made.targets)]
        assert len(events) == 1
        assert made.peers.asked == []


async def test_the_lease_goes_back_only_after_the_write_that_reads_it() -> None:
    async with bench() as made:
        made.gate.stall_s = 0.2
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        waiting = asyncio.ensure_future(anext(events))
        while not made.connector._copies:
            await asyncio.sleep(0)
        (copy,) = made.connector._copies
        order: list[str] = []
        copy.add_done_callback(lambda _: order.append("write over"))
        release = made.engine.release
        made.engine.release = lambda lease: (order.append("released"), release(lease))[1]  # type: ignore[method-assign]
        waiting.cancel()
        await asyncio.wait((waiting,))
        await events.aclose()
        assert order == ["write over", "released"]


async def test_a_prompt_whose_reader_left_is_not_read_to_its_end() -> None:
    async with bench(step_s=0.02) as made:
        long = GenerationRequest("r", tuple(i % 90 + 1 for i in range(240)), SamplingParams(max_tokens=5))
        reading = asyncio.ensure_future(anext(made.worker.run(long, TARGET, made.targets)))
        await made.side.reserving.wait()
        reading.cancel()
        await asyncio.wait((reading,))
        assert await made.usage() == 0.0
        assert made.worker.driver.num_steps < 10  # of 15 chunks


async def test_leaving_before_room_was_granted_tells_the_decode_side() -> None:
    async with bench() as made:
        made.side.may_reserve.clear()
        async with aclosing(made.worker.run(asked(), TARGET, made.targets)) as events:
            assert isinstance(await anext(events), FirstTokens)
            await made.side.reserving.wait()
        await made.worker.links.close()
        assert made.side.aborted == ["h"]


async def test_kv_that_comes_after_its_reader_left_goes_back() -> None:
    async with bench() as made:
        events = made.worker.run(asked(), TARGET, made.targets)
        driver, news = made.worker.driver, made.worker._take_retained_or_release
        arrived: asyncio.Future[Retained] = asyncio.get_running_loop().create_future()
        made.worker._take_retained_or_release = arrived.set_result  # type: ignore[method-assign]
        reading = asyncio.ensure_future(anext(events))
        retained = await arrived
        reading.cancel()
        await asyncio.wait((reading,))
        await events.aclose()
        assert await made.usage() > 0
        news(retained)
        await driver.call(lambda engine: None)


@pytest.mark.parametrize("answer", ["nothing", None])
async def test_what_nobody_retargets_is_given_back(answer: str | None) -> None:
    async with bench(hold_s=0.01 if answer else 10.0) as made:
        made.side.connector._buffer = None  # writes will fail
        seen = []
        if answer is None:
            made.targets.put_nowait(None)
        with pytest.raises(UnknownHandoff):
            async for event in made.worker.run(asked(), TARGET, made.targets):
                seen.append(event)
        assert isinstance(seen[-1], HandoffFailed)


async def test_an_id_that_is_here_and_a_worker_that_is_not_ready_refuse() -> None:
    async with bench() as made:
        made.side.may_reserve.clear()
        async with aclosing(made.worker.run(asked(), TARGET, made.targets)) as events:
            await anext(events)
            with pytest.raises(InvalidRequest, match="request_id"):
                await anext(made.worker.run(asked(), Target("h2", D, "d:1"), made.targets))
            draining = asyncio.ensure_future(made.worker.drain(60.0))
            await asyncio.sleep(0)
            with pytest.raises(Draining, match="about to stop"):
                await anext(made.worker.run(asked(name="r2"), TARGET, made.targets))
            assert not draining.done()
        await draining


async def test_a_dead_engine_is_told_and_blocks_nobody() -> None:
    made = Bench()
    made.worker.start()
    made.worker.driver.post(lambda engine: 1 // 0)
    assert isinstance(await made.worker.fatal, ZeroDivisionError)
    with pytest.raises(Unavailable):
        await anext(made.worker.run(asked(), TARGET, made.targets))
    await made.worker.stop()


async def test_blocks_that_cannot_be_given_back_are_a_fault_that_is_told_also_when_nobody_waits_any_more() -> None:
    made = Bench()
    made.worker.start()
    made.side.may_reserve.clear()
    events = made.worker.run(asked(), TARGET, made.targets)
    assert isinstance(await anext(events), FirstTokens)
    waiting = asyncio.ensure_future(anext(events))
    await made.worker.driver.call(lambda engine: [engine.release(lease) for lease in engine._lent.leases()])
    waiting.cancel()
    await asyncio.sleep(0)
    waiting.cancel()  # while it gives back
    assert isinstance(await made.worker.fatal, LeaseError)
    await asyncio.wait((waiting,))
    await made.worker.stop()
