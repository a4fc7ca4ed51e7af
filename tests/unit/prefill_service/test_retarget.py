"""Another target for a run at every moment: while it computes, while it pushes, after a failure, and too late."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from contracts.errors import DeadlineExceeded, ErrorCode, UnknownHandoff
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, Target
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import ReserveRequest, Ticket
from kv_transfer.handoff import SourceState
from tests.unit.prefill_service.test_run import TARGET, D, DecodeSide, asked, bench


def target(name: str) -> Target:
    return Target(name, D, "d:1")


class Moment:
    """Holds one kind of message about h at the decode side, which has died and answers it never."""

    def __init__(self, side: DecodeSide, kind: str) -> None:
        self.reached = asyncio.Event()
        self._answer = getattr(side, kind)
        setattr(side, kind, self.hold)

    async def hold(self, message: ReserveRequest | Ticket) -> object:
        if message.handoff_id == "h":
            self.reached.set()
            await asyncio.Event().wait()
        return await self._answer(message)


def given_up(event: object) -> str:
    assert isinstance(event, HandoffFailed), event
    assert event.error.code is ErrorCode.CANCELLED
    assert "the router aims at d instead" in event.error.message
    return event.handoff_id


@pytest.mark.parametrize("kind", ["reserve", "commit"])
async def test_another_target_is_taken_before_the_one_that_died_was_noticed(kind: str) -> None:
    async with bench() as made:
        moment = Moment(made.side, kind)
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        reading = asyncio.ensure_future(anext(events))
        await moment.reached.wait()
        began = asyncio.get_running_loop().time()
        made.targets.put_nowait(target("h2"))
        assert given_up(await reading) == "h"
        done = await anext(events)
        assert isinstance(done, HandedOff), done
        assert done.handoff_id == "h2"
        assert asyncio.get_running_loop().time() - began < 3.0, "a call that is not answered takes 5 s to fail"
        assert [ticket.handoff_id for ticket in made.side.tickets] == ["h2"]
        assert [event async for event in events] == []
        await made.worker.links.close()
        assert made.side.aborted == ["h"]


async def test_another_target_is_taken_while_the_first_connects() -> None:
    async with bench() as made:
        made.side.may_connect.clear()
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        await made.side.connecting.wait()
        made.targets.put_nowait(target("h2"))
        reading = asyncio.ensure_future(anext(events))
        (run,) = made.worker._runs.values()
        while run.chain.attempt.target.handoff_id != "h2":
            await asyncio.sleep(0)
        made.side.may_connect.set()
        assert given_up(await reading) == "h"
        done = await anext(events)
        assert isinstance(done, HandedOff)
        assert done.handoff_id == "h2"
        await events.aclose()


async def test_the_next_push_begins_when_no_write_of_the_one_before_is_under_way() -> None:
    async with bench() as made:
        made.gate.stall_s = 0.2
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        reading = asyncio.ensure_future(anext(events))
        while not made.connector._copies:
            await asyncio.sleep(0)
        (copy,) = made.connector._copies
        order: list[str] = []
        copy.add_done_callback(lambda _: order.append("write over"))
        made.gate.stall_s = 0.0
        reserve = made.side.reserve

        async def note(request: ReserveRequest) -> object:
            order.append(request.handoff_id)
            return await reserve(request)

        made.side.reserve = note  # type: ignore[assignment]
        made.targets.put_nowait(target("h2"))
        assert given_up(await reading) == "h"
        assert order[:1] == ["write over"]
        done = await anext(events)
        assert isinstance(done, HandedOff)
        assert order == ["write over", "h2"]
        await events.aclose()


async def test_targets_that_change_while_the_prompt_computes() -> None:
    async with bench(step_s=0.02) as made:
        long = GenerationRequest("r", tuple(i % 90 + 1 for i in range(240)), SamplingParams(max_tokens=5))
        seen = []

        async def read() -> None:
            async for event in made.worker.run(long, TARGET, made.targets):
                seen.append(event)

        reading = asyncio.ensure_future(read())
        await made.side.reserving.wait()
        for name in ("h2", "h3", "h3", "h2"):  # one that is named again changes nothing
            made.targets.put_nowait(target(name))
        await reading
        assert [given_up(event) for event in seen[:2]] == ["h", "h2"], "told at once, not after the prompt is computed"
        assert isinstance(seen[2], FirstTokens)
        assert isinstance(seen[3], HandedOff)
        assert (seen[3].handoff_id, len(seen)) == ("h3", 4)
        (ticket,) = made.side.tickets
        assert (ticket.handoff_id, ticket.num_computed_tokens) == ("h3", 240)
        last = [step.after is SourceState.RELEASED for step in made.steps]
        assert [step.handoff_id for step, ended in zip(made.steps, last, strict=True) if ended] == ["h", "h2", "h3"]
        assert [step.handoff_id for step in made.steps] == sorted(step.handoff_id for step in made.steps), (
            "one at a time"
        )
        await made.worker.links.close()
        assert made.side.aborted == ["h", "h2"]


async def test_a_target_that_comes_before_anything_was_begun_is_the_only_one_asked() -> None:
    async with bench() as made:
        made.targets.put_nowait(target("h2"))
        events = [event async for event in made.worker.run(asked(), TARGET, made.targets)]
        assert given_up(events[0]) == "h"
        assert [type(event) for event in events[1:]] == [FirstTokens, HandedOff]
        assert {ticket.handoff_id for ticket in made.side.tickets} == {"h2"}


async def test_a_target_that_crosses_with_the_commit_is_too_late_and_never_begun() -> None:
    async with bench() as made:
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        (run,) = made.worker._runs.values()
        sender = run.chain.attempt.sender
        assert sender is not None
        reading = asyncio.ensure_future(anext(events))
        while not sender.committed:
            await asyncio.sleep(0)
        made.targets.put_nowait(target("h2"))
        done = await reading
        assert isinstance(done, HandedOff)
        assert done.handoff_id == "h"
        assert [event async for event in events] == []
        assert {ticket.handoff_id for ticket in made.side.tickets} == {"h"}
        assert made.side.aborted == []


async def test_a_target_after_a_failure_is_begun_once() -> None:
    async with bench() as made:
        good, made.side.connector._buffer = made.side.connector._buffer, None  # writes will fail
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        failed = await anext(events)
        assert isinstance(failed, HandoffFailed)
        assert failed.handoff_id == "h"
        made.side.connector._buffer = good
        for name in ("h2", "h2", "h"):
            made.targets.put_nowait(target(name))
        done = await anext(events)
        assert isinstance(done, HandedOff)
        assert done.handoff_id == "h2"
        assert [ticket.handoff_id for ticket in made.side.tickets] == ["h2"]
        assert [event async for event in events] == []


async def test_a_reader_that_leaves_while_the_target_changes_leaves_nothing_behind() -> None:
    async with bench() as made:
        made.gate.stall_s = 0.2
        events = made.worker.run(asked(), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        reading = asyncio.ensure_future(anext(events))
        while not made.connector._copies:
            await asyncio.sleep(0)
        made.targets.put_nowait(target("h2"))
        (run,) = made.worker._runs.values()
        while run.chain.attempt.target.handoff_id != "h2":  # from here on the old write is waited for
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        await events.aclose()
        assert not made.connector._copies
        await made.worker.links.close()
        assert made.side.aborted == ["h"]
        assert made.side.tickets == []


@pytest.mark.parametrize("lost", ["commit", "write"])
async def test_the_deadline_ends_a_hand_off_and_what_is_held_for_another(lost: str) -> None:
    async with bench() as made:
        if lost == "commit":
            Moment(made.side, "commit")
        else:
            made.side.connector._buffer = None
        events = made.worker.run(replace(asked(), deadline_s=1.0), TARGET, made.targets)
        assert isinstance(await anext(events), FirstTokens)
        if lost == "commit":
            with pytest.raises(DeadlineExceeded, match="hand-off h: not ended within"):
                await anext(events)
            return
        assert isinstance(await anext(events), HandoffFailed)
        with pytest.raises(UnknownHandoff, match=r"held for 0\.\d+ s"):
            await anext(events)
