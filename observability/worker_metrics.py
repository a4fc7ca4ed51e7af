"""What every worker counts: steps of its engine, requests that left it, and how busy it is; names in `observability.names`.

Times are seconds, taken with the engine's clock. What only one pool counts is in `observability.handoff_metrics`. Does not know
engines or HTTP: callers pass numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from observability import names
from observability.block_metrics import BlockMetrics
from observability.buckets import BATCH_BUCKETS, STEP_BUCKETS
from observability.process_metrics import watch_process
from observability.samples import EngineSample
from observability.series import counter, counter_family, gauge, gauge_family, histogram
from observability.worker_aliases import WorkerAliases

LOAD_GAUGES = (
    names.ENGINE_WAITING,
    names.ENGINE_RUNNING,
    names.ENGINE_QUEUED_TOKENS,
    names.ENGINE_KV_USAGE,
    names.ENGINE_STALLED,
)
_ALIASED = ((names.V_WAITING, 0), (names.V_RUNNING, 1), (names.V_KV_USAGE, 3))  # places among these
Load = tuple[float, float, float, float, float]


class WorkerMetrics:
    """What one worker process counts. Owns `registry`. `step` may be called from the engine's thread, and only from one."""

    def __init__(self, model_name: str, pool: str) -> None:
        self.registry = CollectorRegistry()
        watch_process(self.registry)
        self.model_name = model_name
        self.aliases = WorkerAliases(self.registry, model_name, pool)
        self._labels = (model_name, pool)
        self.blocks = BlockMetrics(self.registry, self._labels)
        self._step = histogram(self.registry, names.ENGINE_STEP, STEP_BUCKETS)
        finer = (0.00005, 0.0001, 0.00025, 0.0005, *STEP_BUCKETS)
        self._overhead = histogram(self.registry, names.ENGINE_OVERHEAD, finer)
        self._requests = histogram(self.registry, names.ENGINE_BATCH, BATCH_BUCKETS)
        self._tokens = counter(self.registry, names.ENGINE_TOKENS)
        self._preemptions = counter(self.registry, names.ENGINE_PREEMPTIONS)
        self._refused = counter(self.registry, names.REFUSED_CALLS)

    def call_refused(self, method: str) -> None:
        """One call was refused before a service saw it."""
        self._refused.labels(method).inc()

    def born(self, epoch: int) -> None:
        """This is the worker's life."""
        gauge(self.registry, names.EPOCH).set(epoch)

    def placed(self, threads: int, num_cpus: int) -> None:
        """It computes with `threads`, and keeps to `num_cpus` CPUs, 0 for any."""
        gauge(self.registry, names.COMPUTE_THREADS).set(threads)
        gauge(self.registry, names.KEPT_CPUS).set(num_cpus)

    def watch(self, gauges: Callable[[], Load], prefix_cache: Callable[[], tuple[int, int]]) -> None:
        """Ask at each scrape for the values of LOAD_GAUGES, in that order, and for how many tokens were looked up in the prefix
        cache and found there; neither may wait. Called once.
        """
        self.registry.register(_Asked(gauges, prefix_cache, self._labels))

    def step(self, step_s: float, runner_s: float, batch: tuple[int, int, int], num_preempted: int) -> None:
        """One step: its time, the runner's part of it, its (requests, tokens computed, tokens sampled), and how many requests it
        preempted.
        """
        self._preemptions.inc(num_preempted)
        num_requests, num_tokens, num_made = batch
        if num_tokens == 0:
            self.aliases.preempted(num_preempted)
            return
        self._step.observe(step_s)
        self._overhead.observe(max(0.0, step_s - runner_s))
        self._requests.observe(num_requests)
        self._tokens.inc(num_tokens)
        self.aliases.step(num_tokens, num_made, num_preempted)

    def ended(self, sample: EngineSample) -> None:
        """One request has left the engine with its work done or with an error; told where `step` is."""
        self.aliases.ended(sample)


class _Asked(Collector):
    def __init__(
        self, gauges: Callable[[], Load], prefix_cache: Callable[[], tuple[int, int]], labels: tuple[str, str]
    ) -> None:
        self._gauges = gauges
        self._prefix_cache = prefix_cache
        self._labels = labels

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        load = self._gauges()
        for metric, value in zip(LOAD_GAUGES, load, strict=True):
            family = gauge_family(metric)
            family.add_metric((), value)
            yield family
        for metric, place in _ALIASED:
            family = gauge_family(metric)
            family.add_metric(self._labels, load[place])
            yield family
        for metric, count in zip((names.V_CACHE_QUERIES, names.V_CACHE_HITS), self._prefix_cache(), strict=True):
            total = counter_family(metric)
            total.add_metric(self._labels, count)
            yield total
