"""Every metric name of a worker, once; the router's are in `observability.metrics`. Nothing is global.

`diptych_engine_*` say what the engine does in its steps, `diptych_kv_*` what became of KV that travelled; times are seconds,
taken with the engine's clock. Does not know engines or HTTP: callers pass numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LOAD_GAUGES = {
    "diptych_engine_waiting_requests": "Requests that wait to be scheduled",
    "diptych_engine_running_requests": "Requests in the running batch",
    "diptych_engine_queued_tokens": "Tokens not computed yet, of waiting and running requests",
    "diptych_engine_kv_usage_ratio": "Share of KV blocks in use, 0 to 1",
    "diptych_engine_stalled_seconds": "Time with work and no progress, once that is too long; else 0",
}


class WorkerMetrics:
    """What one worker process counts. Owns `registry`. `step` may be called from the engine's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._step = Histogram(
            "diptych_engine_step_seconds", "One engine step", registry=self.registry, buckets=STEP_BUCKETS
        )
        self._overhead = Histogram(
            "diptych_engine_overhead_seconds",
            "The part of a step outside the model runner",
            registry=self.registry,
            buckets=(0.00005, 0.0001, 0.00025, 0.0005, *STEP_BUCKETS),
        )
        self._requests = Histogram(
            "diptych_engine_batch_requests", "Requests in one step", registry=self.registry, buckets=BATCH_BUCKETS
        )
        self._tokens = Counter("diptych_engine_scheduled_tokens", "Tokens computed", registry=self.registry)
        self._preemptions = Counter("diptych_engine_preemptions", "Requests preempted", registry=self.registry)
        self._mismatches = Counter(
            "diptych_kv_digest_mismatch", "Hand-offs whose bytes were not those that were sent", registry=self.registry
        )
        self._refused = Counter(
            "diptych_refused_calls",
            "Calls of other processes that did not prove that they are of this cluster",
            ("method",),
            registry=self.registry,
        )

    def call_refused(self, method: str) -> None:
        """One call was refused before a service saw it."""
        self._refused.labels(method).inc()

    def watch(self, gauges: Callable[[], tuple[float, float, float, float, float]]) -> None:
        """Ask `gauges` at each scrape for the values of LOAD_GAUGES, in that order; it must not wait. Called once."""
        self.registry.register(_GaugeCollector(gauges))

    def digest_mismatch(self) -> None:
        """One hand-off was thrown away because a block was not what its sender had read."""
        self._mismatches.inc()

    def step(self, step_s: float, runner_s: float, batch: tuple[int, int], num_preempted: int) -> None:
        """One step: its time, the runner's part of it, its (requests, tokens), and how many requests it preempted."""
        self._preemptions.inc(num_preempted)
        num_requests, num_tokens = batch
        if num_tokens == 0:
            return
        self._step.observe(step_s)
        self._overhead.observe(max(0.0, step_s - runner_s))
        self._requests.observe(num_requests)
        self._tokens.inc(num_tokens)


class _GaugeCollector(Collector):
    def __init__(self, gauges: Callable[[], tuple[float, float, float, float, float]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for (name, what), value in zip(LOAD_GAUGES.items(), self._gauges(), strict=True):
            yield GaugeMetricFamily(name, what, value=value)
