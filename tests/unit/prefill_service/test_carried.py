"""What a router says on its session reaches the run that it is about and no other; every run ends once, and then the session."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from contracts.errors import Draining, HandoffError, InvalidRequest, Overloaded
from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.wire import request_to_pb
from contracts.wire_prefill import target_to_pb
from prefill_service.carried import Carried
from tests.prefill_sessions import OURS_PB, Worker, handed_off, request, settle, target, tokens
from worker.outbox import Outbox


class Session:
    """A session, and what the router reads of it."""

    def __init__(self, limit: int = 1000) -> None:
        self.worker = Worker()
        self.outbox = Outbox("session", limit)
        self.carried = Carried(self.worker, self.outbox)
        self.read: list[tuple[str, str]] = []
        self.ends: dict[str, types_pb2.Error | None] = {}
        self.reading = asyncio.ensure_future(self._read())

    async def _read(self):
        async for events in self.outbox.batches(1_000_000):
            for event in events:
                self.read.append((event.request_id, event.WhichOneof("event")))
                if event.HasField("ended"):
                    self.ends[event.request_id] = event.ended.error if event.ended.HasField("error") else None

    def run(self, name, **changes):
        message = prefill_pb2.PrefillRun(request=request_to_pb(request(name)), target=target_to_pb(target(f"h-{name}")))
        for field, value in changes.items():
            setattr(message.request, field, value)
        self.carried.obey(prefill_pb2.PrefillCommand(prefill=OURS_PB, run=message))

    def retarget(self, name, handoff_id):
        aim = target_to_pb(target(handoff_id))
        again = prefill_pb2.Retarget(request_id=name, target=aim)
        self.carried.obey(prefill_pb2.PrefillCommand(prefill=OURS_PB, retarget=again))

    def cancel(self, *names):
        cancel = prefill_pb2.CancelPrefill(request_ids=names)
        self.carried.obey(prefill_pb2.PrefillCommand(prefill=OURS_PB, cancel=cancel))

    def aims(self, name):
        queue = self.worker.targets[name]
        return [aim and aim.handoff_id for aim in (queue.get_nowait() for _ in range(queue.qsize()))]


@asynccontextmanager
async def session(limit=1000):
    made = Session(limit)
    yield made
    await made.carried.close()
    assert not made.worker.living
    made.reading.cancel()


async def test_what_runs_say_is_told_in_order_and_each_ends_once():
    async with session() as on:
        for name in ("a", "b", "c"):
            on.run(name)
        await settle()
        on.worker.say("b", tokens("b"))
        on.worker.say("a", tokens("a"), handed_off("h-a"), None)
        on.worker.say("c", Overloaded("full", 7.0))
        await settle()
        assert [what for name, what in on.read if name == "a"] == ["tokens", "handed_off", "ended"]
        assert [what for name, what in on.read if name == "b"] == ["tokens"]
        assert on.ends["a"] is None
        refused = on.ends["c"]
        assert (refused.code, refused.message, refused.retry_after_s) == ("RESOURCE_EXHAUSTED", "full", 7.0)
        assert on.worker.living == {"b"}


async def test_a_bug_in_a_run_ends_that_run(caplog):
    async with session() as on:
        on.run("a")
        on.run("b")
        await settle()
        on.worker.say("a", ValueError("the prompt's own words"))
        await settle()
        assert (on.ends["a"].code, on.ends["a"].message) == (
            "INTERNAL",
            "ValueError in a prefill run; see the worker's log",
        )
        assert on.worker.living == {"b"}
        assert not on.reading.done()
    assert "a run failed" in caplog.text


async def test_targets_reach_the_run_that_they_are_for():
    async with session() as on:
        on.run("a")
        on.run("b")
        await settle()
        on.retarget("a", "h2")
        on.retarget("nobody", "h3")
        on.retarget("a", "h4")
        on.retarget("b", "")  # none: the run ends as if none came
        assert on.aims("a") == ["h2", "h4"]
        assert on.aims("b") == [None]
        on.carried.heard_all()
        assert on.aims("a") == [None]


async def test_who_is_cancelled_is_gone_and_nobody_else():
    async with session() as on:
        for name in ("a", "b", "c"):
            on.run(name)
        await settle()
        on.cancel("a", "nobody", "c")
        await settle()
        assert on.worker.living == {"b"}
        assert on.ends == {}
        on.run("d")
        on.cancel("d")  # before it began
        await settle()
        assert on.worker.living == {"b"}
        on.worker.say("b", None)
        await settle()
        assert list(on.ends) == ["b"]


async def test_a_request_that_is_sent_twice_runs_once():
    async with session() as on:
        on.run("a")
        await settle()
        on.run("a")
        await settle()
        assert on.read == []
        on.worker.say("a", tokens("a"), None)
        await settle()
        assert on.read == [("a", "tokens"), ("a", "ended")]
        on.run("a")  # its end has come: it may come again
        on.worker.say("a", None)
        await settle()
        assert on.read[2:] == [("a", "ended")]


async def test_what_cannot_be_read_costs_its_own_request_if_it_says_which():
    async with session() as on:
        on.run("good")
        on.run("bad", deadline_s=float("nan"))
        await settle()
        assert on.ends["bad"].code == "INVALID_ARGUMENT"
        assert "good" in on.worker.living
        with pytest.raises(InvalidRequest):
            on.run("", deadline_s=float("nan"))
        with pytest.raises(InvalidRequest, match="must be run, retarget or cancel"):
            on.carried.obey(prefill_pb2.PrefillCommand(prefill=OURS_PB))


@pytest.mark.parametrize(("worker_id", "epoch"), [("p", 1), ("p", 3), ("q", 2), ("", 0)])
async def test_what_is_meant_for_another_life_is_not_done(worker_id, epoch):
    async with session() as on:
        on.run("a")
        await settle()
        meant = types_pb2.WorkerRef(worker_id=worker_id, epoch=epoch)
        cancel = prefill_pb2.CancelPrefill(request_ids=["a"])
        with pytest.raises((HandoffError, InvalidRequest)):
            on.carried.obey(prefill_pb2.PrefillCommand(prefill=meant, cancel=cancel))
        await settle()
        assert on.worker.living == {"a"}


@pytest.mark.parametrize("why", ["no more commands", "drained"])
async def test_it_ends_with_the_last_run_once_nothing_new_comes(why):
    async with session() as on:
        on.run("a")
        await settle()
        on.carried.heard_all() if why == "no more commands" else on.worker.drained.set_result(None)
        await settle()
        assert not on.reading.done()
        on.worker.say("a", tokens("a"), None)
        async with asyncio.timeout(5):
            await on.reading
        assert on.read == [("a", "tokens"), ("a", "ended")]


async def test_a_session_with_a_worker_that_has_drained_ends_with_its_first_refusal():
    worker = Worker()
    worker.drained.set_result(None)
    outbox = Outbox("session", 1000)
    carried = Carried(worker, outbox)
    message = prefill_pb2.PrefillRun(request=request_to_pb(request("a")), target=target_to_pb(target("h")))
    worker.say("a", Draining("p is about to stop"))
    carried.obey(prefill_pb2.PrefillCommand(prefill=OURS_PB, run=message))
    (events,) = [events async for events in outbox.batches(1_000_000)]
    assert [event.ended.error.draining for event in events] == [True]
    await carried.close()


async def test_a_router_that_does_not_read_costs_bounded_memory_and_loses_its_session():
    async with session(limit=10) as on:
        on.reading.cancel()
        on.run("a")
        on.worker.say("a", *[tokens("a")] * 1000)
        await settle()
        assert len(on.outbox._unread) <= 10
        with pytest.raises(Overloaded, match="were not read"):
            _ = [events async for events in on.outbox.batches(1_000_000)]
