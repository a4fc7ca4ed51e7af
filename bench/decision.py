"""The choice between one pool and two on real workers: each cell of a grid asked three ways, in turns, on one cluster.

    cell = (prompt tokens, cached share, load)
    load: idle | streams (answers that run at decode) | busy (prompts that wait at prefill)
    round: (prime the prefix at decode) ─▶ pause ─▶ load ─▶ probe ─▶ pause;   always remote, always local, auto take turns

What a probe costs is the delay that it causes, in seconds, as the router's own model has it (docs/adr/0022):

    time from sending it to its second token  +  weight · Σ over streams of the time that they lost meanwhile

A stream's loss is the time from its last token before the probe was sent to its first after the probe's second token, less
what as many tokens take it in quiet at that time: a straight line through the pauses before and after, since a token takes
longer as contexts grow. All together not below 0. Streams are begun anew every few rounds. Does not know how the router decides.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from bench.cluster import ServedCluster
from bench.load import LoadFailed, Route
from bench.progress import Say
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from rpc.channel import open_channel

ORDINARY_FROM = 32  # ids below are special tokens in some vocabularies
WAYS = (Route.DISAGGREGATED, Route.COLOCATED, Route.ANY)
_ROUTES = {
    Route.ANY: inference_pb2.ROUTE_UNSPECIFIED,
    Route.DISAGGREGATED: inference_pb2.ROUTE_DISAGGREGATED,
    Route.COLOCATED: inference_pb2.ROUTE_COLOCATED,
}
_TIMEOUT_S = 300.0
_STINT = 3  # rounds with the same streams


@dataclass(frozen=True, slots=True)
class Situation:
    """What else goes on: `streams` answers at the decode worker, `busy` prompts of `busy_tokens` before it at prefill."""

    name: str
    streams: int = 0
    busy: int = 0
    busy_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid."""

    num_tokens: int
    cached_share: float
    situation: Situation

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{self.num_tokens} tokens, {self.cached_share:.0%} cached at decode, {self.situation.name}"


@dataclass(frozen=True, slots=True)
class DecisionBenchConfig:
    """The grid; `rounds` by prompt length, because short prompts are cheap and noisy, and more of them, `stream_rounds`, where
    streams run, whose losses scatter by more than what is to be told apart. `weight` is the router's default.
    """

    rounds: dict[int, int] = field(default_factory=lambda: {48: 5, 256: 3, 1024: 2})
    stream_rounds: dict[int, int] = field(default_factory=lambda: {48: 15, 256: 9, 1024: 9})
    cached_shares: tuple[float, ...] = (0.0, 0.75)
    situations: tuple[Situation, ...] = (
        Situation("idle"),
        Situation("4 streams", streams=4),
        Situation("2 prompts waiting at prefill", busy=2),
    )
    weight: float = 1.0
    pause_s: float = 0.3
    warm_rounds: int = 2
    seed: int = 0

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All points."""
        return tuple(Cell(*each) for each in itertools.product(self.rounds, self.cached_shares, self.situations))

    def rounds_of(self, cell: Cell) -> int:
        """How often a cell is asked each way."""
        return (self.stream_rounds if cell.situation.streams else self.rounds)[cell.num_tokens]


@dataclass(slots=True)
class Stream:
    """Arrival times of the tokens of one answer, as they come."""

    task: asyncio.Task[None] | None = None
    times_s: list[float] = field(default_factory=list)
    route: Route = Route.ANY

    def span(self, begin_s: float, end_s: float) -> tuple[float, int]:
        """(seconds, tokens) from the last token before `begin_s` to the first after `end_s`."""
        first = max((i for i, t in enumerate(self.times_s) if t <= begin_s), default=0)
        last = next((i for i, t in enumerate(self.times_s) if t >= end_s), len(self.times_s) - 1)
        return self.times_s[last] - self.times_s[first], last - first


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured request: `delay_s` to its second token, `lost_s` what streams lost together."""

    way: Route
    went: Route
    delay_s: float
    lost_s: float

    def cost_s(self, weight: float) -> float:
        """See the module."""
        return self.delay_s + weight * self.lost_s


def lost_s(streams: Sequence[Stream], begin_s: float, end_s: float, usual_gap_s: float) -> float:
    """What the streams lost together from `begin_s` to `end_s`, where a token takes `usual_gap_s` else."""
    spans = [stream.span(begin_s, end_s) for stream in streams]
    return sum(seconds - num_tokens * usual_gap_s for seconds, num_tokens in spans)


