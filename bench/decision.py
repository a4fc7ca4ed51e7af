"""The choice between one pool and two on real workers: each cell of a grid asked three ways, in turns, on one cluster.

    cell = (prompt tokens, cached share, load)
    load: idle | streams (answers that run at decode) | busy (prompts that wait at prefill)
    round: (prime the prefix at decode) ─▶ pause ─▶ load ─▶ probe ─▶ pause;   always remote, always local, auto take turns

What a probe costs is the delay that it causes, in seconds, as the router's own model has it (docs/adr/0022):

    time from sending it to its second token  +  weight · Σ over streams of the time that they lost meanwhile

A stream's loss is the time from its last token before the probe was sent to its first after the probe's second token, less
what as many tokens take it in the pauses; all together not below 0. Does not know how the router decides.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from bench.cluster import ServedCluster
from bench.load import LoadFailed, Route
from bench.progress import Say
from bench.report import Measure, Report, Verdict
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from rpc.channel import open_channel

WORSE_BAR = 1.15
ORDINARY_FROM = 32  # ids below are special tokens in some vocabularies
WAYS = (Route.DISAGGREGATED, Route.COLOCATED, Route.ANY)
_ROUTES = {
    Route.ANY: inference_pb2.ROUTE_UNSPECIFIED,
    Route.DISAGGREGATED: inference_pb2.ROUTE_DISAGGREGATED,
    Route.COLOCATED: inference_pb2.ROUTE_COLOCATED,
}
_TIMEOUT_S = 300.0


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
    """The grid; `rounds` by prompt length, because short prompts are cheap and noisy. `weight` is the router's default."""

    rounds: dict[int, int] = field(default_factory=lambda: {48: 7, 256: 5, 1024: 3})
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
    """`rounds` probes each way, in turns; the first way changes from round to round."""
    situation, sent, pauses = cell.situation, [], []
    streams = await prober.begin_streams(situation.streams)
    try:
        for number in range(rounds):
            for turn in range(len(WAYS)):
                way = WAYS[(number + turn) % len(WAYS)]
                prompt = prober.prompt(cell.num_tokens)
                cached = int(cell.num_tokens * cell.cached_share)
                if cached:
                    await prober.ask(prompt[:cached], 1, Route.COLOCATED)
                begin_s = time.monotonic()
                await asyncio.sleep(pause_s)
                pauses.append((begin_s + pause_s / 3, time.monotonic()))
                sent.append(await _probe(prober, prompt, way, situation))
    finally:
        await prober.end_streams(streams)
    spans = [stream.span(*pause) for stream in streams for pause in pauses]
    gaps = [seconds / num_tokens for seconds, num_tokens in spans if num_tokens]
    usual_gap_s = statistics.median(gaps) if gaps else 0.0
    return [
        Probe(s.way, s.went, s.end_s - s.begin_s, max(0.0, lost_s(streams, s.begin_s, s.end_s, usual_gap_s)))
        for s in sent
    ]


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
            found[cell] = await run_cell(prober, cell, config.rounds[cell.num_tokens], config.pause_s)
        return found


def run_decision(cluster: ServedCluster, vocab_size: int, config: DecisionBenchConfig, say: Say) -> Report:
    """Some minutes. Raises LoadFailed."""
    return decision_report(asyncio.run(measure(cluster, vocab_size, config, say)), cluster.model, config)


def decision_report(found: dict[Cell, list[Probe]], model: str, config: DecisionBenchConfig) -> Report:
    """Per cell what each way costs, and how far auto is from the better."""
    measures, ratios, notes = [], {}, []
    names = {Route.DISAGGREGATED: "always remote", Route.COLOCATED: "always local", Route.ANY: "auto"}
    for cell, probes in found.items():
        medians = {}
        for way, name in names.items():
            costs = tuple(probe.cost_s(config.weight) * 1e3 for probe in probes if probe.way is way)
            measures.append(Measure(f"{cell.name}: {name}", "ms", costs))
            medians[way] = statistics.median(costs)
        ratios[cell] = medians[Route.ANY] / min(medians[Route.DISAGGREGATED], medians[Route.COLOCATED])
        went = [probe.went for probe in probes if probe.way is Route.ANY]
        remote = went.count(Route.DISAGGREGATED)
        notes.append(
            f"{cell.name}: auto went remote {remote} of {len(went)} times, {ratios[cell]:.2f} × the better way."
        )
    worst = max(ratios, key=lambda cell: ratios[cell])
    return Report(
        name="decision",
        title="One pool or two: the router's choice against always and never",
        command="python -m bench decision",
        method=f"{model}; router, 1 prefill and 1 decode worker, one thread each. Each cell is asked three ways in turns: "
        "forced over both pools, forced onto the decode worker, left to the router. A probe costs its time to the second token "
        f"plus {config.weight:g} × what all running streams lost meanwhile; the router predicts the same. It learns from all "
        "requests, the forced ones too. Cached prefixes are at the decode worker only.",
        measures=tuple(measures),
        verdicts=(
            Verdict("auto against the better way, worst cell", ratios[worst], "×", WORSE_BAR, False),
            Verdict(
                "auto against the better way, mean of cells", statistics.fmean(ratios.values()), "×", WORSE_BAR, False
            ),
        ),
        notes=(f"Worst cell: {worst.name}.", *notes),
    )
