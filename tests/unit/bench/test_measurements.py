"""What is measured is what is asked for: prompts that share nothing, fair turns, right arithmetic from times to verdicts."""

import random

import pytest

from bench.cluster import Look, vocab_size_of
from bench.engine import DECODE_BARS, EngineBenchConfig, engine_report, random_prompts, run_rounds
from bench.limits import Limits
from bench.load import LoadAnswer, LoadFailed, Protocol, Route
from bench.overhead import RunnerTimes, Shares, overhead_report
from bench.stats import Spread, TokenTimes
from bench.streams import (
    AloneRound,
    Pair,
    ServedRound,
    StreamsBenchConfig,
    looks_inside,
    stream_prompts,
    streams_report,
)
from bench.ttft import WARM_PAIRS, TtftBenchConfig, alternating_requests, ttft_report
from observability.stages import HandoffStats

LIMITS = Limits(2, Spread((40.0,)), Spread((20.0,)), Spread((800.0,)))


class Metronome:
    """Makes a token every `step_s` and notes what it was asked."""

    def __init__(self, name, step_s, log):
        self.name, self.step_s, self.log = name, step_s, log

    def step_ends_s(self, prompts, num_tokens):
        self.log.append((self.name, len(prompts), tuple(prompts[0][:4])))
        return tuple(self.step_s * (i + 1) for i in range(num_tokens))


def test_the_engine_is_measured_in_turns_on_the_same_prompts():
    log, config = [], EngineBenchConfig(rounds=4, prefill_tokens=8, decode_prompt_tokens=4, decode_tokens=3)
    times = run_rounds(Metronome("a", 0.5, log), Metronome("b", 1.0, log), config, lambda _: None)
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 4, "b": 4}
    calls = 1 + len(DECODE_BARS)
    measured = log[2 * calls :]
    order = [measured[i][0] for i in range(0, len(measured), calls)]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    prompts = {name: [call[1:] for call in measured if call[0] == name] for name in "ab"}
    assert prompts["a"] == prompts["b"]
    assert len(set(prompts["a"])) == len(prompts["a"])


def test_engine_ratios_say_how_much_faster_ours_is():
    config = EngineBenchConfig(rounds=3, prefill_tokens=8, decode_prompt_tokens=4, decode_tokens=3)
    times = run_rounds(Metronome("ours", 0.5, []), Metronome("peer", 1.0, []), config, lambda _: None)
    report = engine_report(LIMITS, "ours", times, config)
    assert [v.value for v in report.verdicts] == pytest.approx([2.0] * 4)
    assert [v.met for v in report.verdicts] == [True, True, False, False]
    assert all(len(m.runs) == 3 for m in report.measures[:8])


def test_overhead_is_all_but_the_forward():
    share = Shares()
    share.add([1.5, 1.5], [RunnerTimes(0.9, 0.05, 0.1, 1.4)] * 2)
    assert share.engine == pytest.approx([10.0])
    assert share.outside_forward == pytest.approx([10.0 + 5.0 + 10.0])
    report = overhead_report({1: share}, EngineBenchConfig())
    assert not report.verdicts[0].met


def test_ttft_prompts_alternate_and_share_no_beginning():
    config = TtftBenchConfig(pairs=4, prompt_tokens=20)
    requests = alternating_requests(config, vocab_size=500)
    ways = [request.route for request in requests]
    assert len(requests) == 2 * (WARM_PAIRS + 4)
    assert all({ways[i], ways[i + 1]} == {Route.DISAGGREGATED, Route.COLOCATED} for i in range(0, len(ways), 2))
    assert {ways[i] for i in range(0, len(ways), 2)} == {Route.DISAGGREGATED, Route.COLOCATED}
    assert len({request.prompt[:16] for request in requests}) == len(requests)


def answer(way, ttft_s):
    times = TokenTimes(1.0, (1.0 + ttft_s, 1.2 + ttft_s), (1, 1))
    return LoadAnswer(times, 2, 0, way, HandoffStats("shm", 10**9, 1, 1, 0, 0.5, 0.1))


def test_ttft_compares_medians():
    answers = [answer(Route.DISAGGREGATED, t) for t in (0.104, 0.103, 0.9)]
    answers += [answer(Route.COLOCATED, t) for t in (0.1, 0.1, 0.1)]
    report = ttft_report(answers, "m", TtftBenchConfig(pairs=3))
    assert report.verdicts[0].value == pytest.approx(4.0)
    assert report.verdicts[0].met
    rate = next(m for m in report.measures if m.name == "hand-off, rate")
    assert rate.runs == pytest.approx((2.0,) * 3)


def test_every_run_of_streams_has_prompts_of_its_own():
    config = StreamsBenchConfig(streams=3, prompt_tokens=8)
    first, second = (stream_prompts(config, 1000, run) for run in (0, 1))
    assert len({*first, *second}) == 6
    assert stream_prompts(config, 1000, 0) == first


def test_what_serving_adds_is_the_sum_of_its_parts():
    served = ServedRound(0.056, 0.0545, 1.0, {"router": 0.0001, "decode": 0.0021, "prefill": 0.0})
    runs = [Pair(served, AloneRound(0.053, 0.002), AloneRound(0.055, 0.002))] * 3
    report = streams_report({Protocol.GRPC: runs}, "m", StreamsBenchConfig())
    by_name = {m.name: m.runs[0] for m in report.measures}
    assert report.verdicts[0].value == pytest.approx(2.0 / 32)
    assert report.verdicts[1].value == pytest.approx(2.0)
    assert by_name["grpc: added to each token"] == pytest.approx(2.0)
    assert by_name["grpc: of it between two steps"] == pytest.approx(1.5)
    assert by_name["grpc: of it in the step itself"] == pytest.approx(0.5)
    assert by_name["grpc: CPU added per token"] == pytest.approx(0.2)
    assert by_name["grpc: added, per token made"] == pytest.approx(2.0 / 32)


def test_counters_are_taken_inside_the_window_only():
    looks = [Look(float(at), at * 10, at * 0.5, {}) for at in range(6)]
    first, last = looks_inside(looks, (0.5, 4.5))
    assert (first.at_s, last.at_s) == (1.0, 4.0)
    for window in ((0.5, 1.5), (9.0, 10.0), (4.0, 1.0)):
        with pytest.raises(LoadFailed, match="too briefly"):
            looks_inside(looks, window)


def test_random_prompts_are_in_the_vocabulary_and_repeatable():
    prompts = random_prompts(random.Random(3), 4, 10, 50)
    assert prompts == random_prompts(random.Random(3), 4, 10, 50)
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)


def test_the_vocabulary_is_read_from_the_config(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 321, "other": [1]}')
    assert vocab_size_of(tmp_path) == 321
