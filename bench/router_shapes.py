"""What a router adds to the first token, and who waits for long prompts, where requests are not plain text in the clear.

    shapes      the rate of `bench.router`'s "first token": chats, token ids, and text with a key over TLS, each over both doors
    crowds      streams over each door, alone and beside long prompts of each shape, one with all its tokens' log-probabilities

Lines beside those that have a bar. Does not know how a router works.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.cluster import HOST
from bench.load import LoadFailed
from bench.progress import Say
from bench.report import Measure, measure
from bench.router_cluster import Routed, RoutedConfig, routed
from bench.router_load import Door, RouterAnswer, RouterPlan, RunningLoad, run_router_load
from bench.router_requests import Manner, Shape
from bench.stats import percentile, spread

_DOORS = (Door.SSE, Door.GRPC)
_EDGE_S = 1.0  # of the streams, before and after the long prompts
_KEY_AND_TLS = "text, a key, TLS"


@dataclass(frozen=True, slots=True)
class ShapesConfig:
    """Sizes: requests per second and for how long; of the streams and of the long prompts beside them."""

    rounds: int
    rate: float
    shapes_s: float
    step_s: float
    streams: int
    crowds_s: float
    short: str
    long: str


@dataclass(slots=True)
class ShapesFound:
    """Round by round and by name: p50 and p99 of TTFT, CPU seconds of a request; p50 and p99 of gaps, long ones a second."""

    ttft: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    gaps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    long_per_s: dict[str, list[float]] = field(default_factory=dict)


def measure_shapes(model: Path, config: ShapesConfig, found: ShapesFound, say: Say) -> None:
    """The first token of each shape, asked for at the same rate."""
    for secured in (False, True):
        with routed(model, RoutedConfig(step_s=config.step_s, secured=secured)) as router:
            shapes = (Shape.TEXT,) if secured else (Shape.TEXT, Shape.CHAT, Shape.IDS)
            for number in range(config.rounds):
                for door in _DOORS:
                    for shape in shapes:
                        name = f"{door.value}, {_KEY_AND_TLS if secured else shape.value}"
                        run = _first_tokens(router, door, replace(router.manner, shape=shape), config, number)
                        found.ttft.setdefault(name, []).append(run)
                        say(f"shapes, round {number + 1}: {name} {run}")


def _first_tokens(
    router: Routed, door: Door, manner: Manner, config: ShapesConfig, seed: int
) -> tuple[float, float, float]:
    plan = RouterPlan(
        door=door,
        host=HOST,
        port=router.port(door),
        text=config.short,
        max_tokens=8,
        num_requests=round(config.rate * config.shapes_s),
        concurrency=0,
        rate=config.rate,
        seed=seed,
        manner=manner,
    )
    cpu_s = router.cpu_s()
    times = [answer.ttft_s for answer in run_router_load(plan)]
    return percentile(times, 50), percentile(times, 99), (router.cpu_s() - cpu_s) / plan.num_requests


def measure_crowds(model: Path, config: ShapesConfig, found: ShapesFound, say: Say) -> None:
    """Gaps of streams over each door, alone and while long prompts of each shape come over HTTP, one after the other."""
    with routed(model, RoutedConfig(step_s=config.step_s)) as router:
        length = round(config.crowds_s / config.step_s)
        for number in range(config.rounds):
            for door in _DOORS:
                for shape in (None, *Shape):
                    name = f"{door.value} streams {'alone' if shape is None else f'beside long {shape.value}'}"
                    running = RunningLoad(
                        RouterPlan(
                            door, HOST, router.port(door), "one two three", length, config.streams, config.streams
                        )
                    )
                    if shape is not None:
                        found.long_per_s.setdefault(name, []).append(_ask_long(router, shape, config))
                    waits = gaps(running.answers())
                    found.gaps.setdefault(name, []).append((percentile(waits, 50), percentile(waits, 99)))
                    say(f"crowds, round {number + 1}: {name} {found.gaps[name][-1]}")


def _ask_long(router: Routed, shape: Shape, config: ShapesConfig) -> float:
    """One long prompt after the other for as long as the streams run; how many a second were answered."""
    time.sleep(_EDGE_S)
    plan = RouterPlan(
        door=Door.SSE,
        host=HOST,
        port=router.http_port,
        text=config.long,
        max_tokens=1,
        num_requests=1_000_000,
        concurrency=1,
        stop_after_s=config.crowds_s - 2 * _EDGE_S,
        manner=Manner(shape),
    )
    began = time.monotonic()
    answers = run_router_load(plan)
    if not answers:
        raise LoadFailed(f"no long {shape.value} was answered while the streams ran")
    return len(answers) / (time.monotonic() - began)


def gaps(answers: Sequence[RouterAnswer]) -> list[float]:
    """Seconds between what came and what came before it, of all answers, in no order."""
    return [b - a for answer in answers for a, b in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)]


def shapes_measures(found: ShapesFound) -> list[Measure]:
    """All that was found."""
    measures = []
    for name, runs in found.ttft.items():
        for place, what in enumerate(("TTFT p50", "TTFT p99", "CPU per request")):
            measures.append(measure(f"{what}, {name}", "ms", spread([run[place] for run in runs], 1e3)))
    for name, both in found.gaps.items():
        for place, percent in enumerate(("p50", "p99")):
            measures.append(measure(f"gap {percent}, {name}", "ms", spread([run[place] for run in both], 1e3)))
    for name, rates in found.long_per_s.items():
        measures.append(measure(f"long ones answered, {name}", "per s", spread(rates)))
    return measures
