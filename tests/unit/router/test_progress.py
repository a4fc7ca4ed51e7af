"""A request's books: what the next attempt runs, what may be retried, and that no token is lost or comes twice."""

from dataclasses import replace

import pytest

from contracts.clock import VirtualClock
from contracts.errors import (
    DeadlineExceeded,
    DiptychError,
    Draining,
    ErrorCode,
    InternalError,
    InvalidRequest,
    NoRoom,
    Overloaded,
    RequestCancelled,
    RetriesSpent,
    Unavailable,
    WorkerLost,
)
from contracts.prefill import HandedOff
from contracts.request import ErrorInfo, FinishReason, TokenDelta
from contracts.sampling import SamplingParams
from contracts.wire import error_info
from contracts.worker import WorkerKind, WorkerRef
from observability.stages import HandoffStats, Spent, StageTimes
from router.choosing.route import Route
from router.config import RetryBudgetConfig, RetryConfig
from router.serving.progress import Job, Progress, as_exception
from router.serving.retry_budget import RetryBudget

JOB = Job(
    request_id="r",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(seed=9, prompt_logprobs=1),
    deadline=10.0,
    priority=3,
)


def progress(max_failures=2):
    clock = VirtualClock()
    return Progress(JOB, clock, RetryConfig(max_failures=max_failures, max_worker_deaths=2)), clock


async def test_the_next_attempt_goes_on_from_the_tokens_so_far():
    books, clock = progress()
    first = books.request("a-1")
    assert (first.output_token_ids, first.sampling, first.deadline_s) == ((), JOB.sampling, 10.0)
    books.accept(TokenDelta("a-1", 0, (5, 6), num_cached_tokens=1))
    await clock.advance(4.0)
    second = books.request("a-2")
    assert second.request_id == "a-2"
    assert second.output_token_ids == (5, 6)
    assert second.deadline_s == 6.0
    assert second.priority == 3
    assert (second.sampling.seed, second.sampling.prompt_logprobs) == (9, None), "they came once"
    books.accept(TokenDelta("a-2", 2, (7,), num_cached_tokens=99))
    assert books.num_cached_tokens == 1, "the user's hit is the first attempt's"


@pytest.mark.parametrize("index", [0, 1, 3, 7])
def test_tokens_out_of_order_are_never_passed_on(index):
    books, _ = progress()
    books.accept(TokenDelta("a", 0, (5, 6)))
    with pytest.raises(InternalError):
        books.accept(TokenDelta("a", index, (7,)))
    assert books.token_ids == [5, 6]


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_attempt_that_ended_badly_is_no_end(finish):
    books, _ = progress()
    with pytest.raises(Unavailable):
        books.accept(TokenDelta("a", 0, (), finish_reason=finish))
    with pytest.raises(Overloaded):
        books.accept(TokenDelta("a", 0, (), finish_reason=finish, error=error_info(NoRoom("full"))))


PREFILL = StageTimes(prefill_queue_s=0.25, prefill_compute_s=1.0)
DECODE = StageTimes(decode_queue_s=0.125, first_step_s=0.25)
FELT = HandedOff("h", HandoffStats(), StageTimes(prefill_compute_s=9.0, transfer_s=0.5, commit_s=0.125))


async def heard_first(books, clock, after_s=2.0):
    """The attempt that departs now makes the first token."""
    books.departed(Route.DISAGGREGATED)
    await clock.advance(after_s)
    books.accept(TokenDelta("a", 0, (5,), stages=PREFILL))


async def test_an_attempt_that_failed_before_the_first_token_is_a_stage_of_it():
    books, clock = progress()
    await clock.advance(0.5)
    books.departed(Route.DISAGGREGATED)
    await clock.advance(0.75)
    await heard_first(books, clock)
    assert books.stages == replace(PREFILL, route_s=0.5, retry_s=0.75, notify_s=0.75)
    assert books.stages.ttft_s == clock.now()


async def test_the_gap_has_the_stages_of_the_hand_off_whatever_is_heard_first():
    for books_first in (True, False):
        books, clock = progress()
        await heard_first(books, clock)
        if books_first:
            books.handed_off(FELT)
        await clock.advance(1.25)
        books.accept(TokenDelta("h", 1, (6,), stages=DECODE))
        if not books_first:
            books.handed_off(FELT)
        assert books.timed(None) == books.stages
        assert books.timed(1.25) == replace(books.stages, relay_s=0.25)
        assert books.stages == replace(
            PREFILL, notify_s=0.75, transfer_s=0.5, commit_s=0.125, decode_queue_s=0.125, first_step_s=0.25
        )


