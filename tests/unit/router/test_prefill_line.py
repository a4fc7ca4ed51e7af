"""A session with a prefill worker: what it says to whom, and what becomes of those that it carries when it breaks."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc
import pytest

from contracts.errors import Draining, InternalError, Overloaded, Unavailable, WorkerLost
from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.prefill import FirstTokens, HandedOff
from router.serving.inbox import Inbox, PrefillEnded
from router.serving.legs import PrefillLine
from tests.prefill_sessions import OURS_PB, Channel, broken, handed_off, known, request, settle, target, tokens


class Line(PrefillLine):
    def __init__(self) -> None:
        self.channel = Channel()
        super().__init__(known(), self.channel, 1.0)

    def begin(self, *names):
        inboxes = [Inbox() for _ in names]
        for name, inbox in zip(names, inboxes, strict=True):
            self.start(request(name), target(f"h-{name}"), inbox)
        return inboxes

    def commands(self, call=0):
        return [command.WhichOneof("command") for command in self.channel.calls[call].heard]


@asynccontextmanager
async def opened():
    line = Line()
    yield line
    line.close("the test is over")
    await settle()
    assert all(call.cancelled for call in line.channel.calls)


async def events(inbox):
    return [await inbox.get() for _ in range(len(inbox._events))]


async def test_all_prompts_share_one_session_and_each_hears_its_own():
    async with opened() as line:
        a, b = line.begin("a", "b")
        await settle()
        (call,) = line.channel.calls
        assert [command.run.request.request_id for command in call.heard] == ["a", "b"]
        assert all(command.prefill == OURS_PB for command in call.heard)
        call.say("b", tokens("b"), handed_off("h-b"), prefill_pb2.PrefillEnded())
        call.say("a", tokens("a"))
        call.say("nobody", tokens("nobody"), prefill_pb2.PrefillEnded())
        await settle()
        assert [type(event) for event in await events(b)] == [FirstTokens, HandedOff, PrefillEnded]
        assert [type(event) for event in await events(a)] == [FirstTokens]


async def test_a_refusal_is_its_requests_alone_and_says_when_to_come_back():
    async with opened() as line:
        a, b = line.begin("a", "b")
        await settle()
        refused = types_pb2.Error(code="RESOURCE_EXHAUSTED", message="full", retryable=False, retry_after_s=7.5)
        line.channel.calls[0].say("a", prefill_pb2.PrefillEnded(error=refused))
        await settle()
        (ended,) = await events(a)
        assert isinstance(ended.error, Overloaded)
        assert ended.error.retry_after_s == 7.5
        assert await events(b) == []


LOST = broken(grpc.StatusCode.UNAVAILABLE, "connection reset")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (LOST, WorkerLost),
        (broken(grpc.StatusCode.CANCELLED), WorkerLost),
        (broken(grpc.StatusCode.RESOURCE_EXHAUSTED), WorkerLost),
        (broken(grpc.StatusCode.INVALID_ARGUMENT), WorkerLost),
        (broken(grpc.StatusCode.UNAUTHENTICATED), Unavailable),
        (None, Draining),
    ],
    ids=["lost", "server down", "not read", "not understood", "stranger", "drained"],
)
async def test_a_session_that_ends_tells_all_that_it_carries_and_the_next_opens_another(how, told):
    async with opened() as line:
        inboxes = line.begin("a", "b", "c")
        await settle()
        line.channel.calls[0].say("a", tokens("a"))
        line.channel.calls[0].end(how)
        await settle()
        news = [await events(inbox) for inbox in inboxes]
        assert [type(event) for event in news[0]] == [FirstTokens, PrefillEnded]
        for heard in news:
            assert type(heard[-1].error) is told
            assert heard[-1].error.retryable
        assert line.channel.calls[0].cancelled
        (d,) = line.begin("d")
        await settle()
        assert len(line.channel.calls) == 2
        assert line.commands(1) == ["run"], "of those before nothing is said again"
        line.channel.calls[1].say("d", tokens("d"), prefill_pb2.PrefillEnded())
        await settle()
        assert [type(event) for event in await events(d)] == [FirstTokens, PrefillEnded]


async def test_who_leaves_is_told_to_the_worker_and_hears_nothing_while_others_go_on():
    async with opened() as line:
        a, b = line.begin("a", "b")
        await settle()
        line.cancel("a", a)
        line.cancel("a", a)
        line.cancel("b", Inbox())  # is another's
        await settle()
        call = line.channel.calls[0]
        assert line.commands() == ["run", "run", "cancel"]
        assert list(call.heard[-1].cancel.request_ids) == ["a"]
        call.say("a", tokens("a"))
        call.say("b", tokens("b"))
        await settle()
        assert await events(a) == []
        assert len(await events(b)) == 1
        assert not call.cancelled


async def test_those_who_leave_at_once_are_one_command():
    async with opened() as line:
        names = [f"r{i}" for i in range(100)]
        inboxes = line.begin(*names)
        await settle()
        await settle()
        await settle()
        await settle()
        for name, inbox in zip(names, inboxes, strict=True):
            line.cancel(name, inbox)
        await settle()
        (cancel,) = [command for command in line.channel.calls[0].heard if command.HasField("cancel")]
        assert list(cancel.cancel.request_ids) == names


async def test_to_a_worker_that_does_not_read_nothing_is_said_of_those_who_have_left():
    async with opened() as line:
        line.channel.may_read.clear()
        (first,) = line.begin("first")
        await settle()
        for index in range(1000):
            (inbox,) = line.begin(f"r{index}")
            line.retarget(f"r{index}", target("other"), inbox)
            line.cancel(f"r{index}", inbox)
        (last,) = line.begin("last")
        assert len(line._commands._left) <= 2
        line.channel.may_read.set()
        await settle()
        heard = [command.run.request.request_id for command in line.channel.calls[0].heard]
        assert heard == ["first", "last"]
        assert await events(first) == await events(last) == []


async def test_what_cannot_be_read_costs_one_request():
    async with opened() as line:
        a, b = line.begin("a", "b")
        await settle()
        batch = prefill_pb2.PrefillBatch(prefill=OURS_PB, events=[prefill_pb2.PrefillEvent(request_id="a")])
        line.channel.calls[0]._said.put_nowait(batch)
        await settle()
        (ended,) = await events(a)
        assert isinstance(ended.error, InternalError)
        assert await events(b) == []
        assert line.commands() == ["run", "run", "cancel"]


async def test_another_life_is_not_believed():
    async with opened() as line:
        (a,) = line.begin("a")
        await settle()
        batch = prefill_pb2.PrefillBatch(prefill=types_pb2.WorkerRef(worker_id="p", epoch=3))
        batch.events.add(request_id="a").tokens.token_ids.append(1)
        line.channel.calls[0]._said.put_nowait(batch)
        await settle()
        (ended,) = await events(a)
        assert isinstance(ended.error, WorkerLost)


async def test_after_its_close_nothing_is_carried():
    line = Line()
    a, b = line.begin("a", "b")
    await settle()
    line.close("the worker is gone")
    (late,) = line.begin("late")
    await settle()
    for inbox in (a, b, late):
        (ended,) = await events(inbox)
        assert isinstance(ended.error, Unavailable)
    assert len(line.channel.calls) == 1
