"""What a router counts of its requests and workers; the names are in `observability.names`. Nothing is global.

Histograms are in seconds and observed per request or per gap; Grafana panels should take rate() of buckets, not averages
of sums. Does not know requests, workers or HTTP: callers pass numbers and short label values, never ids of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from observability import names
from observability.buckets import GAP_BUCKETS, REQUEST_BUCKETS, SPEED_BUCKETS, STAGE_BUCKETS, TTFT_BUCKETS
from observability.histograms import CountedHistogram, Counts
from observability.labels import CONNECTORS
from observability.live import LiveCollector, PairSample
from observability.metric import Metric
from observability.process_metrics import watch_process
from observability.router_aliases import RouterAliases
from observability.samples import RequestSample, WorkerSample
from observability.series import counted, counter, gauge
from observability.slo import Limits
from observability.slo_metrics import SloMetrics
from observability.stages import HandoffStats, Spent

__all__ = ["RequestSample", "RouterMetrics", "WorkerSample"]


class RouterMetrics:
    """What one router process counts. Owns `registry`."""

    def __init__(
        self, model_name: str, workers: Callable[[], Sequence[WorkerSample]], requests: Callable[[], tuple[int, int]]
    ) -> None:
        """`workers` and `requests` (running, waiting at the router) are asked at each scrape."""
        self.registry = CollectorRegistry()
        watch_process(self.registry)
        self._ours = _RouterSeries(self.registry, model_name)
        self._vllm = RouterAliases(self.registry, model_name)
        self._both = _SharedSeries(self.registry, model_name)
        self._slo: SloMetrics | None = None
        self._live = LiveCollector(model_name, workers, requests)
        self.registry.register(self._live)
        self._hears_gap: Callable[[float, int], object] | None = None

    def measure_by(self, limits: Limits) -> None:
        """Say of requests whether they keep these. Called once."""
        self._slo = SloMetrics(self.registry, limits)

    def watch_bad_pairs(self, count: Callable[[], int]) -> None:
        """Ask `count` at each scrape how many pairs of workers are not combined."""
        self._ours.bad_pairs.set_function(count)

    def watch_pairs(self, shares: Callable[[], Sequence[PairSample]]) -> None:
        """Ask `shares` at each scrape for the share of each worker's pairs that works, of those that were tried."""
        self._live.pairs = shares

    def pass_gaps(self, listener: Callable[[float, int], object]) -> None:
        """Tell `listener` as well what `tokens_delivered` is told."""
        self._hears_gap = listener

    def canary_ended(self, outcome: str) -> None:
        """One canary is over: ok, failed or undecided."""
        self._ours.canaries.labels(outcome).inc()

    def attempt_failed(self, code: str) -> None:
        """One attempt of a request failed; the request may still succeed."""
        self._ours.failed_attempts.labels(code).inc()

    def attempt_drained(self, num_tokens: int) -> None:
        """A worker that is about to stop gave a request up, of whose answer `num_tokens` are made; it goes on elsewhere."""
        self._ours.drained_attempts.labels("mid_answer" if num_tokens else "before_first_token").inc()

    def retried(self) -> None:
        """An attempt is made because one before it has failed."""
        self._ours.retries.inc()

    def migrated(self, cause: str) -> None:
        """An answer of which tokens were given goes on elsewhere, after a `failure` or because of a `drain`."""
        self._ours.migrations.labels(cause).inc()

    def tokens_delivered(self, gap_s: float, num_tokens: int) -> None:
        """Tokens after the first were given to a front, `gap_s` after the ones before."""
        self._both.gaps.observe(gap_s, num_tokens)
        if self._hears_gap is not None:
            self._hears_gap(gap_s, num_tokens)

    def request_finished(self, sample: RequestSample) -> None:
        """One request is over, however it ended."""
        self._ours.observe(sample)
        self._vllm.observe(sample)
        self._both.observe(sample)
        if self._slo is not None:
            self._slo.observe(sample)


