"""The offline twins run every token of every prompt and count them; the time is the engine's own."""

from __future__ import annotations

import pytest

from bench.serving.offline import batch_latency, throughput
from bench.serving.requests import Form
from bench.serving.synthetic import Shape, random_prompts
from bench.serving.writer import Writer
from contracts.clock import MonotonicClock
from contracts.errors import ConfigError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner

STEP_S = 0.002
OUTPUT = 5


def engine() -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(FakeModel(vocab_size=1000), 64, step_s=STEP_S)
    return Engine(runner, EngineConfig(), MonotonicClock()), runner


def test_a_batch_takes_its_steps_and_warm_ups_are_not_counted() -> None:
    under_test, runner = engine()
    batches = [random_prompts(Shape(3, 20, OUTPUT), Writer(Form.IDS, number, 1000)) for number in range(4)]
    done: list[int] = []
    result = batch_latency(under_test, batches, warmups=1, on_done=lambda: done.append(runner.num_steps))
    latencies = result["latencies"]
    assert isinstance(latencies, list) and len(latencies) == 3 and len(done) == 4
    assert done[-1] - done[0] == 3 * OUTPUT
    assert result["avg_latency"] == pytest.approx(sum(latencies) / 3)
    assert min(latencies) >= OUTPUT * STEP_S


def test_throughput_counts_what_was_asked_for_over_the_time_it_took() -> None:
    under_test, runner = engine()
    result = throughput(under_test, random_prompts(Shape(12, 20, OUTPUT), Writer(Form.IDS, 0, 1000)))
    assert (result["num_requests"], result["total_num_tokens"], result["total_output_tokens"]) == (12, 300, 60)
    elapsed = float(str(result["elapsed_time"]))
    assert elapsed >= runner.num_steps * STEP_S and result["tokens_per_second"] == pytest.approx(300 / elapsed)


def test_a_prompt_that_cannot_run_is_named() -> None:
    under_test, _ = engine()
    with pytest.raises(ConfigError, match="prompt 1: "):
        throughput(under_test, random_prompts(Shape(1, 5000, OUTPUT), Writer(Form.IDS, 0, 1000)))


def test_throughput_tells_of_each_prompt_that_is_done() -> None:
    under_test, _ = engine()
    done: list[int] = []
    throughput(under_test, random_prompts(Shape(7, 20, OUTPUT), Writer(Form.IDS, 0, 1000)), lambda: done.append(1))
    assert len(done) == 7
