"""What one router process carries on one core: streamed tokens, what it adds to TTFT, its memory, and who waits for long prompts.

    fake workers (answer at once) ──▶ router, on a core of its own ──▶ load clients
                                       │ CPU seconds and memory from /proc

    carries     256 streams at three times the rate of the bar: tokens/s, and per CPU second of the router, SSE and gRPC
    paced       the same streams at that rate: tokens per message, gaps, the router's share of its core
    first token 200 requests/s at random times: through the router against the prefill worker asked directly, in turns
    memory      its resident memory while many short requests come and go: no two alike, some refused, some left in the middle
    long        streams at an ordinary pace, alone and while prompts of 32k tokens are tokenised: the gaps between their tokens
    shapes, crowds: see bench.router_shapes

Workers and clients share the other core. Tokens per CPU second of the router do not depend on what they take of it, nor on
other work on the machine. Does not know how a router works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.cluster import HOST
from bench.load import LoadFailed
from bench.progress import Say
from bench.report import Measure, Report, Verdict, measure
from bench.router_cluster import Routed, RoutedConfig, routed
from bench.router_load import Door, RouterPlan, RunningLoad, run_router_load
from bench.router_requests import Manner
from bench.router_shapes import (
    ShapesConfig,
    ShapesFound,
    gaps,
    measure_crowds,
    measure_shapes,
    shapes_measures,
)
from bench.stats import percentile, spread

TOKENS_BAR = 15_000.0  # per second
OFFERED = 3 * TOKENS_BAR
TTFT_P50_BAR_MS = 2.0
TTFT_P99_BAR_MS = 10.0
MEMORY_BAR_PERCENT = 2.0  # growth from 20 % of the requests to all: noise of the allocator
LONG_GAP_BAR_MS = 20.0  # added to the 99th percentile of gaps
PARTS = ("carries", "paced", "ttft", "memory", "long", "shapes", "crowds")
_DOORS = (Door.SSE, Door.GRPC)
_LONG_EDGE_S = 1.0  # of the streams, before and after the long prompts
_WORDS = "the house on the hill was old and nobody had lived there for many years before we came to see it "


@dataclass(frozen=True, slots=True)
class RouterBenchConfig:
    """Sizes. Seconds are about what a part takes; requests are counted."""

    rounds: int = 3
    streams: int = 256
    carried_s: float = 4.0
    ttft_rate: float = 200.0
    ttft_s: float = 5.0
    memory_requests: int = 100_000
    memory_looks: int = 10
    long_streams: int = 32
    long_s: float = 7.0
    long_at_once: int = 4
    long_tokens: int = 32_000
    step_s: float = 0.02  # of the fake decode worker, where it is paced

    @property
    def quick(self) -> RouterBenchConfig:
        """The same in about a minute."""
        return replace(self, rounds=1, carried_s=3.0, ttft_s=4.0, memory_requests=5_000, long_s=5.0)

    @property
    def shapes(self) -> ShapesConfig:
        """Those of `bench.router_shapes`."""
        return ShapesConfig(
            rounds=self.rounds,
            rate=self.ttft_rate,
            shapes_s=self.ttft_s,
            step_s=self.step_s,
            streams=self.long_streams,
            crowds_s=self.long_s,
            short=prompt_of(200),
            long=prompt_of(self.long_tokens),
        )


@dataclass(frozen=True, slots=True)
class Carried:
    """One run of all streams; tokens per CPU second of the router, which took `cpu_share` of its core."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    tokens_per_message: float
    cpu_share: float
    gap_p99_s: float


@dataclass(slots=True)
class Found:
    """What all parts found, round by round."""

    carried: dict[Door, list[Carried]] = field(default_factory=lambda: {door: [] for door in _DOORS})
    paced: dict[Door, list[Carried]] = field(default_factory=lambda: {door: [] for door in _DOORS})
    ttft: dict[Door, list[tuple[float, float]]] = field(default_factory=lambda: {door: [] for door in Door})
    cpu_per_request_s: dict[Door, list[float]] = field(default_factory=lambda: {door: [] for door in _DOORS})
    rss_bytes: list[int] = field(default_factory=list)
    gaps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    long_per_s: list[float] = field(default_factory=list)
    long_ttft_s: list[float] = field(default_factory=list)
    shapes: ShapesFound = field(default_factory=ShapesFound)


