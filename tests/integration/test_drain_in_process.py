"""A worker that is told to drain, with a request in every state it can be in: it ends here or goes on elsewhere, whole.

Two pools in one loop; the second worker of each is where things go on. Afterwards every block is back and the drain is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from contracts.request import FinishReason, GenerationRequest, TokenDelta
from contracts.sampling import SamplingParams
from contracts.worker import WorkerState
from decode_service.outputs import AnswerState
from engine.execution.fake import expected_tokens
from kv_transfer.config import SenderConfig
from kv_transfer.handoff import TargetState
from kv_transfer.local import Delivery, WriteFault
from prefill_service.run import RunConfig
from tests.integration.pools import (
    MODEL,
    PATIENCE_S,
    Decoding,
    Pools,
    Prefilling,
    Served,
    Setup,
    disaggregated,
    joined,
    pools,
    request,
    until,
)

SEEDED = SamplingParams(temperature=1.0, seed=11)
SLOW = Setup(num_prefill=2, num_decode=2, step_s=0.01)


@dataclass
class Stage:
    """Two pools, a session with each decode worker, and the drain of the first worker of one pool."""

    made: Pools
    here: Decoding
    there: Decoding
    draining: asyncio.Task[None] | None = None

    def drain(self, served: Served, patience_s: float) -> None:
        self.draining = asyncio.ensure_future(served.worker.drain(patience_s))

    async def drained(self) -> None:
        assert self.draining is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.draining

    async def goes_on(self, asked: GenerationRequest, so_far: tuple[int, ...]) -> None:
        """The rest of an answer over the other two workers: together they are the answer that was asked for."""
        rest = replace(asked, request_id=f"{asked.request_id}-again", output_token_ids=so_far)
        target, prefilling = self.made.target(self.made.decode[1]), Prefilling(self.made.prefill[1])
        await self.there.attach(target.handoff_id)
        await prefilling.run(rest, target)
        deltas = [await prefilling.first()]
        if deltas[0].finish_reason is None:
            deltas += await self.there.whole(target.handoff_id)
        token_ids = [token for delta in deltas for token in delta.token_ids]
        assert (*so_far, *token_ids) == expected_tokens(asked, MODEL)


@asynccontextmanager
async def stage(setup: Setup = SLOW) -> AsyncIterator[Stage]:
    async with pools(setup) as made:
        on = Stage(made, Decoding(made.decode[0]), Decoding(made.decode[1]))
        yield on
        await on.drained()
        await on.here.close()
        await on.there.close()
        await made.idle()


def sent_away(deltas: list[TokenDelta]) -> tuple[int, ...]:
    """The tokens of an answer that ended as Draining and in no other way."""
    *tokens, last = deltas
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error.draining
    assert all(delta.error is None and delta.finish_reason is None for delta in tokens)
    return tuple(token for delta in tokens for token in delta.token_ids)


async def test_who_waits_for_a_hand_off_that_has_no_room_yet_is_told_at_once() -> None:
    async with stage() as on:
        await on.here.attach("queued elsewhere")
        await until(lambda: on.made.decode[0].worker._book.num_open)
        on.drain(on.made.decode[0], 60.0)
        assert sent_away(await on.here.whole("queued elsewhere")) == ()
        await on.drained()
        assert on.here.error is None, "the session ends in good order"
        late, asked = Decoding(on.made.decode[0]), request(5, 5)
        await late.attach("chosen before the farewell was heard")
        await late.generate(asked)
        assert sent_away(await late.whole("chosen before the farewell was heard")) == ()
        assert sent_away(await late.whole(asked.request_id)) == ()
        await late.close()


async def test_who_comes_while_others_are_still_here_is_refused_and_goes_elsewhere() -> None:
    async with stage() as on:
        staying, late = request(5, 60, SEEDED), request(5, 5)
        await on.here.generate(staying)
        await on.here.some(staying.request_id, 1)
        on.drain(on.made.decode[0], 60.0)
        await until(lambda: on.made.decode[0].worker.load().state is WorkerState.DRAINING)
        await on.here.attach("late")
        await on.here.generate(late)
        assert sent_away(await on.here.whole("late")) == ()
        assert sent_away(await on.here.whole(late.request_id)) == ()
        target, prefilling = on.made.target(handoff_id="h-late"), Prefilling(on.made.prefill[0])
        await prefilling.run(late, target)
        first = await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        assert failed.error.draining, failed
        again = on.made.target(on.made.decode[1])
        await prefilling.retarget(again)
        await on.there.attach(again.handoff_id)
        assert joined([first, *await on.there.whole(again.handoff_id)]).token_ids == expected_tokens(late, MODEL)
        assert joined(await on.here.whole(staying.request_id)).token_ids == expected_tokens(staying, MODEL)


@pytest.mark.parametrize("alone", [False, True])
async def test_an_answer_that_ends_in_time_ends_here(alone: bool) -> None:
    async with stage(replace(SLOW, faults=lambda index: WriteFault(delay_s=0.2))) as on:
        asked = request(30, 30, SEEDED)
        if alone:
            await on.here.generate(asked)
            await on.here.some(asked.request_id, 2)
            on.drain(on.made.decode[0], 60.0)
            answer = joined(await on.here.whole(asked.request_id))
        else:
            answering = asyncio.create_task(disaggregated(on.made, on.here, asked))
            await until(lambda: on.made.decode[0].worker.receiver.counts())
            on.drain(on.made.decode[0], 60.0)
            answer = await answering
        assert answer.token_ids == expected_tokens(asked, MODEL)


@pytest.mark.parametrize("patience_s", [0.0, 0.2])
@pytest.mark.parametrize("alone", [False, True])
async def test_an_answer_that_does_not_is_sent_away_and_goes_on_where_it_was(alone: bool, patience_s: float) -> None:
    async with stage() as on:
        asked = request(30, 120, SEEDED)
        before: tuple[int, ...] = ()
        if alone:
            name = asked.request_id
            await on.here.generate(asked)
        else:
            target, prefilling = on.made.target(), Prefilling(on.made.prefill[0])
            name = target.handoff_id
            await on.here.attach(name)
            await prefilling.run(asked, target)
            before = (await prefilling.first()).token_ids
        await on.here.some(name, 3)
        on.drain(on.made.decode[0], patience_s)
        so_far = (*before, *sent_away(await on.here.whole(name)))
        await on.drained()
        assert 3 <= len(so_far) < 120
        await on.goes_on(asked, so_far)


async def test_a_request_that_was_not_admitted_yet_is_sent_away_too() -> None:
    async with stage() as on:
        desk, session = on.made.decode[0].worker.desk, on.made.decode[0].worker.desk.open_session()
        asked = request(5, 50)
        desk.generate(session, asked)
        on.drain(on.made.decode[0], 0.0)
        deltas = [delta async for batch in session.items() for delta in batch]
        assert sent_away(deltas) == ()
        desk.close_session(session)


@pytest.mark.parametrize("state", [TargetState.RESERVED, TargetState.RECEIVING])
async def test_a_hand_off_that_does_not_end_in_time_costs_a_second_push(state: TargetState) -> None:
    stalls = iter([0.6])
    setup = replace(
        SLOW,
        faults=lambda index: WriteFault(stall_s=next(stalls, 0.0)),
        run=RunConfig(
            SenderConfig(renew_every_s=0.1, write_timeout_s=0.3 if state is TargetState.RECEIVING else 5.0), 10.0
        ),
    )
    async with stage(setup) as on:
        worker = on.made.decode[0].worker
        asked, target, prefilling = request(40, 8), on.made.target(), Prefilling(on.made.prefill[0])
        await on.here.attach(target.handoff_id)
        await prefilling.run(asked, target)
        await until(lambda: worker.receiver.counts())
        on.drain(on.made.decode[0], 0.05)
        assert sent_away(await on.here.whole(target.handoff_id)) == ()
        first = await prefilling.first()
        assert (await prefilling.event()).WhichOneof("event") == "handoff_failed"
        steps = on.made.prefill[0].worker.driver.num_steps
        again = on.made.target(on.made.decode[1])
        await prefilling.retarget(again)
        await on.there.attach(again.handoff_id)
        assert joined([first, *await on.there.whole(again.handoff_id)]).token_ids == expected_tokens(asked, MODEL)
        assert on.made.prefill[0].worker.driver.num_steps == steps, "the prompt was computed once"


async def test_an_answer_that_nobody_claimed_is_sent_away_when_somebody_does() -> None:
    async with stage() as on:
        worker = on.made.decode[0].worker
        asked, target, prefilling = request(20, 120), on.made.target(), Prefilling(on.made.prefill[0])
        await prefilling.run(asked, target)
        first = await prefilling.first()
        assert (await prefilling.event()).WhichOneof("event") == "handed_off"
        assert worker._book.state(target.handoff_id) is AnswerState.UNCLAIMED
        on.drain(on.made.decode[0], 0.05)
        await on.drained()
        late = Decoding(on.made.decode[0])
        await late.attach(target.handoff_id)
        assert sent_away(await late.whole(target.handoff_id)) == ()
        await late.close()
        await on.goes_on(asked, first.token_ids)


@pytest.mark.parametrize("where", ["queued", "computing", "waits for room", "sending", "holding"])
async def test_a_run_that_does_not_end_in_time_is_sent_away(where: str) -> None:
    setup = replace(SLOW, decode_blocks=8 if where == "waits for room" else 128)
    if where == "sending":
        setup = replace(setup, faults=lambda index: WriteFault(stall_s=0.5))
    if where == "holding":
        setup = replace(setup, faults=lambda index: WriteFault(Delivery.FAIL))
    async with stage(setup) as on:
        ahead = [Prefilling(on.made.prefill[0]) for _ in range(3 if where == "queued" else 0)]
        for prefilling in ahead:
            await prefilling.run(request(500, 2), on.made.target())
        hog = request(60, 60)
        if where == "waits for room":
            await on.here.generate(hog)
            await on.here.some(hog.request_id, 1)
        asked, target = request(300 if where == "computing" else 90, 5), on.made.target()
        prefilling = Prefilling(on.made.prefill[0])
        await prefilling.run(asked, target)
        if where in ("waits for room", "sending", "holding"):
            await prefilling.first()
        if where == "holding":
            assert (await prefilling.event()).WhichOneof("event") == "handoff_failed"
        await until(lambda: len(on.made.prefill[0].worker._runs) == 1 + len(ahead))
        on.drain(on.made.prefill[0], 0.02)
        assert (await prefilling.refused()).draining
        for one in ahead:
            assert (await one.refused()).draining
        await on.drained()
        refused = Prefilling(on.made.prefill[0])
        await refused.run(request(5, 5), on.made.target())
        assert (await refused.refused()).draining
        if where == "waits for room":
            await on.here.cancel(hog.request_id)
        await on.goes_on(asked, ())


async def test_a_run_that_ends_in_time_ends_here() -> None:
    async with stage() as on:
        asked = request(200, 10)
        answering = asyncio.create_task(disaggregated(on.made, on.here, asked))
        await until(lambda: on.made.prefill[0].worker._runs)
        on.drain(on.made.prefill[0], 60.0)
        assert (await answering).token_ids == expected_tokens(asked, MODEL)