class Prober:
    """Asks one cluster. Owns nothing but the running streams of a cell."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, cluster: ServedCluster, vocab_size: int) -> None:
        self._stub = stub
        self._model = cluster.model
        self._vocab_size = vocab_size
        self.rng = random.Random(0)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Like no other."""
        return tuple(self.rng.randrange(ORDINARY_FROM, self._vocab_size) for _ in range(num_tokens))

    async def ask(self, prompt: Sequence[int], num_tokens: int, way: Route, into: Stream | None = None) -> Stream:
        """An answer of exactly `num_tokens`. Raises LoadFailed."""
        stream = into if into is not None else Stream()
        message = inference_pb2.GenerateRequest(
            model=self._model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            route=_ROUTES[way],
        )
        try:
            async for piece in self._stub.Generate(message, timeout=_TIMEOUT_S):
                now = time.monotonic()
                stream.times_s.extend(now for _ in piece.token_ids)
                if piece.route:
                    disaggregated = piece.route == inference_pb2.ROUTE_DISAGGREGATED
                    stream.route = Route.DISAGGREGATED if disaggregated else Route.COLOCATED
        except grpc.aio.AioRpcError as error:
            raise LoadFailed(f"{error.code().name}: {error.details()}") from error
        if len(stream.times_s) != num_tokens:
            raise LoadFailed(f"asked for {num_tokens} tokens, got {len(stream.times_s)}")
        return stream

    async def begin_streams(self, count: int) -> list[Stream]:
        """Answers that run until they are cancelled; all have begun."""
        streams = [Stream() for _ in range(count)]
        for stream in streams:
            stream.task = asyncio.create_task(self._run_on(stream))
        while not all(stream.times_s for stream in streams):
            await asyncio.sleep(0.02)
            for stream in streams:
                if stream.task is not None and stream.task.done():
                    stream.task.result()
        return streams

    async def _run_on(self, stream: Stream) -> None:
        await self.ask(self.prompt(16), 4000, Route.COLOCATED, stream)

    async def end_streams(self, streams: Sequence[Stream]) -> None:
        """Cancel them. Raises LoadFailed when one had ended before."""
        for stream in streams:
            assert stream.task is not None
            if stream.task.done():
                stream.task.result()
                raise LoadFailed("a background stream ended before its cell")
            stream.task.cancel()
            with suppress(asyncio.CancelledError):
                await stream.task


@dataclass(frozen=True, slots=True)
class _Sent:
    """A probe before it is known what streams usually take."""

    way: Route
    went: Route
    begin_s: float
    end_s: float


async def run_cell(prober: Prober, cell: Cell, rounds: int, pause_s: float) -> list[Probe]:
    """`rounds` probes each way, in turns; the first way changes from round to round. Round after round, as they were sent."""
    probes: list[Probe] = []
    for begin in range(0, rounds, _STINT):
        probes += await _run_stint(prober, cell, range(begin, min(begin + _STINT, rounds)), pause_s)
    return probes


async def _run_stint(prober: Prober, cell: Cell, rounds: range, pause_s: float) -> list[Probe]:
    situation, sent = cell.situation, []
    pauses: list[tuple[float, float]] = []

    async def pause() -> None:
        begin_s = time.monotonic()
        await asyncio.sleep(pause_s)
        pauses.append((begin_s + pause_s / 3, time.monotonic()))

    streams = await prober.begin_streams(situation.streams)
    try:
        for number in rounds:
            for turn in range(len(WAYS)):
                way = WAYS[(number + turn) % len(WAYS)]
                prompt = prober.prompt(cell.num_tokens)
                cached = int(cell.num_tokens * cell.cached_share)
                if cached:
                    await prober.ask(prompt[:cached], 1, Route.COLOCATED)
                await pause()
                sent.append(await _probe(prober, prompt, way, situation))
        await pause()
    finally:
        await prober.end_streams(streams)
    usual = quiet_gap(streams, pauses)
    return [
        Probe(
            s.way,
            s.went,
            s.end_s - s.begin_s,
            max(0.0, lost_s(streams, s.begin_s, s.end_s, usual((s.begin_s + s.end_s) / 2))),
        )
        for s in sent
    ]


def quiet_gap(streams: Sequence[Stream], pauses: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """What a token takes each of the streams at an instant: a straight line through what it took in these pauses."""
    seen: list[tuple[float, float]] = []
    for begin_s, end_s in pauses:
        spans = [stream.span(begin_s, end_s) for stream in streams]
        gaps = [seconds / num_tokens for seconds, num_tokens in spans if num_tokens]
        if gaps:
            seen.append(((begin_s + end_s) / 2, statistics.median(gaps)))
    if not seen:
        return lambda _: 0.0
    if len(seen) == 1:
        return lambda _: seen[0][1]
    slope, at_zero = statistics.linear_regression(*zip(*seen, strict=True))
    return lambda when_s: at_zero + slope * when_s


async def _probe(prober: Prober, prompt: tuple[int, ...], way: Route, situation: Situation) -> _Sent:
    before = [
        asyncio.create_task(prober.ask(prober.prompt(situation.busy_tokens), 1, Route.DISAGGREGATED))
        for _ in range(situation.busy)
    ]
    if before:
        await asyncio.sleep(0.01)
    begin_s = time.monotonic()
    answer = await prober.ask(prompt, 3, way)
    await asyncio.gather(*before)
    await asyncio.sleep(0.1)  # streams have had another token
    return _Sent(way, answer.route, begin_s, answer.times_s[1])


async def measure(
    cluster: ServedCluster, vocab_size: int, config: DecisionBenchConfig, say: Say
) -> dict[Cell, list[Probe]]:
    """Warm up, then all cells, one after the other."""
    async with open_channel(cluster.grpc) as channel:
        await channel.channel_ready()
        prober = Prober(inference_pb2_grpc.InferenceStub(channel), cluster, vocab_size)
        prober.rng = random.Random(config.seed)
        for num_tokens in config.rounds:
            for situation in config.situations[:2]:
                await run_cell(prober, Cell(num_tokens, 0.0, situation), config.warm_rounds, config.pause_s)
        found = {}
        for cell in config.cells:
            say(f"decision: {cell.name}")
            found[cell] = await run_cell(prober, cell, config.rounds_of(cell), config.pause_s)
        return found
