"""Measures a server at one load or at several: rates times limits of concurrency, one result a point.

    ServeConfig ──points──▶ warm-up, then `drive` and `measure` a point ──▶ JSON objects with vLLM's names

Prompts that are made up differ from point to point, so that no point finds the one before in a prefix cache. Does not know the
command line or how results are shown.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.serving.arrivals import arrival_times
from bench.serving.drive import LoadPlan, drive, warm_up, with_times
from bench.serving.files import FileLoad, read_prompts, read_sharegpt, tokenizer_count
from bench.serving.measures import Json, JsonObject, Limits, details, measure
from bench.serving.requests import BenchRequest, Form, Outcome, Target
from bench.serving.synthetic import Shape, conversations, random_prompts
from bench.serving.traces import MOONCAKE_BLOCK_TOKENS, read_azure, read_mooncake
from bench.serving.writer import Writer
from contracts.errors import ConfigError

MADE_UP = ("random", "shared-prefix", "multi-turn")
FROM_FILE = ("file", "sharegpt", "mooncake", "azure")
DATASETS = (*MADE_UP, *FROM_FILE)
_WARM_UP_ROUND = 1_000_000

MakeRequests = Callable[[int], tuple[BenchRequest, ...]]
"""The requests of the n-th point."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which requests. `output_len` overrides what a file says; `path` is of data sets that are files."""

    dataset: str
    shape: Shape
    form: Form
    path: Path | None = None
    output_len: int | None = None
    seed: int = 0
    vocab_size: int = 32_000
    tokenizer: Path | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigError(f"--dataset-name: {self.dataset!r} must be one of {', '.join(DATASETS)}")
        if (self.path is None) == (self.dataset in FROM_FILE):
            needs = "needs --dataset-path" if self.path is None else "is made up, and takes no --dataset-path"
            raise ConfigError(f"--dataset-name: {self.dataset} {needs}")
        if self.dataset == "shared-prefix" and self.shape.prefix_len < 1:
            raise ConfigError("--prefix-len: 0 must be at least 1 for shared-prefix")
        if self.block_tokens < 1:
            raise ConfigError(f"--trace-block-size: {self.block_tokens} must be at least 1")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How to send and what to say. `rates` empty: when the data say, else all at once."""

    rates: tuple[float, ...] = ()
    concurrencies: tuple[int | None, ...] = (None,)
    burstiness: float = 1.0
    seed: int = 0
    num_warmups: int = 1
    limits: Limits = field(default_factory=Limits)
    percentiles: tuple[float, ...] = (90.0, 99.0)
    request_timeout_s: float = 600.0
    trace_speed: float = 1.0
    detailed: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One load of a sweep. `rate` None: at the times that the data give."""

    rate: float | None
    max_concurrency: int | None

    @property
    def label(self) -> str:
        """As in a file's name: rate-4, concurrency-16, rate-trace."""
        rate = "trace" if self.rate is None else f"{self.rate:.12g}"
        limit = "" if self.max_concurrency is None else f"concurrency-{self.max_concurrency}"
        if limit and rate == "inf":
            return limit
        return f"rate-{rate}" + (f"-{limit}" if limit else "")


@dataclass(frozen=True, slots=True)
class Watch:
    """Whom to tell: of a point that begins with so many requests, of each request that has ended, and of what a point came to."""

    on_point: Callable[[Point, int], None] = lambda _point, _count: None
    on_done: Callable[[Outcome], None] = lambda _: None
    on_result: Callable[[Point, JsonObject], None] = lambda _point, _fields: None


def requests_maker(data: DataConfig) -> MakeRequests:
    """Reads files once, now. Raises ConfigError."""
    shape, path = data.shape, data.path
    if path is None:
        make = conversations if data.dataset == "multi-turn" else random_prompts
        return lambda number: make(shape, Writer(data.form, data.seed + number, data.vocab_size))
    if data.dataset in ("mooncake", "azure"):
        return lambda number: _trace(path, data, Writer(data.form, data.seed + number, data.vocab_size))
    load = FileLoad(data.form, shape.num_prompts, data.output_len)
    if data.tokenizer is not None:
        load = replace(load, count=tokenizer_count(data.tokenizer))
    read = read_sharegpt if data.dataset == "sharegpt" else read_prompts
    requests = read(path, load)
    return lambda _: requests


def points_of(config: ServeConfig, timed: bool) -> tuple[Point, ...]:
    """Every rate with every limit. Raises ConfigError for what cannot be sent."""
    rates: tuple[float | None, ...] = config.rates or ((None,) if timed else (math.inf,))
    for limit in config.concurrencies:
        if limit is not None and limit < 1:
            raise ConfigError(f"--max-concurrency: {limit} must be at least 1")
    for rate in rates:
        arrival_times(0, 1.0 if rate is None else rate, config.burstiness, config.seed)  # refuses what is out of range
    return tuple(Point(rate, limit) for rate, limit in itertools.product(rates, config.concurrencies))


async def serve(
    target: Target, make: MakeRequests, config: ServeConfig, watch: Watch = Watch()
) -> list[tuple[Point, JsonObject]]:
    """Every point in turn. Raises ConfigError; AskFailed when the warm-up is refused."""
    first = make(0)
    points = points_of(config, timed=with_times(first, 1.0) is not None)
    await warm_up(make(_WARM_UP_ROUND), config.num_warmups, target, config.request_timeout_s)
    results = []
    for number, point in enumerate(points):
        requests = first if number == 0 else make(number)
        watch.on_point(point, len(requests))
        plan = LoadPlan(_arrivals(requests, point, config), point.max_concurrency, config.request_timeout_s)
        run = await drive(requests, plan, target, watch.on_done)
        result = _load_fields(point, config, len(requests)) | measure(run, config.limits, config.percentiles)
        results.append((point, result | (details(run) if config.detailed else {"errors": _kinds(run.outcomes)})))
        watch.on_result(*results[-1])
    return results


def _arrivals(requests: Sequence[BenchRequest], point: Point, config: ServeConfig) -> tuple[float, ...] | None:
    if point.rate is None:
        return with_times(requests, config.trace_speed)
    return arrival_times(len(requests), point.rate, config.burstiness, config.seed)


def _load_fields(point: Point, config: ServeConfig, count: int) -> JsonObject:
    finite = point.rate is not None and math.isfinite(point.rate)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "num_prompts": count,
        "request_rate": point.rate if finite else ("trace" if point.rate is None else "inf"),
        "burstiness": config.burstiness if math.isfinite(config.burstiness) else "inf",
        "max_concurrency": point.max_concurrency,
        "latency_from": "scheduled",
    }


def _kinds(outcomes: Sequence[Outcome]) -> Json:
    return [*sorted({outcome.error for outcome in outcomes if outcome.error})]


def _trace(path: Path, data: DataConfig, writer: Writer) -> tuple[BenchRequest, ...]:
    most = data.shape.num_prompts
    requests = (
        read_mooncake(path, writer, data.block_tokens, most)
        if data.dataset == "mooncake"
        else read_azure(path, writer, most)
    )
    if data.output_len is None:
        return requests
    return tuple(replace(request, output_len=data.output_len) for request in requests)
