"""A sweep sends each point what its flags say, at the times that they say, and warms up with what no point sends again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.serving.requests import Form, Prompt, Reply
from bench.serving.serve import DataConfig, ServeConfig, requests_maker, serve
from bench.serving.synthetic import Shape
from tests.unit.bench.serving.test_drive import StubTarget

FOUR = Shape(num_prompts=4, input_len=6, output_len=2)


def data(dataset: str = "random", shape: Shape = FOUR, path: Path | None = None, **more: int) -> DataConfig:
    return DataConfig(dataset, shape, Form.IDS, path, block_tokens=4, **more)


async def test_what_warms_up_is_sent_by_no_point_and_no_point_sends_what_another_did() -> None:
    target = StubTarget()
    config = ServeConfig(concurrencies=(1, 2), num_warmups=3)
    await serve(target, requests_maker(data()), config)
    assert len(target.asked) == 3 + 4 + 4
    assert len({prompt[:4] for prompt in target.asked if isinstance(prompt, tuple)}) == 3 + 4 + 4


async def test_a_warm_up_is_a_first_turn() -> None:
    target = StubTarget()
    make = requests_maker(data("multi-turn", Shape(4, 6, 2, turns=2)))
    await serve(target, make, ServeConfig(num_warmups=3))
    assert [len(prompt) for prompt in target.asked[:3]] == [6, 6, 6]


@pytest.mark.parametrize(("speed", "output_len"), [(100.0, None), (25.0, 7)])
async def test_a_trace_comes_at_its_own_times_with_its_own_lengths(
    tmp_path: Path, speed: float, output_len: int | None
) -> None:
    entries = [{"timestamp": at_ms, "input_length": 4, "output_length": 3, "hash_ids": [1]} for at_ms in (5, 255, 505)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    target = StubTarget()
    more = {} if output_len is None else {"output_len": output_len}
    make = requests_maker(data("mooncake", Shape(3), tmp_path / "t.jsonl", **more))
    ((_, fields),) = await serve(target, make, ServeConfig(trace_speed=speed, num_warmups=0, detailed=True))
    assert fields["start_times"] == pytest.approx([0.0, 0.25 / speed, 0.5 / speed])
    assert target.lens == [output_len or 3] * 3 and fields["request_rate"] == "trace"


async def test_a_rate_and_its_burstiness_are_what_requests_are_sent_by() -> None:
    config = ServeConfig(rates=(400.0, math.inf), burstiness=math.inf, num_warmups=0, detailed=True)
    (_, paced), (_, at_once) = await serve(StubTarget(), requests_maker(data()), config)
    assert paced["start_times"] == pytest.approx([0.0, 0.0025, 0.005, 0.0075])
    assert at_once["start_times"] == [0.0] * 4
    config = ServeConfig(rates=(400.0,), burstiness=0.3, num_warmups=0, detailed=True)
    ((_, bursty),) = await serve(StubTarget(), requests_maker(data()), config)
    assert bursty["start_times"] != paced["start_times"] and (bursty["request_rate"], bursty["burstiness"]) == (
        400,
        0.3,
    )


async def test_a_limit_holds_in_every_point() -> None:
    class Slow(StubTarget):
        async def ask(self, prompt: Prompt, output_len: int) -> Reply:
            reply = await super().ask(prompt, output_len)
            seen.append(self.most)
            return reply

    seen: list[int] = []
    target = Slow()
    results = await serve(target, requests_maker(data()), ServeConfig(concurrencies=(2,), num_warmups=0))
    assert max(seen) == 2 and results[0][1]["max_concurrency"] == 2