def prompt_of(num_words: int) -> str:
    """That many words, which are about as many tokens."""
    words = _WORDS.split()
    return " ".join(words[i % len(words)] for i in range(num_words))


def run_router(model: Path, config: RouterBenchConfig, say: Say, parts: Sequence[str] = ()) -> Report:
    """Measure `parts` (names of the drawing above; none named: all) with the tokenizer of the model directory `model`."""
    found = Found()
    every: dict[str, Callable[[Path, RouterBenchConfig, Found, Say], None]] = {
        "carries": measure_carried,
        "paced": measure_paced,
        "ttft": measure_ttft,
        "memory": measure_memory,
        "long": measure_long,
        "shapes": lambda model, config, found, say: measure_shapes(model, config.shapes, found.shapes, say),
        "crowds": lambda model, config, found, say: measure_crowds(model, config.shapes, found.shapes, say),
    }
    for name in parts or PARTS:
        every[name](model, config, found, say)
    return router_report(found, config)


def measure_carried(model: Path, config: RouterBenchConfig, found: Found, say: Say) -> None:
    """All streams at once, at a rate that is too much."""
    _at_rate(OFFERED, model, config, found.carried, say)


def measure_paced(model: Path, config: RouterBenchConfig, found: Found, say: Say) -> None:
    """All streams at the rate of the bar."""
    _at_rate(TOKENS_BAR, model, config, found.paced, say)


def _at_rate(rate: float, model: Path, config: RouterBenchConfig, found: dict[Door, list[Carried]], say: Say) -> None:
    """All streams, their tokens made at `rate` per second together, for `carried_s`, or longer where they are too many."""
    length = round(config.carried_s * rate / config.streams)
    for number in range(config.rounds):
        for door in _DOORS:
            with routed(model, RoutedConfig(step_s=config.streams / rate)) as router:
                found[door].append(carried(router, door, config, length))
            say(f"{rate:,.0f} tokens/s, round {number + 1}: {door.value} {found[door][-1]}")