TOLD = StageTimes(notify_s=0.5, transfer_s=1.0, commit_s=2.0, decode_queue_s=0.5, first_step_s=4.0)


@pytest.mark.parametrize(
    ("heard_s", "felt"),
    [
        (8.0, {"relay_s": 0.5}),
        (7.25, {"transfer_s": 0.75}),  # a quarter of a second of it went by before the router had the first token
        (6.5, {"transfer_s": 0.5, "commit_s": 1.5}),  # no more than that token's way; the commit was guessed
        (4.0, {"transfer_s": 0.5, "commit_s": 0.0}),  # they say more than there was
    ],
)
def test_of_what_workers_tell_the_gap_has_what_was_felt_in_it(heard_s, felt):
    assert TOLD.felt(heard_s, heard_s) == replace(TOLD, **felt)
    spent = Spent(TOLD.felt(heard_s, heard_s), 1.0, heard_s)
    assert spent.gap_unexplained_s == (-1.0 if heard_s == 4.0 else 0.0)
    slowly = replace(TOLD, emit_s=1.25).felt(heard_s, heard_s - 1.25 + 0.125)
    assert slowly.relay_s == felt.get("relay_s", 0.0) + 0.125, "the second token takes as long again"
    assert slowly.transfer_s == 0.0, "the first was not there before it was over"
    assert Spent(slowly, 1.0, heard_s - 1.125).gap_unexplained_s == spent.gap_unexplained_s


async def test_a_worker_that_says_more_than_was_waited_for_makes_no_negative_way():
    books, clock = progress()
    await heard_first(books, clock, after_s=1.0)
    assert books.stages == PREFILL
    assert Spent(books.stages, ttft_s=1.0).ttft_unexplained_s == -0.25


async def test_what_a_worker_did_not_tell_is_not_taken_for_a_way():
    books, clock = progress()
    books.departed(Route.DISAGGREGATED)
    await clock.advance(2.0)
    books.accept(TokenDelta("a", 0, (5,)))
    await clock.advance(1.0)
    books.accept(TokenDelta("h", 1, (6,), stages=DECODE))
    assert books.timed(1.0) == replace(DECODE, prefill_queue_s=0.0)


async def test_attempts_that_go_on_from_the_middle_add_nothing():
    books, clock = progress()
    await heard_first(books, clock)
    books.accept(TokenDelta("h", 1, (6,), stages=DECODE))
    told = books.stages
    books.departed(Route.COLOCATED)
    books.accept(TokenDelta("b", 2, (7,), stages=PREFILL))
    books.handed_off(FELT)
    books.accept(TokenDelta("b", 3, (8,), stages=DECODE))
    assert books.stages == told


async def test_where_another_attempt_makes_the_second_token_the_gap_is_its_recovery():
    books, clock = progress()
    await heard_first(books, clock)
    books.handed_off(FELT)
    await clock.advance(3.0)
    books.departed(Route.COLOCATED)
    await clock.advance(1.0)
    books.accept(TokenDelta("b", 1, (6,), stages=PREFILL))
    books.accept(TokenDelta("b", 2, (7,), stages=DECODE))
    assert books.stages == replace(PREFILL, notify_s=0.75, recover_s=4.0)
    assert books.timed(4.5).gap_s == 4.5, "all of what its client felt"
    assert books.route is Route.COLOCATED


@pytest.mark.parametrize(
    "error", [Unavailable("x"), InternalError("x"), Overloaded("x"), RequestCancelled("x"), NoRoom("x")]
)
def test_the_budget(error):
    books, _ = progress(max_failures=2)
    assert books.fail(error)
    assert books.fail(error)
    with pytest.raises(type(error)):
        books.fail(error)


def test_a_request_that_its_workers_die_of_is_given_up_and_says_so():
    books, _ = progress(max_failures=6)
    assert books.fail(WorkerLost("d-0: gone"))
    assert books.fail(NoRoom("full"))
    assert books.fail(Unavailable("cannot connect"))
    assert books.fail(WorkerLost("d-1: gone"))
    with pytest.raises(WorkerLost, match=r"given up: 3 workers in a row went away .*; the last: d-2: gone"):
        books.fail(WorkerLost("d-2: gone"))


