"""How long blocks stay taken when clients leave: N streaming clients close at once, at a moment of their requests' life.

    sent     the last request has just been written          prefill  the prefill worker holds KV
    first    one client has its first token, others wait     decode   every client has had some tokens

    time to free = from the first close until a worker holds no block and no request, for good

Both workers' counters are polled from outside, so the time is that of the last look which saw something, plus one look; what is
compared with the bar is that time less the step that ran when the first client left, because a step is not interrupted. The
clients are in this process, on the same cores. Does not know how cancelling works.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import grpc
import httpx
import msgspec

from bench.cluster import ServedCluster
from bench.load import LoadFailed
from bench.load import Protocol as Surface
from bench.progress import Say
from bench.report import Measure, Report, Verdict, measure
from bench.stats import spread
from bench.ttft import ORDINARY_FROM
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from rpc.channel import open_channel

BEYOND_STEP_BAR_MS = 100.0
PATIENCE_S = 120.0
MIN_LOOKS = 3  # that saw nothing before a worker is believed to hold nothing
WORKER_FLAGS = (
    "--kv-memory",
    "1GiB",
    "--max-num-batched-tokens",
    "256",
    "--max-num-seqs",
    "256",
    "--no-prefix-caching",
)
_GAUGE = re.compile(
    rb"^diptych_engine_(waiting_requests|running_requests|kv_usage_ratio|step_seconds_sum|step_seconds_count) (\S+)$",
    re.MULTILINE,
)


class Moment(StrEnum):
    """When the clients leave; drawn above."""

    SENT = "sent"
    PREFILL = "prefill"
    FIRST = "first"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class CancelBenchConfig:
    """Sizes in tokens. Prompts are long where the moment is during prefill, so that it lasts."""

    clients: tuple[int, ...] = (1, 50, 200)
    rounds: int = 3
    long_prompt: int = 512
    short_prompt: int = 32
    max_tokens: int = 448
    decode_tokens: int = 4  # that every client has had at the moment "decode"
    look_every_s: float = 0.01
    quiet_s: float = 0.5  # nothing seen for so long is nothing left
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """A worker's counters, asked for at `asked_s` of the monotonic clock."""

    asked_s: float
    holds: bool  # a block, or a request
    holds_kv: bool
    num_steps: float
    step_s: float  # of all steps together


@dataclass(frozen=True, slots=True)
class Freed:
    """One run: seconds from the first close until both workers held nothing, the same less the step under way, and that step."""

    free_s: float
    beyond_step_s: float
    step_s: float


class Client(Protocol):
    """One client with one streaming request."""

    num_events: int
    ended: str  # how its answer ended, if it did

    async def send(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Send the request, and count what comes from then on."""
        ...

    def leave(self) -> None:
        """Close, without a word."""
        ...


class SseClient:
    """A connection of its own to the OpenAI door."""

    def __init__(self, cluster: ServedCluster) -> None:
        host, _, port = cluster.http.removeprefix("http://").partition(":")
        self._place = (host, int(port))
        self._model = cluster.model
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.num_events = 0
        self.ended = ""

    async def send(self, prompt: Sequence[int], max_tokens: int) -> None:
        """See Client."""
        asked = {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens}
        body = msgspec.json.encode({**asked, "temperature": 0.0, "ignore_eos": True, "stream": True})
        reader, self._writer = await asyncio.open_connection(*self._place)
        head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._writer.drain()
        self._reading = asyncio.ensure_future(self._read(reader))

    def leave(self) -> None:
        """See Client."""
        assert self._reading is not None
        assert self._writer is not None
        self._reading.cancel()
        self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        last = b""
        while (line := await reader.readline()) and last != b"data: [DONE]":
            self.num_events += line.startswith(b"data: {")
            last = line.strip() or last
        self.ended = f"the stream ended: {last[:200].decode(errors='replace')}"


class GrpcClient:
    """One call; calls share a connection, as a service's do that calls for its own users."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, model: str) -> None:
        self._stub = stub
        self._model = model
        self._call: grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse] | None = (
            None
        )
        self._reading: asyncio.Task[None] | None = None
        self.num_events = 0
        self.ended = ""

    async def send(self, prompt: Sequence[int], max_tokens: int) -> None:
        """See Client."""
        message = inference_pb2.GenerateRequest(
            model=self._model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )
        self._call = self._stub.Generate(message, timeout=PATIENCE_S)
        self._reading = asyncio.ensure_future(self._read())
        await asyncio.sleep(0)  # gRPC writes it in a task of its own

    def leave(self) -> None:
        """See Client."""
        assert self._call is not None
        self._call.cancel()

    async def _read(self) -> None:
        assert self._call is not None
        try:
            async for _ in self._call:
                self.num_events += 1
            self.ended = "the call ended"
        except asyncio.CancelledError:
            return  # left
        except grpc.aio.AioRpcError as error:
            self.ended = f"{error.code().name}: {error.details()}"


