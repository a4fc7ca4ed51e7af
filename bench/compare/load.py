"""The load of one cell: streams that decode steadily, while prompts arrive.

    streams begin ─▶ all are under way ─▶ window: prompts arrive at their times ─▶ their answers end ─▶ streams are left

What a stream's user sees is measured in the window alone: a gap counts when it begins there, however late it ends, so that a
system is charged for a stall, and not diluted by a quiet end. Prompts are measured to their ends. A stream that ends begins
anew with another prompt. All prompts are made from (seed, cell, round), the same for every system. Does not know systems.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from bench.serving.arrivals import arrival_times
from bench.serving.drive import LoadPlan, drive
from bench.serving.grpc_target import GrpcTarget, Heard
from bench.serving.requests import AskFailed, BenchRequest, Form, Outcome, Prompt
from bench.serving.writer import Writer

WARM_TOKENS = 4
BEGIN_S = 0.1
POLL_S = 0.02
START_TIMEOUT_S = 120.0
Place = tuple[int, int]
"""Which of the streams, and its how many-th answer."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: prompts of `input_len` tokens, `rate` a second."""

    input_len: int
    rate: float

    @property
    def input_rate(self) -> float:
        """Prompt tokens a second."""
        return self.input_len * self.rate

    @property
    def label(self) -> str:
        """As it stands in the table."""
        return f"{self.input_len} tokens, {self.rate:.3g}/s"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What is the same in every cell. Times in seconds; `burstiness` as in `arrivals`."""

    streams: int = 4
    stream_input_len: int = 64
    stream_output_len: int = 2048
    output_len: int = 16
    window_s: float = 8.0
    burstiness: float = float("inf")
    pause_s: float = 0.5
    seed: int = 0
    vocab_size: int = 32_000


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """What came of one answer of a stream: when, and how many tokens at each time; it may have been left before its end."""

    place: Place
    arrivals_s: tuple[float, ...]
    counts: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CellRun:
    """One cell, once, on one system: the window, the streams, and what became of each prompt."""

    begin_s: float
    end_s: float
    streams: tuple[StreamAnswer, ...]
    prompts: tuple[Outcome, ...]


@dataclass(slots=True)
class _Streams:
    """The streams under way. Owns their tasks between `begin` and `leave`."""

    target: GrpcTarget
    config: LoadConfig
    writer: Writer
    heard: dict[Place, list[Heard]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self) -> None:
        """Return when every one brings tokens. Raises AskFailed."""
        self.tasks = [asyncio.create_task(self._keep(number)) for number in range(self.config.streams)]
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not all(len(self.heard.get((number, 0), ())) >= WARM_TOKENS for number in range(self.config.streams)):
            self.check()
            if time.monotonic() > give_up_s:
                raise AskFailed(f"the streams do not all bring tokens within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raises AskFailed where a stream broke off."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def leave(self) -> None:
        """As a client that closes its connection."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def _keep(self, number: int) -> None:
        for turn in itertools.count():
            heard = self.heard[number, turn] = []
            prompt = self.writer.write((1, number, turn), self.config.stream_input_len)
            await self.target.hear(prompt, self.config.stream_output_len, heard)

    def answers(self) -> tuple[StreamAnswer, ...]:
        """What has come."""
        answers = []
        for place, heard in sorted(self.heard.items()):
            brought = [(at_s, tuple(piece.token_ids)) for at_s, piece in heard if piece.token_ids]
            times = tuple(at_s for at_s, _ in brought)
            counts = tuple(len(ids) for _, ids in brought)
            answers.append(StreamAnswer(place, times, counts, tuple(token for _, ids in brought for token in ids)))
        return tuple(answers)


def prompts_of(cell: Cell, config: LoadConfig, writer: Writer) -> tuple[tuple[BenchRequest, ...], tuple[float, ...]]:
    """The prompts of a window and when they come, in seconds from its begin; at least one."""
    count = max(1, round(cell.rate * config.window_s))
    times = arrival_times(count, cell.rate, config.burstiness, writer.seed)
    assert times is not None  # a cell's rate is finite
    half_s = 0.5 / cell.rate if cell.rate * config.window_s >= 1 else config.window_s / 4
    due = tuple(half_s + at_s for at_s in times)
    requests = tuple(
        BenchRequest(writer.write((0, index), cell.input_len), config.output_len, cell.input_len)
        for index in range(count)
    )
    return requests, due


async def run_cell(target: GrpcTarget, cell: Cell, config: LoadConfig, seed: int) -> CellRun:
    """One cell's load on one system. Raises AskFailed when a stream breaks off; a prompt that failed is in its outcome."""
    writer = Writer(Form.IDS, seed, config.vocab_size)
    requests, due = prompts_of(cell, config, writer)
    streams = _Streams(target, config, writer)
    try:
        await streams.begin()
        plan = LoadPlan(tuple(BEGIN_S + at_s for at_s in due))
        run = await drive(requests, plan, target)
        begin_s = run.begin_s + BEGIN_S
        end_s = begin_s + config.window_s
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        await _next_tokens(streams, end_s)
        streams.check()
    finally:
        await streams.leave()
    await asyncio.sleep(config.pause_s)
    return CellRun(begin_s, end_s, streams.answers(), run.outcomes)


async def _next_tokens(streams: _Streams, after_s: float) -> None:
    """Until every stream has brought a token after `after_s`: the gap that the window's end falls into counts as a whole."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    waiting = set(range(streams.config.streams))
    while waiting and time.monotonic() < give_up_s:
        streams.check()
        latest = {place[0]: heard[-1][0] for place, heard in sorted(streams.heard.items()) if heard}
        waiting = {number for number in waiting if latest.get(number, 0.0) <= after_s}
        await asyncio.sleep(POLL_S)
    if waiting:
        raise AskFailed(f"{len(waiting)} streams stand still for {START_TIMEOUT_S:g} s")


async def warm_up(target: GrpcTarget, lengths: tuple[int, ...], config: LoadConfig, workers: int) -> None:
    """One prompt of each length for each worker, unmeasured. Raises AskFailed."""
    writer = Writer(Form.IDS, config.seed + 999_999, config.vocab_size)

    async def one(length: int, worker: int) -> None:
        prompt: Prompt = writer.write((2, length, worker), length)
        await target.ask(prompt, config.output_len)

    for length in lengths:
        await asyncio.gather(*(one(length, worker) for worker in range(workers)))
