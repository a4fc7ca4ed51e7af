"""Answers to one request: their seeds, of which the first is the request's own and no two are equal, and where their time went."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.clock import VirtualClock
from contracts.request import FinishReason, TokenDelta
from contracts.sampling import MAX_SEED, SamplingParams
from observability.metrics import RouterMetrics
from observability.stages import StageTimes
from router.choosing.route import Route
from router.config import RetryConfig
from router.exchange import MAX_ANSWERS, Ask, TokenPrompt
from router.serving.answers import Answers, Making, Times, derived_seed
from router.serving.progress import Job, Progress
from router.text.model_card import load_model_card
from tests.integration.router_harness import MODEL, TINY

seeds = st.integers(0, MAX_SEED)


@given(seeds)
def test_the_first_has_the_requests_own_and_all_are_distinct_and_valid(seed):
    derived = [derived_seed(seed, index) for index in range(MAX_ANSWERS)]
    assert derived[0] == seed
    assert len(set(derived)) == MAX_ANSWERS
    assert all(0 <= value <= MAX_SEED for value in derived)


@given(seeds, st.integers(1, 2**40))
def test_requests_with_seeds_near_each_other_share_none(seed, distance):
    near = (seed + distance) & MAX_SEED
    ours = {derived_seed(seed, index) for index in range(MAX_ANSWERS)}
    assert ours.isdisjoint(derived_seed(near, index) for index in range(MAX_ANSWERS))


def test_the_function_is_what_the_protocol_says():
    assert [derived_seed(7, index) for index in range(3)] == [7, 0x4F1B_BCDC_BFA5_3E12, 0x1E37_79B9_7F4A_7C1D]


METRICS = RouterMetrics("m", list, lambda: (0, 0))


class OneWorker:
    """A flow over one worker whose tokens are made at these instants, and heard a quarter of a second later."""

    def __init__(self, clock, made_at):
        self.clock, self.made_at = clock, made_at

    def start(self, job, beside=None):
        return Progress(job, self.clock, RetryConfig(), beside)

    async def deltas(self, progress):
        progress.departed(Route.COLOCATED)
        told = [StageTimes(prefill_compute_s=1.0), StageTimes(decode_queue_s=0.5, first_step_s=1.0)]
        for index, made in enumerate(self.made_at):
            self.clock.skip(max(0.0, made + 0.25 - self.clock.now()))
            finish = FinishReason.LENGTH if index + 1 == len(self.made_at) else None
            stages = told[index] if index < 2 else None
            yield progress.accept(TokenDelta("a", index, (5 + index,), finish_reason=finish, stages=stages))


@pytest.mark.parametrize(
    ("reader_s", "num_tokens", "stages"),
    [
        (0.0, 3, StageTimes(prefill_compute_s=1.0, notify_s=0.25, decode_queue_s=0.5, first_step_s=1.0)),
        (0.0, 2, StageTimes(prefill_compute_s=1.0, notify_s=0.25, decode_queue_s=0.5, first_step_s=1.0)),
        # It takes half a second for each token: the queue has gone by when it has the first.
        (0.5, 3, StageTimes(prefill_compute_s=1.0, notify_s=0.25, emit_s=0.5, first_step_s=1.0, relay_s=0.5)),
        # … so long that the second is there before it has the first.
        (2.0, 3, StageTimes(prefill_compute_s=1.0, notify_s=0.25, emit_s=2.0, relay_s=2.0)),
        (0.0, 1, StageTimes(prefill_compute_s=1.0, notify_s=0.25)),
    ],
)
async def test_both_spans_end_when_the_reader_has_the_token(reader_s, num_tokens, stages):
    clock = VirtualClock()
    making = Making(
        load_model_card(TINY, MODEL).tokenizer, OneWorker(clock, [1.0, 2.5, 3.0][:num_tokens]), clock, METRICS
    )
    sampling = SamplingParams(max_tokens=num_tokens)
    ask = Ask(request_id="r", prompt=TokenPrompt((3, 4)), sampling=sampling)
    times = Times(0.0, 0.0, admitted=0.0, tokenised=0.0)
    answers = Answers(
        ask, [Job(request_id="r", prompt_token_ids=(3, 4), sampling=sampling, deadline=60.0)], times, making
    )
    async for piece in answers.pieces():
        ending = piece.ending
        clock.skip(reader_s)
    spent = ending.spent
    assert spent.stages == stages
    assert spent.ttft_s == 1.25 + (reader_s if num_tokens > 1 else 0.0)
    assert spent.gap_s == (None if num_tokens == 1 else 1.5 if reader_s < 1 else 2.0)
    assert spent.ttft_unexplained_s == 0
    assert spent.gap_unexplained_s in (0, None)


async def test_what_was_before_an_attempt_is_receiving_admission_words_and_a_choice():
    clock = VirtualClock()
    making = Making(load_model_card(TINY, MODEL).tokenizer, OneWorker(clock, [18.0]), clock, METRICS)
    sampling = SamplingParams(max_tokens=1)
    ask = Ask(request_id="r", prompt=TokenPrompt((3, 4)), sampling=sampling)
    job = Job(request_id="r", prompt_token_ids=(3, 4), sampling=sampling, deadline=60.0)
    clock.skip(16.0)
    answers = Answers(ask, [job], Times(arrived=0.5, received=1.0, admitted=3.0, tokenised=7.0), making)
    async for piece in answers.pieces():
        spent = piece.ending.spent
    told = StageTimes(receive_s=0.5, admission_s=2.0, tokenise_s=4.0, route_s=9.0)
    assert spent.stages == replace(told, prefill_compute_s=1.0, notify_s=1.25)
    assert spent.ttft_s == spent.stages.ttft_s == 17.75


async def test_the_gap_is_from_having_one_token_to_having_the_next():
    """A reader takes a second for the first, and three for the second, which it hears half a second after it had the first."""
    clock = VirtualClock()
    making = Making(load_model_card(TINY, MODEL).tokenizer, OneWorker(clock, [1.0, 2.5, 3.0]), clock, METRICS)
    sampling = SamplingParams(max_tokens=3)
    ask = Ask(request_id="r", prompt=TokenPrompt((3, 4)), sampling=sampling)
    job = Job(request_id="r", prompt_token_ids=(3, 4), sampling=sampling, deadline=60.0)
    answers = Answers(ask, [job], Times(0.0, 0.0, admitted=0.0, tokenised=0.0), making)
    takes = iter((1.0, 3.0, 0.0))
    async for piece in answers.pieces():
        clock.skip(next(takes))
        if piece.ending is not None:
            spent = piece.ending.spent
    assert (spent.ttft_s, spent.gap_s) == (2.25, 3.5)
    assert (spent.ttft_unexplained_s, spent.gap_unexplained_s) == (0, 0)
