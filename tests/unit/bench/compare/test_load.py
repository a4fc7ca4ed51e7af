"""A cell's load: what streams wait is measured in the window alone, with all of them under way, and to the end of a stall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from bench.compare.load import BEGIN_S, WARM_TOKENS, Cell, LoadConfig, run_cell, warm_up
from bench.compare.numbers import numbers, stream_gaps_s
from bench.serving.grpc_target import Heard
from bench.serving.measures import Limits
from bench.serving.requests import AskFailed, Prompt, Reply
from contracts.pb.diptych.v1 import inference_pb2 as pb

GAP_S = 0.004
CONFIG = LoadConfig(streams=3, stream_input_len=5, stream_output_len=1000, output_len=2, window_s=0.12, pause_s=0.0)
CELL = Cell(7, 25.0)


class Steady:
    """A server whose streams bring a token each GAP_S; `hold_s` says how long one is held back, by its stream's prompt."""

    def __init__(self, hold_s: Callable[[Prompt], float] = lambda _: 0.0, first_s: float = 0.0) -> None:
        self.streams: list[Prompt] = []
        self.asked: list[Prompt] = []
        self._hold_s, self._first_s = hold_s, first_s

    async def hear(self, prompt: Prompt, output_len: int, heard: list[Heard]) -> None:
        self.streams.append(prompt)
        await asyncio.sleep(self._first_s)
        for number in range(output_len):
            await asyncio.sleep(max(GAP_S, self._hold_s(prompt)))
            heard.append((time.monotonic(), pb.GenerateResponse(token_ids=[number])))

    async def ask(self, prompt: Prompt, output_len: int) -> Reply:
        self.asked.append(prompt)
        sent_s = time.monotonic()
        await asyncio.sleep(GAP_S)
        return Reply(sent_s, (time.monotonic(),) * output_len, output_len, len(prompt))


async def test_a_window_is_as_long_as_it_is_said_and_all_streams_are_under_way_in_all_of_it() -> None:
    server = Steady(first_s=BEGIN_S)
    run = await run_cell(server, CELL, CONFIG, seed=3)  # type: ignore[arg-type]
    assert run.end_s - run.begin_s == pytest.approx(CONFIG.window_s)
    assert [outcome.scheduled_s - run.begin_s for outcome in run.prompts] == pytest.approx([0.02, 0.06, 0.1])
    assert [len(prompt) for prompt in server.asked] == [7] * 3 and len(set(server.asked)) == 3
    assert [answer.place for answer in run.streams] == [(0, 0), (1, 0), (2, 0)]
    for answer in run.streams:
        assert answer.arrivals_s[WARM_TOKENS - 1] < run.begin_s - BEGIN_S / 2
        assert answer.arrivals_s[-1] > run.end_s, "the gap into which the end falls counts as a whole"
    assert [len(prompt) for prompt in server.streams] == [5] * 3 and len(set(server.streams)) == 3


async def test_a_stall_that_begins_in_the_window_counts_to_its_end() -> None:
    begun_s = time.monotonic()
    stall_s = CONFIG.window_s + 0.1

    def hold_s(prompt: Prompt) -> float:
        mine = bool(server.streams) and prompt == server.streams[0]
        return stall_s if mine and server.asked and not stalled.is_set() and not stalled.set() else 0.0

    stalled = asyncio.Event()
    server = Steady(hold_s)
    run = await run_cell(server, CELL, CONFIG, seed=3)  # type: ignore[arg-type]
    assert max(stream_gaps_s(run)) >= stall_s
    assert numbers(run, Limits())["stream_itl_max"] >= stall_s * 1e3
    assert run.end_s - begun_s < stall_s + 1


async def test_a_stream_that_ends_begins_anew_with_another_prompt() -> None:
    server = Steady()
    short = LoadConfig(streams=1, stream_input_len=5, stream_output_len=9, output_len=1, window_s=0.1, pause_s=0.0)
    run = await run_cell(server, CELL, short, seed=3)  # type: ignore[arg-type]
    assert [answer.place for answer in run.streams] == [(0, turn) for turn in range(len(run.streams))]
    assert len(run.streams) >= 2 and len(set(server.streams)) == len(server.streams)


async def test_the_same_seed_is_the_same_load_and_another_is_another() -> None:
    sent = []
    for seed in (3, 3, 4):
        server = Steady()
        await run_cell(server, CELL, CONFIG, seed)  # type: ignore[arg-type]
        sent.append((server.asked, server.streams))
    assert sent[0] == sent[1] and not set(sent[0][0] + sent[0][1]) & set(sent[2][0] + sent[2][1])


async def test_a_stream_that_breaks_off_ends_the_cell() -> None:
    def hold_s(_: Prompt) -> float:
        if server.asked:
            raise AskFailed("worker lost")
        return 0.0

    server = Steady(hold_s)
    with pytest.raises(AskFailed, match="worker lost"):
        await run_cell(server, CELL, CONFIG, seed=3)  # type: ignore[arg-type]


async def test_each_worker_warms_up_with_each_length() -> None:
    server = Steady()
    await warm_up(server, (7, 20), CONFIG, workers=2)  # type: ignore[arg-type]
    assert [len(prompt) for prompt in server.asked] == [7, 7, 20, 20] and len(set(server.asked)) == 4