class Watch:
    """Polls both workers' counters until told to end; `looks` has what it saw, by worker."""

    def __init__(self, cluster: ServedCluster, pause_s: float) -> None:
        self._urls = {p.kind: p.metrics for p in cluster.processes if p.kind != "router"}
        self._pause_s = pause_s
        self.looks: dict[str, list[WorkerLook]] = {kind: [] for kind in self._urls}

    async def run(self, client: httpx.AsyncClient) -> None:
        """Until cancelled."""
        await asyncio.gather(*(self._poll(client, kind) for kind in self._urls))

    async def _poll(self, client: httpx.AsyncClient, kind: str) -> None:
        while True:
            asked_s = time.monotonic()
            page = (await client.get(self._urls[kind])).content
            self.looks[kind].append(worker_look(asked_s, page))
            await asyncio.sleep(self._pause_s)

    def all_quiet(self, seconds: float) -> bool:
        """Whether no worker has held anything for so long, at several looks."""
        return all(_quiet_since(some) <= time.monotonic() - seconds for some in self.looks.values())


def _quiet_since(looks: Sequence[WorkerLook]) -> float:
    """Since when a worker has held nothing; never, as long as too few looks say so."""
    since = next((i + 1 for i in range(len(looks) - 1, -1, -1) if looks[i].holds), 0)
    return looks[since].asked_s if len(looks) - since >= MIN_LOOKS else float("inf")


def worker_look(asked_s: float, page: bytes) -> WorkerLook:
    """Of a worker's /metrics page. A page says what the engine was when it was last asked, or has last stepped."""
    values = {name: float(value) for name, value in _GAUGE.findall(page)}
    waiting, running, usage = (values[k] for k in (b"waiting_requests", b"running_requests", b"kv_usage_ratio"))
    holds = waiting + running + usage > 0
    return WorkerLook(asked_s, holds, usage > 0, values[b"step_seconds_count"], values[b"step_seconds_sum"])


def freed(looks: dict[str, list[WorkerLook]], closed_s: float) -> Freed:
    """What one run's looks say of clients that closed at `closed_s`; the worse of the workers."""
    worst = Freed(0.0, 0.0, 0.0)
    for some in looks.values():
        held = [i for i, look in enumerate(some) if look.holds]
        free_s = max(0.0, some[held[-1] + 1].asked_s - closed_s) if held else 0.0
        step_s = step_under_way(some, closed_s) if held else 0.0
        worst = max(worst, Freed(free_s, free_s - step_s, step_s), key=lambda each: each.beyond_step_s)
    return worst


def step_under_way(looks: Sequence[WorkerLook], at_s: float) -> float:
    """How long the first step took that ended after `at_s` as the looks show; the mean of them, if one look shows several."""
    before = [look for look in looks if look.asked_s <= at_s][-1:] or looks[:1]
    after = next((look for look in looks if look.num_steps > before[0].num_steps), before[0])
    num_steps = after.num_steps - before[0].num_steps
    return (after.step_s - before[0].step_s) / num_steps if num_steps else 0.0


async def leave_at(
    moment: Moment, clients: Sequence[Client], prompts: Sequence[Sequence[int]], watch: Watch, config: CancelBenchConfig
) -> float:
    """Send all requests, wait for the moment, close all; the instant of the first close."""
    await asyncio.gather(*(c.send(p, config.max_tokens) for c, p in zip(clients, prompts, strict=True)))
    begun = {kind: len(looks) for kind, looks in watch.looks.items()}
    ready: dict[Moment, Callable[[], bool]] = {
        Moment.SENT: lambda: True,
        Moment.PREFILL: lambda: any(look.holds_kv for look in watch.looks["prefill"][begun["prefill"] :]),
        Moment.FIRST: lambda: any(c.num_events for c in clients),
        Moment.DECODE: lambda: all(c.num_events >= config.decode_tokens for c in clients),
    }
    await _until(lambda: still(clients) and ready[moment](), f"the moment {moment.value} does not come")
    closed_s = time.monotonic()
    for client in clients:
        client.leave()
    return closed_s