class _SharedSeries:
    """Histograms that are ours and vLLM's alike, counted once."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(metrics: Sequence[Metric], buckets: Sequence[float]) -> Counts:
            return counted(registry, buckets, metrics, (model_name, "0")).series()

        self.gaps = histogram((names.ITL, names.V_ITL, names.V_OLD_ITL), GAP_BUCKETS)
        self._ttft = histogram((names.TTFT, names.V_TTFT), TTFT_BUCKETS)
        self._tpot = histogram((names.TPOT, names.V_TPOT), GAP_BUCKETS)
        self._e2e = histogram((names.E2E, names.V_E2E), REQUEST_BUCKETS)

    def observe(self, sample: RequestSample) -> None:
        if sample.ttft_s is None:
            return
        self._ttft.observe(sample.ttft_s)
        if sample.succeeded:
            self._e2e.observe(sample.e2e_s)
            if (gap_s := sample.mean_gap_s) is not None:
                self._tpot.observe(gap_s)


class _RouterSeries:
    """The diptych_* series of a router."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(metric: Metric, buckets: Sequence[float] = STAGE_BUCKETS) -> CountedHistogram:
            return counted(registry, buckets, (metric,), (model_name,))

        self._requests = counter(registry, names.REQUESTS)
        self.failed_attempts = counter(registry, names.FAILED_ATTEMPTS)
        self.drained_attempts = counter(registry, names.DRAINED_ATTEMPTS)
        self.retries = counter(registry, names.RETRIES)
        self.migrations = counter(registry, names.MIGRATIONS)
        self.canaries = counter(registry, names.CANARIES)
        self.bad_pairs = gauge(registry, names.BAD_PAIRS)
        self._prompt = counter(registry, names.PROMPT_TOKENS)
        self._cached = counter(registry, names.CACHED_PROMPT_TOKENS)
        self._generated = counter(registry, names.GENERATED_TOKENS)
        self._handoffs = counter(registry, names.HANDOFFS)
        self._failed_handoffs = counter(registry, names.FAILED_HANDOFFS)
        self._kv_bytes = counter(registry, names.HANDOFF_BYTES)
        self._kv_blocks = counter(registry, names.HANDOFF_BLOCKS)
        self._transfer = histogram(names.HANDOFF_TRANSFER)
        self._exposed = histogram(names.HANDOFF_EXPOSED)
        self._speed = histogram(names.HANDOFF_SPEED, SPEED_BUCKETS)
        self._stage = histogram(names.STAGE)
        self._gap = histogram(names.SECOND_TOKEN_GAP, GAP_BUCKETS).series()
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
            self._observe_spent(sample.spent)
        self._failed_handoffs.inc(sample.num_failed_handoffs)
        for handoff in sample.handoffs:
            self._observe_handoff(handoff)

    def _observe_spent(self, spent: Spent) -> None:
        for stage, duration_s in spent.stages.by_name():
            if duration_s > 0:  # else it did not happen
                self._stage.series(stage).observe(duration_s)
        if spent.gap_s is not None:
            self._gap.observe(spent.gap_s)
        self._observe_rest("ttft", spent.ttft_unexplained_s)
        self._observe_rest("gap", spent.gap_unexplained_s)

    def _observe_rest(self, whole: str, rest_s: float | None) -> None:
        """What is left, by its sign: a sum of both would be no counter, and rate() of it nonsense."""
        if rest_s is not None:
            self._stage.series(f"{whole}_unexplained").observe(max(0.0, rest_s))
            self._stage.series(f"{whole}_overexplained").observe(max(0.0, -rest_s))

    def _observe_handoff(self, handoff: HandoffStats) -> None:
        connector = handoff.connector if handoff.connector in CONNECTORS else "other"
        series = self._by_connector.get(connector)
        if series is None:
            series = self._by_connector[connector] = _ConnectorSeries(
                self._handoffs.labels(connector),
                self._kv_bytes.labels(connector),
                self._kv_blocks.labels("sent"),
                self._kv_blocks.labels("cached"),
                self._transfer.series(connector),
                self._exposed.series(),
                self._speed.series(connector),
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
    speed: Counts

    def observe(self, handoff: HandoffStats) -> None:
        self.handoffs.inc()
        self.kv_bytes.inc(handoff.kv_bytes)
        self.sent.inc(handoff.num_blocks)
        self.cached.inc(handoff.num_cached_blocks)
        self.exposed.observe(handoff.exposed_s)
        if handoff.num_writes:  # else the decode worker had all of it
            self.transfer.observe(handoff.transfer_s)
        if handoff.transfer_s > 0:
            self.speed.observe(handoff.gb_per_s)
