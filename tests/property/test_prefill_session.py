"""Whatever a session carries and however it ends: each request that was not cancelled ends once, on both sides of it."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import Overloaded
from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.prefill import FirstTokens, PrefillEvent
from contracts.wire import request_to_pb
from contracts.wire_prefill import target_to_pb
from prefill_service.carried import Carried
from router.serving.inbox import Inbox, PrefillEnded
from router.serving.legs import PrefillLine
from router.serving.progress import may_retry
from tests.prefill_sessions import OURS_PB, Channel, Worker, broken, handed_off, known, request, settle, target, tokens
from worker.outbox import Outbox

NAMES = ("a", "b", "c", "d")
names = st.sampled_from(NAMES)
steps = st.lists(
    st.tuples(st.sampled_from(("run", "say", "end", "fail", "cancel", "retarget", "turn")), names), max_size=40
)


class Served:
    """The worker's side: `told` is what goes out."""

    def __init__(self) -> None:
        self.worker, self.outbox = Worker(), Outbox[prefill_pb2.PrefillEvent]("session", 10_000)
        self.carried = Carried(self.worker, self.outbox)
        self.told: list[tuple[str, str]] = []
        self.asked: set[str] = set()
        self.open: set[str] = set()
        self.cancelled: set[str] = set()
        self.ids: dict[str, str] = {}
        self.numbers = itertools.count()
        self.reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for events in self.outbox.batches(1_000_000):
            self.told.extend((event.request_id, event.WhichOneof("event") or "") for event in events)

    def run(self, name: str) -> None:
        """Under a new id, or once more under one that lives."""
        ident = self.ids.get(name, "")
        if ident not in self.open:
            ident = self.ids[name] = f"{name}-{next(self.numbers)}"
            self.open.add(ident)
            self.asked.add(ident)
        self._obey(
            run=prefill_pb2.PrefillRun(request=request_to_pb(request(ident)), target=target_to_pb(target(ident)))
        )

    def retarget(self, name: str) -> None:
        ident = self.ids.get(name, "nobody")
        self._obey(retarget=prefill_pb2.Retarget(request_id=ident, target=target_to_pb(target("h"))))

    def cancel(self, name: str) -> None:
        ident = self.ids.get(name, "nobody")
        self._obey(cancel=prefill_pb2.CancelPrefill(request_ids=[ident]))
        self.open.discard(ident)
        self.cancelled.add(ident)  # if its end was not on its way

    def say(self, name: str, event: PrefillEvent | Exception | None) -> None:
        """None and errors end it."""
        ident = self.ids.get(name, "nobody")
        if isinstance(event, FirstTokens) or ident in self.open:
            self.worker.say(ident, event)
        if not isinstance(event, FirstTokens):
            self.open.discard(ident)

    def _obey(self, **what: Any) -> None:
        self.carried.obey(prefill_pb2.PrefillCommand(prefill=OURS_PB, **what))

    async def end(self, how: str) -> None:
        """Of the session; checks what went out."""
        if how == "drained":
            self.worker.drained.set_result(None)
        elif how == "heard all":
            self.carried.heard_all()
        if how != "call over":
            for ident in self.open:
                self.worker.say(ident, None)
            async with asyncio.timeout(5):
                await self.reading
            assert self.asked - self.cancelled <= self.ends.keys()
        await self.carried.close()
        assert not self.worker.living
        self.reading.cancel()
        await settle()
        last = dict(self.told)
        assert all(last[ident] == "ended" for ident in self.ends)
        assert max(self.ends.values(), default=1) == 1

    @property
    def ends(self) -> Counter[str]:
        return Counter(ident for ident, what in self.told if what == "ended")