def carried(router: Routed, door: Door, config: RouterBenchConfig, length: int) -> Carried:
    """All streams at once, each of `length` tokens. What a stream's messages carried is taken to be the same for all of them."""
    plan = RouterPlan(door, HOST, router.port(door), "one two three", length, config.streams, config.streams)
    cpu_s, began = router.cpu_s(), time.monotonic()
    answers = run_router_load(plan)
    cpu_s = router.cpu_s() - cpu_s
    begin, end = max(a.arrivals_s[0] for a in answers), min(a.arrivals_s[-1] for a in answers)
    if end <= begin:
        raise LoadFailed(f"{door.value}: the streams never ran all at once")
    inside = sum(a.num_tokens * sum(begin < at <= end for at in a.arrivals_s) / len(a.arrivals_s) for a in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return Carried(
        tokens_per_s=inside / (end - begin),
        tokens_per_cpu_s=num_tokens / cpu_s,
        tokens_per_message=num_tokens / sum(answer.num_messages for answer in answers),
        cpu_share=cpu_s / (time.monotonic() - began),
        gap_p99_s=percentile(gaps(answers), 99),
    )


def measure_ttft(model: Path, config: RouterBenchConfig, found: Found, say: Say) -> None:
    """What the router adds to the first token, at the rate of the bar."""
    with routed(model, RoutedConfig(step_s=config.step_s)) as router:
        ref = router.prefill_ref
        for number in range(config.rounds):
            for door in (Door.DIRECT, *_DOORS):
                plan = RouterPlan(
                    door=door,
                    host=HOST,
                    port=router.port(door),
                    text=prompt_of(200),
                    max_tokens=1 if door is Door.DIRECT else 8,
                    num_requests=round(config.ttft_rate * config.ttft_s),
                    concurrency=0,
                    rate=config.ttft_rate,
                    ref=ref,
                    seed=number,
                )
                cpu_s = router.cpu_s()
                times = [answer.ttft_s for answer in run_router_load(plan)]
                found.ttft[door].append((percentile(times, 50), percentile(times, 99)))
                if door is not Door.DIRECT:
                    found.cpu_per_request_s[door].append((router.cpu_s() - cpu_s) / plan.num_requests)
            say(f"ttft, round {number + 1}: { {d.value: found.ttft[d][-1] for d in Door} } {found.cpu_per_request_s}")


def measure_memory(model: Path, config: RouterBenchConfig, found: Found, say: Say) -> None:
    """Resident memory after each tenth of the requests, half of them over each door."""
    each = config.memory_requests // config.memory_looks // len(_DOORS)
    with routed(model, RoutedConfig()) as router:
        for look in range(config.memory_looks):
            for door in _DOORS:
                first = look * each  # of numbers that make each request another
                plan = RouterPlan(door, HOST, router.port(door), f"{look} {prompt_of(20)}", 2, each, 32)
                run_router_load(replace(plan, manner=Manner(varied=True, first=first)))
            found.rss_bytes.append(router.rss_bytes())
            say(f"memory: {(look + 1) * each * len(_DOORS)} requests, {found.rss_bytes[-1] / 2**20:.1f} MiB")


def measure_long(model: Path, config: RouterBenchConfig, found: Found, say: Say) -> None:
    """Gaps of streams alone, and while long prompts come."""
    with routed(model, RoutedConfig(step_s=config.step_s)) as router:
        length = round(config.long_s / config.step_s)
        streams = RouterPlan(
            Door.SSE, HOST, router.http_port, "one two three", length, config.long_streams, config.long_streams
        )
        text = prompt_of(config.long_tokens)
        for number in range(config.rounds):
            for name in ("alone", "beside long prompts"):
                running = RunningLoad(streams)
                num_long, times = 0, [0.0]
                if name != "alone":
                    num_long, times = _ask_long(router, text, config)
                found.gaps.setdefault(name, []).append(_p50_p99(gaps(running.answers())))
                if num_long:
                    found.long_per_s.append(num_long / (config.long_s - 2 * _LONG_EDGE_S))
                    found.long_ttft_s.append(percentile(times, 50))
            say(
                f"long, round {number + 1}: { {name: all_[-1] for name, all_ in found.gaps.items()} } {found.long_per_s}"
            )


def _ask_long(router: Routed, text: str, config: RouterBenchConfig) -> tuple[int, list[float]]:
    """Keep some long prompts in flight for as long as the streams run; how many were answered, and their TTFTs."""
    time.sleep(_LONG_EDGE_S)  # the streams are there
    plan = RouterPlan(
        door=Door.SSE,
        host=HOST,
        port=router.http_port,
        text=text,
        max_tokens=2,
        num_requests=1_000_000,
        concurrency=config.long_at_once,
        stop_after_s=config.long_s - 2 * _LONG_EDGE_S,
    )
    times = [answer.ttft_s for answer in run_router_load(plan)]
    if not times:
        raise LoadFailed("no long prompt was answered while the streams ran")
    return len(times), times


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    return percentile(values, 50), percentile(values, 99)


def router_report(found: Found, config: RouterBenchConfig) -> Report:
    """The parts that were measured, against their bars."""
    measures: list[Measure] = []
    verdicts: list[Verdict] = []
    for name, runs_by_door in (("carries", found.carried), ("paced", found.paced)):
        for door, runs in runs_by_door.items():
            if runs:
                measures += _carried_measures(f"{name}, {door.value}", runs)
                if name == "carries":
                    value = spread([run.tokens_per_s for run in runs]).median
                    verdicts.append(Verdict(f"streamed tokens, {door.value}", value, "tokens/s", TOKENS_BAR, True))
    if found.ttft[Door.DIRECT]:
        _add_ttft(found, measures, verdicts)
    if found.rss_bytes:
        _add_memory(found, measures, verdicts, config)
    if found.gaps:
        _add_long(found, measures, verdicts)
    measures += shapes_measures(found.shapes)
    return Report(
        name="router",
        title="What one router process carries on one core",
        command="python -m bench router" + (" --quick" if config == RouterBenchConfig().quick else ""),
        method=f"One router process pinned to one core; workers that answer at once and the load clients on the others. Carries: "
        f"{config.streams} streams, tokens made at {OFFERED:,.0f}/s; counted is the time in which all stream. Paced: the same at "
        f"{TOKENS_BAR:,.0f}/s. TTFT: "
        f"{config.ttft_rate:g} requests/s at random times, 200-word prompts; added is the percentile through the router minus "
        f"that of asking the prefill worker directly. Memory: {config.memory_requests:,} requests of 2 tokens, half over each "
        f"door, no two alike; over HTTP one of 16 is refused and one is left in the middle. Long: {config.long_streams} SSE "
        f"streams at {1 / config.step_s:g} tokens/s, with {config.long_at_once} prompts of {config.long_tokens:,} tokens in "
        f"flight. Shapes and crowds: as TTFT and long, with other requests, the long ones one after the other.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        notes=(
            "What limits: over SSE one write to a socket for each message; over gRPC each message is a completion of grpc.aio's, "
            "which on one core is a switch to its poller thread and back. Under pressure a message carries several tokens.",
            "Tokens per CPU second of the router do not depend on what else the machine does; rates and times do.",
        ),
    )


