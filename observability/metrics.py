"""Every metric name of a router, once; a worker's are in `observability.worker_metrics`. Nothing is global.

    diptych_*   ours, with a unit in each name
    vllm:*      the names that existing dashboards and autoscalers query, with vLLM's meaning, at the router

Histograms are in seconds and observed per request or per gap; Grafana panels should take rate() of buckets, not averages
of sums. Does not know requests, workers or HTTP: callers pass numbers and short label values, never ids of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from observability.histograms import CountedHistogram, Counts, HistogramName
from observability.stages import HandoffStats, StageTimes

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
STAGE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_VLLM = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker as the router last heard of it."""

    worker_id: str
    pool: str
    state: str
    epoch: int
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One finished request in numbers. `gaps_s` are the times between deliveries; `ttft_s` None when no token came."""

    outcome: str  # a finish reason, or the code of the error
    succeeded: bool
    route: str
    e2e_s: float
    ttft_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of all its answers
    num_longest_tokens: int  # of the answer with the most
    max_tokens: int
    stages: StageTimes  # of its first answer
    handoffs: tuple[HandoffStats, ...]  # at most one per answer
    num_failed_handoffs: int = 0  # whose blocks were pushed again, or whose prompt was computed again


class RouterMetrics:
    """What one router process counts. Owns `registry`."""

    def __init__(
        self, model_name: str, workers: Callable[[], Sequence[WorkerSample]], requests: Callable[[], tuple[int, int]]
    ) -> None:
        """`workers` and `requests` (running, waiting at the router) are asked at each scrape."""
        self.registry = CollectorRegistry()
        self._ours = _RouterSeries(self.registry, model_name)
        self._vllm = _VllmSeries(self.registry, model_name)
        self._both = _SharedSeries(self.registry, model_name)
        self.registry.register(_LiveCollector(model_name, workers, requests))

    def watch_bad_pairs(self, count: Callable[[], int]) -> None:
        """Ask `count` at each scrape how many pairs of workers are not combined."""
        self._ours.bad_pairs.set_function(count)

    def canary_ended(self, outcome: str) -> None:
        """One canary is over: ok, failed or undecided."""
        self._ours.canaries.labels(outcome).inc()

    def render(self) -> bytes:
        """The text exposition of now."""
        return generate_latest(self.registry)

    def attempt_failed(self, code: str) -> None:
        """One attempt of a request failed; the request may still succeed."""
        self._ours.failed_attempts.labels(code).inc()

    def attempt_drained(self, num_tokens: int) -> None:
        """A worker that is about to stop gave a request up, of whose answer `num_tokens` are made; it goes on elsewhere."""
        self._ours.drained_attempts.labels("mid_answer" if num_tokens else "before_first_token").inc()

    def tokens_delivered(self, gap_s: float, num_tokens: int) -> None:
        """Tokens after the first were given to a front, `gap_s` after the ones before."""
        self._both.gaps.observe(gap_s, num_tokens)

    def request_finished(self, sample: RequestSample) -> None:
        """One request is over, however it ended."""
        self._ours.observe(sample)
        self._vllm.observe(sample)
        self._both.observe(sample)


class _SharedSeries:
    """Histograms that are ours and vLLM's alike, counted once."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(names: tuple[str, str], what: str, buckets: Sequence[float]) -> Counts:
            shown = (
                HistogramName(names[0], what, {"model_name": model_name}),
                HistogramName(names[1], what, {"model_name": model_name, "engine": "0"}),
            )
            return CountedHistogram(registry, buckets, shown).series()

        self.gaps = histogram(
            ("diptych_itl_seconds", "vllm:inter_token_latency_seconds"), "Gap between tokens", GAP_BUCKETS
        )
        self._ttft = histogram(
            ("diptych_ttft_seconds", "vllm:time_to_first_token_seconds"), "Arrival to first token", TTFT_BUCKETS
        )
        self._tpot = histogram(
            ("diptych_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
            "(E2E - TTFT) / (tokens - 1)",
            GAP_BUCKETS,
        )
        self._e2e = histogram(
            ("diptych_e2e_seconds", "vllm:e2e_request_latency_seconds"), "Arrival to last token", REQUEST_BUCKETS
        )

    def observe(self, sample: RequestSample) -> None:
        if sample.ttft_s is None:
            return
        self._ttft.observe(sample.ttft_s)
        if sample.succeeded:
            self._e2e.observe(sample.e2e_s)
            if sample.num_longest_tokens > 1:
                self._tpot.observe((sample.e2e_s - sample.ttft_s) / (sample.num_longest_tokens - 1))


class _RouterSeries:
    """The diptych_* series of a router."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, what: str, label: str = "") -> CountedHistogram:
            shown = HistogramName(name, what, {"model_name": model_name})
            return CountedHistogram(registry, STAGE_BUCKETS, (shown,), label)

        def counter(name: str, what: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, what, labels, registry=registry)

        self._requests = counter(
            "diptych_requests", "Requests, by how they ended and which way they went", ("outcome", "route")
        )
        self.failed_attempts = counter(
            "diptych_failed_attempts", "Attempts that failed and were retried or given up", ("code",)
        )
        self.drained_attempts = counter(
            "diptych_drained_attempts",
            "Attempts that went on elsewhere because their worker is about to stop",
            ("when",),
        )
        self.canaries = counter(
            "diptych_canary", "Requests of the router's own, to prove a pair of workers", ("outcome",)
        )
        self.bad_pairs = Gauge(
            "diptych_bad_pairs", "Pairs of workers that get no hand-offs because theirs fail", registry=registry
        )
        self._prompt = counter("diptych_prompt_tokens", "Prompt tokens of finished requests")
        self._cached = counter("diptych_cached_prompt_tokens", "Prompt tokens found in a prefix cache")
        self._generated = counter("diptych_generated_tokens", "Tokens made for clients")
        self._handoffs = counter("diptych_handoffs", "Hand-offs that were committed", ("connector",))
        self._failed_handoffs = counter(
            "diptych_failed_handoffs", "Hand-offs that failed, or were given up with their decode worker"
        )
        self._kv_bytes = counter("diptych_handoff_kv_bytes", "KV bytes pushed between pools", ("connector",))
        self._kv_blocks = counter("diptych_handoff_blocks", "KV blocks of hand-offs: sent, or cached", ("state",))
        self._transfer = histogram("diptych_handoff_transfer_seconds", "Busy time of one transfer", "connector")
        self._exposed = histogram("diptych_handoff_exposed_seconds", "Transfer time a client can feel")
        self._stage = histogram("diptych_stage_seconds", "Time spent in one stage of a request", "stage")
        self._ended: dict[tuple[str, str], Counter] = {}  # to look one up by its labels costs more than to count
        self._by_connector: dict[str, _ConnectorSeries] = {}

    def observe(self, sample: RequestSample) -> None:
        way = sample.outcome, sample.route
        ended = self._ended.get(way)
        if ended is None:
            ended = self._ended[way] = self._requests.labels(*way)
        ended.inc()
        self._prompt.inc(sample.num_prompt_tokens)
        self._cached.inc(sample.num_cached_tokens)
        self._generated.inc(sample.num_output_tokens)
        if sample.succeeded and sample.ttft_s is not None:
            self._observe_stages(sample.stages, sample.ttft_s)
        self._failed_handoffs.inc(sample.num_failed_handoffs)
        for handoff in sample.handoffs:
            self._observe_handoff(handoff)

    def _observe_stages(self, stages: StageTimes, ttft_s: float) -> None:
        for stage, duration_s in stages.by_name():
            self._stage.series(stage).observe(duration_s)
        self._stage.series("ttft_unexplained").observe(max(0.0, ttft_s - stages.ttft_s))

    def _observe_handoff(self, handoff: HandoffStats) -> None:
        series = self._by_connector.get(handoff.connector)
        if series is None:
            series = self._by_connector[handoff.connector] = _ConnectorSeries(
                self._handoffs.labels(handoff.connector),
                self._kv_bytes.labels(handoff.connector),
                self._kv_blocks.labels("sent"),
                self._kv_blocks.labels("cached"),
                self._transfer.series(handoff.connector),
                self._exposed.series(),
            )
        series.observe(handoff)


@dataclass(frozen=True, slots=True)
class _ConnectorSeries:
    """What is counted of a hand-off, for one connector; blocks and exposed time are counted for all together."""

    handoffs: Counter
    kv_bytes: Counter
    sent: Counter
    cached: Counter
    transfer: Counts
    exposed: Counts

    def observe(self, handoff: HandoffStats) -> None:
        self.handoffs.inc()
        self.kv_bytes.inc(handoff.kv_bytes)
        self.sent.inc(handoff.num_blocks)
        self.cached.inc(handoff.num_cached_blocks)
        self.transfer.observe(handoff.transfer_s)
        self.exposed.observe(handoff.exposed_s)


class _VllmSeries:
    """The vllm:* series that make sense at a router; its engine label is always "0"."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, what: str, buckets: Sequence[float]) -> Counts:
            shown = HistogramName(f"vllm:{name}", what, {"model_name": model_name, "engine": "0"})
            return CountedHistogram(registry, buckets, (shown,)).series()

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, _VLLM, registry=registry).labels(model_name, "0")

        self._model_name = model_name
        self._prompt = counter("prompt_tokens", "Prompt tokens")
        self._generated = counter("generation_tokens", "Generated tokens")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in prefix caches")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in prefix caches")
        self._success = Counter(
            "vllm:request_success", "Finished requests", (*_VLLM, "finished_reason"), registry=registry
        )
        self._succeeded: dict[str, Counter] = {}
        self._queue = histogram("request_queue_time_seconds", "Time in the WAITING phase", REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "Time in the PREFILL phase", REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "Time in the DECODE phase", REQUEST_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "Time in the RUNNING phase", REQUEST_BUCKETS)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens per request", TOKEN_BUCKETS)
        self._output_size = histogram("request_generation_tokens", "Generated tokens per request", TOKEN_BUCKETS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of requests", TOKEN_BUCKETS)

    def observe(self, sample: RequestSample) -> None:
        self._prompt.inc(sample.num_prompt_tokens)
        self._generated.inc(sample.num_output_tokens)
        self._queries.inc(sample.num_prompt_tokens)
        self._hits.inc(sample.num_cached_tokens)
        if not sample.succeeded or sample.ttft_s is None:
            return
        success = self._succeeded.get(sample.outcome)
        if success is None:
            success = self._succeeded[sample.outcome] = self._success.labels(self._model_name, "0", sample.outcome)
        success.inc()
        stages, decode_s = sample.stages, sample.e2e_s - sample.ttft_s
        self._queue.observe(stages.admission_s + stages.prefill_queue_s)
        self._prefill.observe(stages.prefill_compute_s)
        self._decode.observe(decode_s)
        self._inference.observe(stages.prefill_compute_s + decode_s)
        self._prompt_size.observe(sample.num_prompt_tokens)
        self._output_size.observe(sample.num_output_tokens)
        self._max_tokens.observe(sample.max_tokens)


class _LiveCollector(Collector):
    """Gauges that are asked for at each scrape, so that a worker that has gone leaves no series behind."""

    def __init__(
        self, model_name: str, workers: Callable[[], Sequence[WorkerSample]], requests: Callable[[], tuple[int, int]]
    ) -> None:
        self._model_name = model_name
        self._workers = workers
        self._requests = requests

    def collect(self) -> Iterable[GaugeMetricFamily]:
        workers = self._workers()
        running, waiting = self._requests()
        yield GaugeMetricFamily(
            "diptych_requests_running", "Answers being made; a request of n counts n", value=running
        )
        yield GaugeMetricFamily("diptych_requests_waiting", "Requests in the router's queue", value=waiting)
        labels = ("worker_id", "pool")
        per_worker: tuple[tuple[str, str, Callable[[WorkerSample], float]], ...] = (
            ("diptych_worker_running_requests", "Requests in the worker's batch", lambda w: w.num_running),
            ("diptych_worker_waiting_requests", "Requests in the worker's queue", lambda w: w.num_waiting),
            ("diptych_worker_queued_tokens", "Tokens not computed yet", lambda w: w.num_queued_tokens),
            ("diptych_worker_kv_usage_ratio", "Share of KV blocks in use, 0 to 1", lambda w: w.kv_usage),
            ("diptych_worker_epoch", "The worker's life: milliseconds of its start", lambda w: w.epoch),
        )
        for name, what, value in per_worker:
            family = GaugeMetricFamily(name, what, labels=labels)
            for worker in workers:
                family.add_metric((worker.worker_id, worker.pool), value(worker))
            yield family
        yield _counted("diptych_workers", "Known workers, by pool and state", workers)
        yield from self._vllm(workers, running, waiting)

    def _vllm(self, workers: Sequence[WorkerSample], running: int, waiting: int) -> Iterable[GaugeMetricFamily]:
        decode_usage = [w.kv_usage for w in workers if w.pool == "decode"]
        in_workers = sum(w.num_waiting for w in workers)
        values = (
            ("vllm:num_requests_running", "Requests being worked on", max(0, running - in_workers)),
            ("vllm:num_requests_waiting", "Requests waiting, at the router or at a worker", waiting + in_workers),
            (
                "vllm:kv_cache_usage_perc",
                "KV usage of the fullest decode worker, 0 to 1",
                max(decode_usage, default=0.0),
            ),
        )
        for name, what, value in values:
            family = GaugeMetricFamily(name, what, labels=_VLLM)
            family.add_metric((self._model_name, "0"), value)
            yield family


def _counted(name: str, what: str, workers: Sequence[WorkerSample]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=("pool", "state"))
    counts: dict[tuple[str, str], int] = {}
    for worker in workers:
        counts[worker.pool, worker.state] = counts.get((worker.pool, worker.state), 0) + 1
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family
