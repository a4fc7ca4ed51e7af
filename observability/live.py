"""A router's gauges that are asked for at each scrape, so that a worker that has gone leaves no series behind.

Does not know workers: callers pass what to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from observability import names
from observability.metric import Metric
from observability.samples import WorkerSample
from observability.series import gauge_family

PairSample = tuple[str, str, float]  # worker id, pool, share of its pairs that work


class LiveCollector(Collector):
    """Workers as the router knows them, and requests in the router. `pairs`, if set, is asked how pairs do, by worker."""

    def __init__(
        self, model_name: str, workers: Callable[[], Sequence[WorkerSample]], requests: Callable[[], tuple[int, int]]
    ) -> None:
        self._model_name = model_name
        self._workers = workers
        self._requests = requests
        self.pairs: Callable[[], Sequence[PairSample]] | None = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """prometheus_client's."""
        workers = self._workers()
        running, waiting = self._requests()
        yield _single(names.REQUESTS_RUNNING, running)
        yield _single(names.REQUESTS_WAITING, waiting)
        per_worker: tuple[tuple[Metric, Callable[[WorkerSample], float]], ...] = (
            (names.WORKER_RUNNING, lambda w: w.num_running),
            (names.WORKER_WAITING, lambda w: w.num_waiting),
            (names.WORKER_QUEUED_TOKENS, lambda w: w.num_queued_tokens),
            (names.WORKER_KV_USAGE, lambda w: w.kv_usage),
            (names.WORKER_EPOCH, lambda w: w.epoch),
        )
        for metric, value in per_worker:
            family = gauge_family(metric)
            for worker in workers:
                family.add_metric((worker.worker_id, worker.pool), value(worker))
            yield family
        yield _counted(workers)
        pairs = gauge_family(names.CANARY_SUCCESS)
        for worker_id, pool, share in self.pairs() if self.pairs is not None else ():
            pairs.add_metric((worker_id, pool), share)
        yield pairs
        yield from self._vllm(workers, running, waiting)

    def _vllm(self, workers: Sequence[WorkerSample], running: int, waiting: int) -> Iterable[GaugeMetricFamily]:
        in_workers = sum(w.num_waiting for w in workers)
        values = (
            (names.V_RUNNING, max(0, running - in_workers)),
            (names.V_WAITING, waiting + in_workers),
            (names.V_KV_USAGE, max((w.kv_usage for w in workers if w.pool == "decode"), default=0.0)),
        )
        for metric, value in values:
            family = gauge_family(metric)
            family.add_metric((self._model_name, "0"), value)
            yield family


def _single(metric: Metric, value: float) -> GaugeMetricFamily:
    family = gauge_family(metric)
    family.add_metric((), value)
    return family


def _counted(workers: Sequence[WorkerSample]) -> GaugeMetricFamily:
    family = gauge_family(names.WORKERS)
    counts: dict[tuple[str, str], int] = {}
    for worker in workers:
        counts[worker.pool, worker.state] = counts.get((worker.pool, worker.state), 0) + 1
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family