async def served(order: list[tuple[str, str]], ending: str) -> None:
    on = Served()
    for step, name in order:
        match step:
            case "run":
                on.run(name)
            case "say":
                on.say(name, tokens("x"))
            case "end":
                on.say(name, None)
            case "fail":
                on.say(name, Overloaded("full"))
            case "cancel":
                on.cancel(name)
            case "retarget":
                on.retarget(name)
            case "turn":
                await settle()
    await on.end(ending)


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from(("drained", "heard all", "call over")))
def test_a_worker_ends_every_request_once(order: list[tuple[str, str]], ending: str) -> None:
    asyncio.run(served(order, ending))


ENDINGS = {
    "in good order": None,
    "lost": broken(grpc.StatusCode.UNAVAILABLE),
    "cancelled": broken(grpc.StatusCode.CANCELLED),
    "too slow": broken(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "a bug there": broken(grpc.StatusCode.INTERNAL),
    "a bad command": broken(grpc.StatusCode.INVALID_ARGUMENT),
}
moves = st.lists(
    st.tuples(
        st.sampled_from(("start", "tokens", "ended", "refused", "cancel", "retarget", "hears", "deaf", "break")),
        names,
        st.sampled_from(sorted(ENDINGS)),
    ),
    max_size=40,
)


class Driven:
    """The router's side: what each request hears, whatever its worker says and whenever the session breaks."""

    def __init__(self) -> None:
        self.channel = Channel()
        self.line = PrefillLine(known(), self.channel, 1.0)  # type: ignore[arg-type]
        self.inboxes: dict[str, Inbox] = {}
        self.cancelled: set[str] = set()
        self._now: dict[str, str] = {}

    def start(self, name: str) -> None:
        ident = self._now[name] = f"{name}-{len(self.inboxes)}"
        self.inboxes[ident] = Inbox()
        self.line.start(request(ident), target(f"h-{ident}"), self.inboxes[ident])

    def retarget(self, name: str) -> None:
        if ident := self._now.get(name):
            self.line.retarget(ident, target("other"), self.inboxes[ident])

    async def cancel(self, name: str) -> None:
        if ident := self._now.get(name):
            await settle()
            before = len(self.inboxes[ident]._events)
            self.line.cancel(ident, self.inboxes[ident])
            self.cancelled.add(ident)
            await settle()
            assert len(self.inboxes[ident]._events) == before

    def said(self, name: str, *events: PrefillEvent | prefill_pb2.PrefillEnded) -> None:
        """By the worker, on the session that is or was the last."""
        if self.channel.calls:
            self.channel.calls[-1].say(self._now.get(name, "nobody"), *events)

    async def check(self) -> None:
        """Once all is over: one end each, the last of its news, after which another try can help."""
        for ident, inbox in self.inboxes.items():
            events = [await inbox.get() for _ in range(len(inbox._events))]
            ends = [event for event in events if isinstance(event, PrefillEnded)]
            if ident not in self.cancelled:
                assert len(ends) == 1
                assert events[-1] is ends[0]
            assert all(end.error is None or may_retry(end.error) for end in ends)
        assert all(call.cancelled for call in self.channel.calls)
        assert not self.line._carried


async def driven(order: list[tuple[str, str, str]]) -> None:
    on = Driven()
    refused = prefill_pb2.PrefillEnded(error=types_pb2.Error(code="RESOURCE_EXHAUSTED", message="full"))
    for move, name, how in order:
        match move:
            case "start":
                on.start(name)
            case "tokens":
                on.said(name, tokens("x"), handed_off("h"))
            case "ended":
                on.said(name, prefill_pb2.PrefillEnded())
            case "refused":
                on.said(name, refused)
            case "cancel":
                await on.cancel(name)
            case "retarget":
                on.retarget(name)
            case "hears" | "deaf":
                (on.channel.may_read.set if move == "hears" else on.channel.may_read.clear)()
                await settle()
            case "break" if on.channel.calls:
                on.channel.calls[-1].end(ENDINGS[how])
    await settle()
    on.line.close("the router stops")
    await settle()
    await on.check()


@settings(max_examples=200, deadline=None)
@given(moves)
def test_a_router_hears_the_end_of_every_request_once(order: list[tuple[str, str, str]]) -> None:
    asyncio.run(driven(order))