@pytest.mark.parametrize(("num_tokens", "is_given_up"), [(7, True), (8, False)])
def test_a_request_that_grows_between_is_not_what_its_workers_die_of(num_tokens, is_given_up):
    books, _ = progress(max_failures=6)
    books.accept(TokenDelta("a", 0, tuple(range(30))))
    for _ in range(2):
        books.fail(WorkerLost("gone"))
    books.accept(TokenDelta("b", 30, tuple(range(num_tokens))))
    if is_given_up:
        with pytest.raises(WorkerLost, match="3 workers"):
            books.fail(WorkerLost("gone"))
    else:
        assert books.fail(WorkerLost("gone"))
        assert books.num_worker_deaths == 1


@pytest.mark.parametrize("num_tokens", [7, 8])
def test_the_first_death_is_free_and_the_next_costs_unless_it_got_on_between(num_tokens):
    """A pool that resets every connection does not get a multiple of its load either."""
    clock = VirtualClock()
    budget = RetryBudget(RetryBudgetConfig(ratio=0.0, min_per_s=0.0), clock)
    books = Progress(JOB, clock, RetryConfig(max_failures=6, max_worker_deaths=3), budget=budget)
    assert books.fail(WorkerLost("gone"))
    assert books.fail(Unavailable("gone as well"), with_worker=True)
    books.accept(TokenDelta("a", 0, tuple(range(num_tokens))))
    if num_tokens < 8:
        with pytest.raises(RetriesSpent, match="the last: gone again"):
            books.fail(WorkerLost("gone again"))
    else:
        assert books.fail(WorkerLost("gone again"))
    assert budget.num_refused == (num_tokens < 8)


def test_workers_that_drain_cost_nothing_however_many():
    books, _ = progress(max_failures=0)
    for number in range(100):
        assert not books.fail(Draining(f"d-{number} is about to stop"))
    assert (books.num_moves, books.num_failures, books.num_worker_deaths) == (100, 0, 0)
    with pytest.raises(InternalError):
        books.fail(InternalError("the first failure is one too many"))


@pytest.mark.parametrize("error", [InvalidRequest("f", 1, "must not"), DeadlineExceeded("late")])
def test_what_no_other_worker_can_mend(error):
    books, _ = progress()
    with pytest.raises(type(error)):
        books.fail(error)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_an_exception_that_says_the_same(code):
    error = as_exception(ErrorInfo(code, "the words", True))
    assert "the words" in error.message
    assert not isinstance(error, WorkerLost), "who says something is not lost"


def test_that_a_worker_drains_survives_the_way_through_a_stream():
    assert isinstance(as_exception(error_info(Draining("d-0 is about to stop"))), Draining)


@pytest.mark.parametrize("value", ["9, tokens", 5, None, "x"])
def test_a_field_survives_the_way_through_a_stream(value):
    original = InvalidRequest("prompt", value, "at most 8 fit")
    back = as_exception(error_info(original))
    assert isinstance(back, InvalidRequest)
    assert (back.message, back.field) == (original.message, "prompt")


@pytest.mark.parametrize("error", [WorkerLost("died"), InvalidRequest("n", 1, "no")], ids=str)
def test_an_end_that_an_attempt_was_told_of_already_is_counted_once(error):
    books, _ = progress(max_failures=9)
    while True:
        try:
            books.fail(error)
        except DiptychError as end:
            before, failures = end, books.num_failures
            break
    with pytest.raises(type(before)) as again:
        books.fail(before)
    assert again.value is before
    assert books.num_failures == failures


def test_what_an_attempt_before_has_left_in_a_cache_is_no_hit_of_the_users():
    books, _ = progress()
    here, there = WorkerRef("d0", 1), WorkerRef("d1", 1)
    for ref, cached, counted in ((here, 0, None), (here, 32, 0), (there, 48, 48)):
        fresh, _ = progress()
        for worker in (here, ref):
            fresh.at[WorkerKind.DECODE] = worker
            fresh.departed(Route.COLOCATED)
        fresh.accept(TokenDelta("a", 0, (5,), num_cached_tokens=cached))
        assert fresh.num_cached_tokens == (cached if counted is None else counted)
    books.at[WorkerKind.DECODE] = here
    books.departed(Route.COLOCATED)
    books.accept(TokenDelta("a", 0, (5,), num_cached_tokens=16))
    assert books.num_cached_tokens == 16
