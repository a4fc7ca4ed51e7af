"""The answer book and its sessions: every attach ends once, nothing is lost or double, nobody is kept for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contracts.clock import VirtualClock
from contracts.errors import DiptychError, Draining, ErrorCode, NoRoom, Overloaded, RequestCancelled, TransferFailed
from contracts.request import FinishReason, TokenDelta
from decode_service.outputs import AnswerBook, AnswerState, OutputConfig, RouterSession


class Bench:
    """A book on a clock that is set by hand, with the aborts it asked for."""

    def __init__(self, session_limit: int = 100) -> None:
        self.clock = VirtualClock()
        self.aborted: list[str] = []
        config = OutputConfig(claim_wait_s=10, max_attach_wait_s=60, lost_memory_s=20)
        self.book = AnswerBook(self.aborted.append, self.clock, config)
        self.session = RouterSession("router-a", session_limit)

    async def pass_time(self, delta_s: float) -> None:
        await self.clock.advance(delta_s)
        self.book.sweep()

    async def read(self, session: RouterSession | None = None) -> list[TokenDelta]:
        """What has been sent so far; ends the session."""
        session = session or self.session
        session.end()
        return [delta async for batch in session.items() for delta in batch]


def token(request_id: str, index: int, last: bool = False) -> TokenDelta:
    return TokenDelta(request_id, index, (index,), finish_reason=FinishReason.LENGTH if last else None)


async def test_answers_that_are_sent_away_end_once_stop_in_the_engine_and_are_remembered() -> None:
    bench = Bench()
    bench.book.start(bench.session, "alone")
    bench.book.attach(bench.session, "awaited", 5)
    bench.book.expect("unclaimed")
    bench.book.deliver([token("alone", 0)])
    for _ in range(2):
        bench.book.sweep(lambda answer: Draining(f"{answer.request_id} goes on elsewhere"))
    bench.book.deliver([token("alone", 1)])  # of a step that was running
    bench.book.attach(bench.session, "unclaimed", 5)
    with pytest.raises(Draining):
        bench.book.expect("awaited")
    news = await bench.read()
    assert [(delta.request_id, delta.token_ids) for delta in news] == [
        ("alone", (0,)),
        ("alone", ()),
        ("awaited", ()),
        ("unclaimed", ()),
    ]
    assert all(delta.error is not None and delta.error.draining for delta in news[1:])
    assert sorted(bench.aborted) == ["alone", "unclaimed"]


async def test_a_sweep_ends_only_what_the_verdict_names() -> None:
    bench = Bench()
    for name in ("stays", "goes"):
        bench.book.start(bench.session, name)
    bench.book.sweep(lambda answer: Draining("x") if answer.request_id == "goes" else None)
    bench.book.deliver([token("stays", 0, last=True)])
    ends = [delta for delta in await bench.read() if delta.finish_reason is not None]
    assert [(delta.request_id, delta.error is None) for delta in ends] == [("goes", False), ("stays", True)]


async def test_tokens_before_the_attach_are_kept_and_come_first() -> None:
    bench = Bench()
    bench.book.expect("h")
    bench.book.deliver([token("h", 1)])
    bench.book.attach(bench.session, "h", 5)
    bench.book.deliver([token("h", 2)])
    bench.book.deliver([token("h", 3, last=True)])
    assert [delta.first_index for delta in await bench.read()] == [1, 2, 3]
    assert bench.book.num_open == 0
    assert bench.aborted == []


async def test_an_answer_that_ended_before_the_attach_is_given_whole() -> None:
    bench = Bench()
    bench.book.expect("h")
    bench.book.deliver([token("h", 1)])
    bench.book.deliver([token("h", 2, last=True)])
    bench.book.attach(bench.session, "h", 5)
    assert bench.book.num_open == 0
    assert [delta.first_index for delta in await bench.read()] == [1, 2]


async def test_attach_before_the_hand_off_is_known() -> None:
    bench = Bench()
    bench.book.attach(bench.session, "h", 5)
    bench.book.attach(bench.session, "h", 5)
    await bench.pass_time(4)
    bench.book.expect("h")
    await bench.pass_time(60)
    bench.book.deliver([token("h", 1, last=True)])
    assert [delta.first_index for delta in await bench.read()] == [1]


async def test_a_hand_off_that_does_not_come_in_time_is_a_retryable_error() -> None:
    bench = Bench()
    bench.book.attach(bench.session, "h", 5)
    await bench.pass_time(5)
    (delta,) = await bench.read()
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error is not None
    assert delta.error.retryable
    assert (bench.book.num_open, bench.aborted) == (0, [])


@pytest.mark.parametrize("attached_first", [True, False])
async def test_a_lost_hand_off_says_why_at_once(attached_first: bool) -> None:
    bench = Bench()
    if attached_first:
        bench.book.attach(bench.session, "h", 5)
    bench.book.fail("h", TransferFailed("connection lost"))
    if not attached_first:
        bench.book.attach(bench.session, "h", 5)
    (delta,) = await bench.read()
    assert delta.error is not None
    assert (delta.error.code, delta.error.message) == (ErrorCode.UNAVAILABLE, "connection lost")
    assert bench.book.num_open == 0


async def test_the_memory_of_lost_hand_offs_ends() -> None:
    bench = Bench()
    bench.book.fail("h", NoRoom("full"))
    await bench.pass_time(20)
    bench.book.expect("h")
    assert bench.book.num_open == 1


async def test_an_adopted_hand_off_that_nobody_attaches_to_is_aborted() -> None:
    bench = Bench()
    bench.book.expect("h")
    bench.book.deliver([token("h", 1)])
    await bench.pass_time(10)
    assert bench.aborted == ["h"]
    bench.book.deliver([token("h", 2)])
    bench.book.attach(bench.session, "h", 5)
    (delta,) = await bench.read()
    assert delta.finish_reason is FinishReason.ERROR


async def test_cancel_stops_the_engine_and_ends_with_abort() -> None:
    bench = Bench()
    assert bench.book.start(bench.session, "r")
    other = RouterSession("router-b", 100)
    bench.book.cancel(other, "r")
    assert bench.aborted == []
    bench.book.cancel(bench.session, "r")
    bench.book.cancel(bench.session, "r")
    bench.book.deliver([token("r", 0)])
    assert bench.aborted == ["r"]
    assert [delta.finish_reason for delta in await bench.read()] == [FinishReason.ABORT]


async def test_a_cancelled_hand_off_is_refused_when_its_kv_comes() -> None:
    bench = Bench()
    bench.book.attach(bench.session, "h", 5)
    bench.book.cancel(bench.session, "h")
    with pytest.raises(RequestCancelled):
        bench.book.expect("h")
    assert bench.book.num_open == 0


async def test_a_session_that_ends_takes_its_requests_with_it_and_no_others() -> None:
    bench = Bench()
    other = RouterSession("router-b", 100)
    bench.book.start(bench.session, "mine")
    bench.book.start(other, "theirs")
    bench.book.expect("unclaimed")
    bench.book.attach(bench.session, "coming", 5)
    bench.book.close_session(bench.session)
    bench.book.close_session(bench.session)
    assert bench.aborted == ["mine"]
    assert bench.book.num_open == 2
    with pytest.raises(RequestCancelled):
        bench.book.expect("coming")


async def test_an_id_that_another_session_uses_is_refused_without_harm() -> None:
    bench = Bench()
    other = RouterSession("router-b", 100)
    bench.book.start(bench.session, "r")
    assert not bench.book.start(bench.session, "r")
    assert not bench.book.start(other, "r")
    bench.book.attach(other, "r", 5)
    bench.book.deliver([token("r", 0, last=True)])
    assert [delta.finish_reason for delta in await bench.read()] == [FinishReason.LENGTH]
    assert [delta.finish_reason for delta in await bench.read(other)] == [FinishReason.ERROR] * 2


async def test_a_router_that_does_not_read_loses_its_session_and_its_requests() -> None:
    bench = Bench(session_limit=3)
    other = RouterSession("router-b", 100)
    bench.book.start(bench.session, "r")
    bench.book.start(other, "s")
    for index in range(5):
        bench.book.deliver([token("r", index), token("s", index)])
    assert bench.aborted == ["r"]
    with pytest.raises(Overloaded):
        await bench.read()
    assert len(await bench.read(other)) == 5


async def test_a_session_that_asks_for_nothing_more_ends_with_its_last_answer() -> None:
    bench = Bench()
    bench.book.start(bench.session, "r")
    bench.book.finish_session(bench.session)
    assert not bench.session.closed
    bench.book.deliver([token("r", 0, last=True)])
    assert [delta.request_id async for batch in bench.session.items() for delta in batch] == ["r"]
    idle = RouterSession("router-b", 100)
    bench.book.finish_session(idle)
    assert idle.closed


async def test_one_batch_per_step_and_session() -> None:
    bench = Bench()
    for name in "abc":
        bench.book.start(bench.session, name)
    bench.book.deliver([token(name, 0) for name in "abc"])
    bench.book.deliver([token(name, 1) for name in "ab"])
    bench.session.end()
    assert [len(batch) async for batch in bench.session.items()] == [3, 2]


class HandClock(VirtualClock):
    """Moved by hand, outside an event loop."""

    def skip(self, delta_s: float) -> None:
        self._now += delta_s


class BookMachine(RuleBasedStateMachine):
    """Any order of events: an attached reader sees contiguous tokens, one end, and nothing after it."""

    ids = st.sampled_from("xy")

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.engine: dict[str, int] = {}  # what the engine runs, and its next index
        self.book = AnswerBook(self._abort, self.clock, OutputConfig(claim_wait_s=3, lost_memory_s=4))
        self.session = RouterSession("router", 10_000)
        self.open: dict[str, int | None] = {}  # what the reader waits for: the next index
        self.used: set[str] = set()
        self.count = 0

    def _abort(self, request_id: str) -> None:
        self.engine.pop(request_id, None)

    @rule(name=ids)
    def adopt(self, name: str) -> None:
        if name in self.used:
            return
        self.used.add(name)
        try:
            self.book.expect(name)
        except DiptychError:  # cancelled, or given up for lost, before
            return
        self.engine[name] = 1

    @rule(name=ids)
    def attach(self, name: str) -> None:
        if name not in self.open:
            self.open[name] = None
            self.book.attach(self.session, name, 2)
            self._read()

    @rule(name=ids, last=st.booleans())
    def step(self, name: str, last: bool) -> None:
        if name in self.engine:
            self.book.deliver([token(name, self.engine[name], last)])
            self.engine[name] += 1
            if last:
                del self.engine[name]
            self._read()

    @rule(name=ids)
    def cancel(self, name: str) -> None:
        self.book.cancel(self.session, name)
        self._read()

    @rule(name=ids)
    def lose(self, name: str) -> None:
        if name not in self.used:
            self.used.add(name)
            self.book.fail(name, NoRoom("full"))
            self._read()

    @rule(delta_s=st.sampled_from([0.5, 2.0, 5.0]))
    def pass_time(self, delta_s: float) -> None:
        self.clock.skip(delta_s)
        self.book.sweep()
        self._read()

    @rule(everything=st.booleans())
    def send_away(self, everything: bool) -> None:
        error = Draining("about to stop")
        self.book.sweep(lambda a: error if everything or a.state is AnswerState.AWAITED else None)
        self._read()
        assert not self.book.num_open or not everything

    def _read(self) -> None:
        for batch, _ in list(self.session._unread):
            for delta in batch:
                assert delta.request_id in self.open, "news after the end, or of nobody"
                expected = self.open[delta.request_id]
                if delta.token_ids:
                    assert expected is None or delta.first_index == expected
                    self.open[delta.request_id] = delta.first_index + 1
                if delta.finish_reason is not None:
                    del self.open[delta.request_id]
        self.session._unread.clear()

    @invariant()
    def the_engine_runs_nothing_that_the_book_does_not_know(self) -> None:
        assert set(self.engine) <= set(self.book._answers)

    @invariant()
    def every_reader_is_known(self) -> None:
        assert set(self.open) <= set(self.book._answers)


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBook = BookMachine.TestCase


def test_a_lost_hand_off_is_remembered_as_long_as_an_attach_can_be_late():
    assert OutputConfig().lost_memory_s >= OutputConfig().max_attach_wait_s


async def test_a_hand_off_whose_attach_was_lost_costs_seconds_not_half_a_minute() -> None:
    clock, aborted = VirtualClock(), []
    book = AnswerBook(aborted.append, clock)
    book.expect("h")
    await clock.advance(3.0)  # a router may take as long to connect
    book.sweep()
    assert aborted == []
    await clock.advance(2.0)
    book.sweep()
    assert aborted == ["h"]