def _carried_measures(name: str, runs: Sequence[Carried]) -> list[Measure]:
    return [
        measure(f"{name}: streamed", "tokens/s", spread([run.tokens_per_s for run in runs])),
        measure(f"{name}: per CPU second of the router", "tokens", spread([run.tokens_per_cpu_s for run in runs])),
        measure(f"{name}: tokens per message", "", spread([run.tokens_per_message for run in runs])),
        measure(f"{name}: router's share of its core", "%", spread([run.cpu_share for run in runs], 1e2)),
        measure(f"{name}: gap between a stream's messages, p99", "ms", spread([run.gap_p99_s for run in runs], 1e3)),
    ]


def _add_ttft(found: Found, measures: list[Measure], verdicts: list[Verdict]) -> None:
    for place, (name, bar) in enumerate((("p50", TTFT_P50_BAR_MS), ("p99", TTFT_P99_BAR_MS))):
        direct = [run[place] for run in found.ttft[Door.DIRECT]]
        measures.append(measure(f"TTFT {name}, prefill worker asked directly", "ms", spread(direct, 1e3)))
        for door in _DOORS:
            through = [run[place] for run in found.ttft[door]]
            measures.append(measure(f"TTFT {name}, {door.value}", "ms", spread(through, 1e3)))
            added = spread([t - d for t, d in zip(through, direct, strict=True)], 1e3)
            verdicts.append(Verdict(f"added to TTFT, {name}, {door.value}", added.median, "ms", bar, False))
    for door in _DOORS:
        measures.append(measure(f"CPU per request, {door.value}", "ms", spread(found.cpu_per_request_s[door], 1e3)))


def _add_memory(found: Found, measures: list[Measure], verdicts: list[Verdict], config: RouterBenchConfig) -> None:
    per_look = config.memory_requests // config.memory_looks
    for look, size in enumerate(found.rss_bytes, start=1):
        measures.append(measure(f"memory after {look * per_look:,} requests", "MiB", spread([size], 2**-20)))
    early = found.rss_bytes[max(0, config.memory_looks // 5 - 1)]
    growth = 100 * (found.rss_bytes[-1] - early) / early
    verdicts.append(Verdict("growth of memory", growth, "%", MEMORY_BAR_PERCENT, False))


def _add_long(found: Found, measures: list[Measure], verdicts: list[Verdict]) -> None:
    for name, runs in found.gaps.items():
        for place, percent in enumerate(("p50", "p99")):
            measures.append(measure(f"gap {percent}, {name}", "ms", spread([run[place] for run in runs], 1e3)))
    pairs = zip(found.gaps["beside long prompts"], found.gaps["alone"], strict=True)
    added = spread([beside[1] - alone[1] for beside, alone in pairs], 1e3)
    verdicts.append(Verdict("added by long prompts to the gap's p99", added.median, "ms", LONG_GAP_BAR_MS, False))
    measures.append(measure("long prompts answered", "per s", spread(found.long_per_s)))
    measures.append(measure("TTFT of long prompts, p50", "ms", spread(found.long_ttft_s, 1e3)))
