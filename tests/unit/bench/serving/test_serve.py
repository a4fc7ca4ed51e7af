"""A sweep sends each point what its flags say, at the times that they say, and warms up with what no point sends again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.serving.measures import parse_limits
from bench.serving.requests import Form, Prompt, Reply
from bench.serving.serve import DataConfig, ServeConfig, requests_maker, serve
from bench.serving.synthetic import Shape
from cli.commands.bench import serve_command
from cli.commands.benchflags import data_config, serve_config
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
    fields = results[0][1]
    assert max(seen) == 2 and fields["max_concurrency"] == 2
    assert fields.keys().isdisjoint({"ttfts", "itls", "generated_texts"}), "not asked for"


def test_made_up_lengths_fill_their_range_and_ids_are_no_special_ones() -> None:
    shape = Shape(num_prompts=200, input_len=20, output_len=10, range_ratio=0.5)
    requests = requests_maker(DataConfig("random", shape, Form.IDS, vocab_size=300))(0)
    assert {len(request.prompt) for request in requests} == set(range(10, 31))
    assert {request.output_len for request in requests} == set(range(5, 16))
    ids = {token for request in requests for token in request.prompt}
    assert ids == set(range(256, 300))


def test_every_flag_says_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("x")
    flags = {
        "--num-prompts": "7", "--input-len": "11", "--output-len": "12", "--range-ratio": "0.25", "--prefix-len": "13",
        "--num-prefixes": "14", "--turns": "15", "--think-time": "1.5", "--seed": "16", "--vocab-size": "1700",
        "--trace-block-size": "18", "--trace-speed": "1.9", "--num-warmups": "20", "--request-timeout": "21",
        "--dataset-name": "mooncake", "--dataset-path": str(tmp_path / "trace"), "--tokenizer": str(tmp_path),
        "--request-rate": "22,23.5", "--max-concurrency": "24,25", "--burstiness": "0.26", "--goodput": "ttft:27",
        "--metric-percentiles": "28,29.5",
    }  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    given = serve_command.make_context("serve", [*words, "--save-detailed"]).params
    shape = Shape(7, 11, 12, 0.25, 13, 14, 15, 1.5)
    trace = tmp_path / "trace"
    assert data_config(given, "diptych") == DataConfig(  # type: ignore[arg-type]
        "mooncake", shape, Form.IDS, trace, output_len=12, seed=16, vocab_size=1700, tokenizer=tmp_path, block_tokens=18
    )
    assert serve_config(given) == ServeConfig(  # type: ignore[arg-type]
        (22.0, 23.5), (24, 25), 0.26, 16, 20, parse_limits(["ttft:27"]), (28.0, 29.5), 21.0, 1.9, detailed=True
    )
