"""A decode worker in one event loop: requests alone, hand-offs adopted or refused, commands in any order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from contracts.clock import MonotonicClock
from contracts.errors import InvalidRequest, RequestCancelled, UnknownHandoff
from contracts.request import FinishReason, GenerationRequest, TokenDelta
from contracts.sampling import SamplingParams
from contracts.ticket import AbortRequest, ReserveRequest, Ticket
from contracts.worker import WorkerRef
from decode_service.outputs import RouterSession
from decode_service.pool import EnginePool
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner, expected_tokens
from kv_transfer.config import ReceiverConfig
from kv_transfer.links import Side
from kv_transfer.local import LocalConnector, LocalHub
from kv_transfer.region import SharedRegion

MODEL = FakeModel(max_model_len=256)
BLOCKS = 16
P, D = WorkerRef("p", 1), WorkerRef("d", 1)


class Bench:
    def __init__(self, step_s: float = 0.0, max_remembered: int = 64) -> None:
        clock, region = MonotonicClock(), SharedRegion(BLOCKS * MODEL.layout.block_bytes)
        connector = LocalConnector(LocalHub(), clock)
        connector.expose(region)
        runner = FakeRunner(MODEL, BLOCKS, region.buffer, step_s=step_s, strict=False)
        self.engine = Engine(runner, EngineConfig(), clock)
        config = AnswerConfig(ReceiverConfig(max_remembered=max_remembered))
        self.worker = DecodeWorker(Side(D, MODEL.layout, [connector], clock), self.engine, config)
        self.desk = self.worker.desk
        self.session = self.desk.open_session()
        self.keys: dict[str, int] = {}  # of the windows that were granted, by hand-off

    async def read(self, session: RouterSession | None = None) -> list[TokenDelta]:
        """Everything until the session ends by itself."""
        session = session or self.session
        self.desk.finish_session(session)
        return [delta async for batch in session.items() for delta in batch]

    async def idle(self) -> bool:
        def look(engine: Engine) -> bool:
            engine.check_integrity()
            return not engine.has_work and engine.load().kv_usage == 0.0

        return await self.worker.driver.call(look)

    async def settled(self) -> None:
        """Until it is idle, far sooner than any lease runs out."""
        async with asyncio.timeout(2):
            while not await self.idle():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def bench(step_s: float = 0.0, max_remembered: int = 64) -> AsyncIterator[Bench]:
    made = Bench(step_s, max_remembered)
    made.worker.start()
    yield made
    assert await made.idle()
    await made.worker.stop()
    assert not made.worker.fatal.done()


def asked(name: str = "r", max_tokens: int = 5, output: tuple[int, ...] = ()) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(name, tuple(range(1, 41)), sampling, output)


async def test_alone() -> None:
    async with bench() as made:
        made.desk.generate(made.session, asked())
        deltas = await made.read()
        assert tuple(t for delta in deltas for t in delta.token_ids) == expected_tokens(asked(), MODEL)


async def test_a_request_that_is_cancelled_before_its_turn_never_runs() -> None:
    async with bench(step_s=0.01) as made:
        made.desk.generate(made.session, asked(max_tokens=200))
        made.desk.cancel(made.session, "r")
        assert [delta.finish_reason for delta in await made.read()] == [FinishReason.ABORT]
        assert await made.idle()


async def test_a_refusal_is_the_only_delta() -> None:
    async with bench() as made:
        made.desk.generate(made.session, asked(max_tokens=5000))
        (delta,) = await made.read()
        assert delta.error is not None
        assert delta.error.message.startswith("max_tokens")


async def reserved(made: Bench, handoff_id: str) -> None:
    grant = await made.worker.receiver.reserve(ReserveRequest(handoff_id, P, D, 40, ()))
    assert len(grant.block_ids) == 3
    made.keys[handoff_id] = grant.windows[0][1]


def ticket(made: Bench, handoff_id: str, output: tuple[int, ...], max_tokens: int = 5) -> Ticket:
    return Ticket(handoff_id, P, D, MODEL.layout, asked(handoff_id, max_tokens, output), 40, 0, made.keys[handoff_id])


async def test_an_adopted_hand_off_streams_from_its_second_token() -> None:
    async with bench() as made:
        made.desk.attach(made.session, "h", 10)
        await reserved(made, "h")
        assert (await made.worker.receiver.commit(ticket(made, "h", (7,)))).num_blocks == 3
        deltas = await made.read()
        assert [delta.first_index for delta in deltas] == [1, 2, 3, 4]


async def test_an_adopted_hand_off_gets_no_room_again_however_late_its_reserve_comes() -> None:
    async with bench(step_s=0.01, max_remembered=1) as made:
        made.desk.attach(made.session, "h", 10)
        await reserved(made, "h")
        await made.worker.receiver.commit(ticket(made, "h", (7,)))
        await made.worker.receiver.abort(AbortRequest("other", P, D, "its end is remembered in place of h's"))
        with pytest.raises(UnknownHandoff, match="adopted already"):
            await reserved(made, "h")
        deltas = await made.read()
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_ticket_that_the_engine_refuses_gives_its_blocks_back_and_tells_its_reader() -> None:
    async with bench() as made:
        made.desk.attach(made.session, "h", 10)
        await reserved(made, "h")
        with pytest.raises(InvalidRequest):
            await made.worker.receiver.commit(ticket(made, "h", (7,), max_tokens=1))
        (delta,) = await made.read()
        assert delta.finish_reason is FinishReason.ERROR


async def test_kv_of_a_hand_off_that_was_cancelled_meanwhile_is_freed() -> None:
    async with bench() as made:
        made.desk.attach(made.session, "h", 10)
        await reserved(made, "h")
        made.desk.cancel(made.session, "h")
        with pytest.raises(RequestCancelled):
            await made.worker.receiver.commit(ticket(made, "h", (7,)))
        assert [delta.finish_reason for delta in await made.read()] == [FinishReason.ABORT]
        await made.settled()


@pytest.mark.parametrize("leaves", ["cancel", "session"])
async def test_a_hand_off_that_its_reader_gives_up_does_not_keep_its_blocks_until_the_lease_runs_out(
    leaves: str,
) -> None:
    """Its prefill worker may be dead: then nobody else says so."""
    async with bench() as made:
        made.desk.attach(made.session, "h", 10)
        await reserved(made, "h")
        if leaves == "cancel":
            made.desk.cancel(made.session, "h")
        else:
            made.desk.close_session(made.session)
        await made.settled()
        with pytest.raises(UnknownHandoff):
            await reserved(made, "h")


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_hand_off_that_its_reader_gave_up_gets_no_room(meanwhile: bool) -> None:
    async with bench() as made:
        made.desk.attach(made.session, "h", 10)
        asking = asyncio.ensure_future(reserved(made, "h")) if meanwhile else None
        for _ in range(3):
            await asyncio.sleep(0)
        made.desk.cancel(made.session, "h")
        with pytest.raises(UnknownHandoff, match="not awaited any more"):
            await (asking or reserved(made, "h"))


async def test_a_lease_that_nobody_waits_for_goes_back() -> None:
    async with bench() as made:
        pool = EnginePool(made.worker.driver, made.worker._book)
        waiting = asyncio.ensure_future(pool.reserve("h", 40, ()))
        await asyncio.sleep(0)
        reserved = threading.Event()
        made.worker.driver.post(lambda engine: reserved.set())
        reserved.wait(10)  # the engine has reserved, the event loop has not heard of it
        waiting.cancel()
        await asyncio.wait((waiting,))
        await asyncio.sleep(0)


async def test_stopping_ends_every_session() -> None:
    made = Bench(step_s=0.01)
    made.worker.start()
    made.desk.generate(made.session, asked(max_tokens=200))
    await asyncio.sleep(0)
    await made.worker.stop()
    assert made.session.closed
    await made.worker.stop()


async def test_a_drain_does_not_go_well_when_the_receivers_does_not() -> None:
    async with bench() as made:

        async def broken(patience_s: float) -> None:
            raise RuntimeError(f"within {patience_s}")

        made.worker.receiver.drain = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"within 0\.1"):
            await made.worker.drain(0.1)
