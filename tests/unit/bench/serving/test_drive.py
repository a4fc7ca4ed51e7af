"""Loads are sent when they should be, counted from then, and each turn of a conversation has the real answers before it."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest

from bench.serving.arrivals import arrival_times
from bench.serving.drive import LoadPlan, LoadRun, drive
from bench.serving.measures import details, measure, parse_limits
from bench.serving.requests import AskFailed, BenchRequest, Form, Outcome, Prompt, Reply, Turn
from bench.serving.synthetic import Shape, conversations, random_prompts
from bench.serving.writer import Writer
from contracts.errors import ConfigError


class StubTarget:
    """Answers when it is told to; notes what was asked and how many at once. `busy_s` is how long it keeps the loop for itself."""

    def __init__(self, gate: asyncio.Event | None = None, fail_on: Prompt | None = None, busy_s: float = 0.0) -> None:
        self.asked: list[Prompt] = []
        self.lens: list[int] = []
        self.now = self.most = 0
        self._gate, self._fail_on, self._busy_s = gate, fail_on, busy_s

    async def ask(self, prompt: Prompt, output_len: int) -> Reply:
        sent_s = time.monotonic()
        self.asked.append(prompt)
        self.lens.append(output_len)
        _keep_the_loop(self._busy_s)
        if prompt == self._fail_on:
            raise AskFailed("no")
        self.now += 1
        self.most = max(self.most, self.now)
        if self._gate is not None:
            await self._gate.wait()
        await asyncio.sleep(0)
        self.now -= 1
        at_s = time.monotonic()
        return Reply(sent_s, (at_s,) * output_len, output_len, 0, "<answer>", (7,) * output_len)

    async def close(self) -> None:
        pass


def _keep_the_loop(for_s: float) -> None:
    time.sleep(for_s)


def requests_of(count: int) -> list[BenchRequest]:
    return [BenchRequest((index,), 1, 1) for index in range(count)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float, variation: float) -> None:
    times = arrival_times(20_001, 50.0, burstiness, seed=0)
    assert times is not None and times[0] == 0.0
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.02)  # to the last digit, also where they are few
    few = arrival_times(5, 50.0, burstiness, seed=3)
    assert few is not None and few[-1] == pytest.approx(4 / 50) and few == tuple(sorted(few))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert times == arrival_times(20_001, 50.0, burstiness, seed=0) != arrival_times(20_001, 50.0, burstiness, seed=1)


def test_constant_gaps_are_equal_and_an_infinite_rate_schedules_nothing() -> None:
    assert arrival_times(4, 10.0, math.inf, seed=0) == pytest.approx((0.0, 0.1, 0.2, 0.3))
    assert arrival_times(4, math.inf, 1.0, seed=0) is None
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="must be above 0"):
            arrival_times(4, rate, burstiness, seed=0)


async def test_a_closed_loop_keeps_its_number_in_flight_and_counts_from_the_free_place() -> None:
    target = StubTarget()
    run = await drive(requests_of(20), LoadPlan(max_concurrency=3), target)
    assert target.most == 3 and target.asked == [(index,) for index in range(20)]
    assert all(outcome.ok and outcome.lag_s < 0.05 for outcome in run.outcomes)


async def test_in_a_closed_loop_a_request_is_due_when_a_place_gets_free() -> None:
    gate = asyncio.Event()
    load = asyncio.create_task(drive(requests_of(2), LoadPlan(max_concurrency=1), StubTarget(gate)))
    held_s = 0.03
    await asyncio.sleep(held_s)
    gate.set()
    first, second = (await load).outcomes
    assert first.ttft_s >= held_s * 0.9
    assert second.scheduled_s >= first.answered.arrivals_s[-1] and second.lag_s < held_s


async def test_a_client_that_is_late_itself_counts_from_the_schedule() -> None:
    """Each request keeps the event loop for three gaps: what comes later was due all the same."""
    busy_s, gap_s = 0.006, 0.002
    due = tuple(index * gap_s for index in range(4))
    run = await drive(requests_of(4), LoadPlan(due), StubTarget(busy_s=busy_s))
    assert [outcome.scheduled_s - run.begin_s for outcome in run.outcomes] == pytest.approx(due)
    assert run.outcomes[3].lag_s >= 3 * busy_s - due[3]
    assert details(run)["start_times"] == pytest.approx(due)


async def test_a_request_that_does_not_end_is_given_up() -> None:
    gate = asyncio.Event()  # never set
    run = await drive(requests_of(1), LoadPlan(request_timeout_s=0.01), StubTarget(gate))
    assert [outcome.error for outcome in run.outcomes] == ["no end within 0.01 s"]


@pytest.mark.parametrize("arrivals", [None, (0.0, 0.0)])
async def test_a_turn_is_due_when_its_user_has_thought_about_the_answer(arrivals: tuple[float, ...] | None) -> None:
    think_s = 0.02
    shape = Shape(num_prompts=2, input_len=3, output_len=1, turns=2, think_s=think_s)
    requests = conversations(shape, Writer(Form.IDS, seed=0))
    assert [request.prompt_len for request in requests] == [3, 3 + 1 + 3]
    first, second = (await drive(requests, LoadPlan(arrivals), StubTarget())).outcomes
    assert second.scheduled_s - first.answered.arrivals_s[-1] >= think_s


async def test_without_schedule_or_limit_all_are_sent_at_once() -> None:
    gate = asyncio.Event()
    target = StubTarget(gate)
    load = asyncio.create_task(drive(requests_of(50), LoadPlan(), target))
    while target.now < 50:
        await asyncio.sleep(0)
    gate.set()
    assert len((await load).outcomes) == 50


async def test_a_wait_for_a_place_is_part_of_the_latency() -> None:
    """Coordinated omission: the server holds the first answer; the second was due then, and waits in its name."""
    gate = asyncio.Event()
    load = asyncio.create_task(drive(requests_of(2), LoadPlan((0.0, 0.0), max_concurrency=1), StubTarget(gate)))
    held_s = 0.03
    await asyncio.sleep(held_s)
    gate.set()
    first, second = (await load).outcomes
    assert first.ttft_s >= held_s and second.ttft_s >= held_s
    assert second.answered.arrivals_s[0] - second.answered.sent_s < second.ttft_s
    assert second.lag_s >= held_s * 0.9


@pytest.mark.parametrize(
    ("form", "third"),
    [
        (Form.IDS, lambda a, b, c: (*a, 7, 7, *b, 7, 7, *c)),
        (Form.TEXT, lambda a, b, c: f"{a}<answer>{b}<answer>{c}"),
        (
            Form.CHAT,
            lambda a, b, c: (*a, Turn("assistant", "<answer>"), *b, Turn("assistant", "<answer>"), *c),
        ),
    ],
)
async def test_a_turn_continues_the_real_answers_before_it(form: Form, third: object) -> None:
    shape = Shape(num_prompts=6, input_len=5, output_len=2, turns=3)
    requests = conversations(shape, Writer(form, seed=0))
    assert [request.after for request in requests] == [None, None, 0, 1, 2, 3]
    target = StubTarget()
    run = await drive(requests, LoadPlan(max_concurrency=1), target)
    assert all(outcome.ok for outcome in run.outcomes)
    assert callable(third)
    for said in (0, 1):
        assert third(*(requests[said + 2 * turn].prompt for turn in range(3))) in target.asked


async def test_a_failed_turn_fails_those_after_it_and_nothing_else() -> None:
    requests = conversations(Shape(num_prompts=4, input_len=3, output_len=1, turns=2), Writer(Form.IDS, seed=0))
    run = await drive(requests, LoadPlan(), StubTarget(fail_on=requests[0].prompt))
    assert [outcome.error for outcome in run.outcomes] == ["no", "", "the turn before it failed", ""]
    fields = measure(run)
    assert (fields["completed"], fields["failed"]) == (2, 2)


def test_shared_prefixes_are_shared_and_nothing_else() -> None:
    shape = Shape(num_prompts=6, input_len=8, output_len=4, prefix_len=10, num_prefixes=2, range_ratio=0.5)
    prompts = [request.prompt for request in random_prompts(shape, Writer(Form.IDS, seed=0))]
    assert prompts == [request.prompt for request in random_prompts(shape, Writer(Form.IDS, seed=0))]
    assert len({prompt[:10] for prompt in prompts}) == 2 and len({prompt[:11] for prompt in prompts}) == 6
    assert all(14 <= len(prompt) <= 22 for prompt in prompts)
    assert all(prompt[:10] == prompts[index % 2][:10] for index, prompt in enumerate(prompts))


def outcome(scheduled: float, sent: float, *arrivals: float, tokens: int | None = None) -> Outcome:
    reply = Reply(sent, arrivals, len(arrivals) if tokens is None else tokens)
    return Outcome(scheduled, 10, reply)


def test_the_fields_are_those_of_vllm_by_name_and_meaning() -> None:
    outcomes = (outcome(0.0, 0.1, 0.5, 0.7, 0.9), outcome(1.0, 1.0, 1.1, 1.9, tokens=5), Outcome(2.0, 10, error="no"))
    run = LoadRun(outcomes, 0.0, 4.0)
    fields = measure(run, parse_limits(["ttft:400", "e2el:1000"]), (90.0, 99.0, 99.9))
    assert fields["mean_ttft_ms"] == pytest.approx(300) and fields["median_e2el_ms"] == pytest.approx(900)
    assert fields["mean_tpot_ms"] == pytest.approx((200 + 200) / 2)
    assert fields["mean_itl_ms"] == pytest.approx((200 + 200 + 800) / 3)
    assert fields["p99.9_ttft_ms"] == pytest.approx(np.percentile([100, 500], 99.9))
    assert fields["mean_send_lag_ms"] == pytest.approx(50)
    assert (fields["completed"], fields["failed"], fields["request_throughput"]) == (2, 1, 0.5)
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (20, 8)
    assert (fields["output_throughput"], fields["total_token_throughput"]) == (2.0, 7.0)
    assert fields["request_goodput"] == 0.25  # the first took 500 ms to its first token
    assert fields["max_concurrent_requests"] == 1
    assert fields["max_output_tokens_per_s"] == 5  # of the second answer, within the second second
    entries = details(run)
    assert entries["output_lens"] == [3, 5, 0] and entries["generated_texts"] == ["", "", ""]
    assert entries["e2els"] == pytest.approx([0.9, 0.9, 0.0]) and entries["ttfts"] == pytest.approx([0.5, 0.1, 0.0])
    assert entries["itls"] == [pytest.approx([0.2, 0.2]), pytest.approx([0.8]), []]
    assert entries["errors"] == ["", "", "no"] and entries["input_lens"] == [10, 10, 10]
    for each in outcomes[:2]:
        assert each.ttft_s + sum(each.itl_s) == pytest.approx(each.e2el_s)
    assert measure(run)["request_goodput"] is None


def test_a_statistic_of_nothing_is_none_and_not_a_perfect_zero() -> None:
    fields = measure(LoadRun((outcome(0.0, 0.0, 0.5),), 0.0, 1.0), parse_limits(["tpot:1"]))
    assert fields["mean_ttft_ms"] == 500 and fields["request_goodput"] == 1
    assert {fields[name] for name in fields if name.endswith(("_tpot_ms", "_itl_ms"))} == {None}
    nothing = measure(LoadRun((Outcome(0.0, 10, error="no"),), 0.0, 1.0))
    assert nothing["p99_ttft_ms"] is None and nothing["max_output_tokens_per_s"] == 0


@pytest.mark.parametrize("bad", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", "ttft:inf", ":3"])
def test_a_bad_goodput_says_what_is_allowed(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"--goodput: .* must be one of ttft:MS"):
        parse_limits([bad])