def still(clients: Sequence[Client]) -> bool:
    """True. Raises LoadFailed when an answer has ended: nobody was to leave it."""
    ended = next((client.ended for client in clients if client.ended), None)
    if ended is not None:
        raise LoadFailed(f"an answer ended before its client left: {ended}")
    return True


async def one_run(
    cluster: ServedCluster,
    surface: Surface,
    moment: Moment,
    prompts: Sequence[Sequence[int]],
    config: CancelBenchConfig,
) -> Freed:
    """As many clients as prompts, on a cluster that is idle before and after."""
    watch = Watch(cluster, config.look_every_s)
    async with httpx.AsyncClient() as pages, open_channel(cluster.grpc) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)
        watching = asyncio.ensure_future(watch.run(pages))
        try:
            await _until(lambda: all(len(some) > 2 for some in watch.looks.values()), "the workers show no counters")
            clients = [
                SseClient(cluster) if surface is Surface.SSE else GrpcClient(stub, cluster.model) for _ in prompts
            ]
            closed_s = await leave_at(moment, clients, prompts, watch, config)
            await asyncio.sleep(config.quiet_s)
            await _until(lambda: watch.all_quiet(config.quiet_s), "blocks are never free again")
        finally:
            watching.cancel()
            await asyncio.wait((watching,))
    return freed(watch.looks, closed_s)


async def _until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up:
            raise LoadFailed(what)
        await asyncio.sleep(0.002)


def cancel_prompts(num: int, num_tokens: int, vocab_size: int, run: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of one run, which no other run has."""
    rng = random.Random(f"{seed}-{run}")
    return [tuple(rng.randrange(ORDINARY_FROM, vocab_size) for _ in range(num_tokens)) for _ in range(num)]


def run_cancel(cluster: ServedCluster, vocab_size: int, config: CancelBenchConfig, say: Say) -> Report:
    """All numbers of clients, moments and surfaces, in turns."""
    numbers = itertools.count()
    runs: dict[tuple[Surface, int, Moment], list[Freed]] = {}
    for number in range(config.rounds + 1):
        say(f"cancel: round {number} of {config.rounds}" if number else "cancel: warming up")
        for surface, clients, moment in itertools.product(Surface, config.clients, Moment):
            size = config.short_prompt if moment is Moment.DECODE else config.long_prompt
            prompts = cancel_prompts(clients, size, vocab_size, next(numbers), config.seed)
            took = asyncio.run(one_run(cluster, surface, moment, prompts, config))
            if number:
                runs.setdefault((surface, clients, moment), []).append(took)
    return cancel_report(runs, cluster.model, config)


def cancel_report(
    runs: dict[tuple[Surface, int, Moment], list[Freed]], model: str, config: CancelBenchConfig
) -> Report:
    """Times to free of every combination, and the worst of each surface beyond a step against the bar."""
    measures: list[Measure] = []
    verdicts = []
    for surface in Surface:
        for (over, clients, moment), some in runs.items():
            if over is surface:
                name = f"{surface.value}, {clients} client{'s' if clients > 1 else ''}, {moment.value}"
                measures.append(measure(f"{name}: time to free", "ms", spread([f.free_s for f in some], 1e3)))
                measures.append(measure(f"{name}: less one step", "ms", spread([f.beyond_step_s for f in some], 1e3)))
        worst = max(f.beyond_step_s for (over, _, _), some in runs.items() if over is surface for f in some)
        name = f"time to free less one step, worst of all, {surface.value}"
        verdicts.append(Verdict(name, 1e3 * worst, "ms", BEYOND_STEP_BAR_MS, False))
    steps = [f.step_s for some in runs.values() for f in some]
    return Report(
        name="cancel",
        title="How long blocks stay taken when clients leave",
        command=f"python -m bench cancel --rounds {config.rounds}",
        method=f"{model}; router, 1 prefill and 1 decode worker, one thread each, flags {' '.join(WORKER_FLAGS)}. N streaming "
        "clients, in a process on the same cores, close at once: as soon as the requests are sent; when the prefill worker "
        f"holds KV of them; when the first of them has a token (prompts of {config.long_prompt} tokens); when each has "
        f"{config.decode_tokens} events (prompts of {config.short_prompt}). Time to free: from the first close until neither "
        "worker holds a block or a request, as seen by polling their counters "
        f"every {config.look_every_s * 1e3:g} ms, later worker. One step: the one under way at the first close.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        notes=(f"Steps took {1e3 * min(steps):.0f} to {1e3 * max(steps):.0f} ms.",),
    )
