"""What a worker counts of hand-offs: where they are sent from, and where they are taken. The names are in `observability.names`.

Used from the worker's event loop; what is asked at a scrape is asked in another thread. Does not know hand-offs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from observability import names
from observability.buckets import BYTES_BUCKETS, NIXL_TIME_BUCKETS, SPEED_BUCKETS, STAGE_BUCKETS, WRITES_BUCKETS
from observability.labels import CONNECTORS, LEASE_STATES
from observability.metric import Metric
from observability.series import counted, counter, gauge_family
from observability.stages import HandoffStats


class SenderMetrics:
    """Of a prefill worker."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = (model_name, "prefill")
        self._registry = registry
        self._endings = counter(registry, names.TRANSFERS)
        self._failed = counter(registry, names.V_NIXL_FAILED).labels(*labels)
        self._untold = counter(registry, names.V_NIXL_UNTOLD).labels(*labels)
        self._grants = counted(registry, STAGE_BUCKETS, (names.GRANT_WAIT,), ()).series()
        self._bytes = counter(registry, names.SENT_BYTES)
        self._busy = counted(registry, STAGE_BUCKETS, (names.TRANSFER_BUSY,), ())
        self._exposed = counted(registry, STAGE_BUCKETS, (names.TRANSFER_EXPOSED,), ()).series()
        self._speed = counted(registry, SPEED_BUCKETS, (names.TRANSFER_SPEED,), ())
        self._time = counted(registry, NIXL_TIME_BUCKETS, (names.V_NIXL_TIME,), labels).series()
        self._sizes = counted(registry, BYTES_BUCKETS, (names.V_NIXL_BYTES,), labels).series()
        self._writes = counted(registry, WRITES_BUCKETS, (names.V_NIXL_DESCRIPTORS,), labels).series()

    def watch(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Ask at each scrape how many hand-offs ask for room, and how many have it and are not over. Called once."""

        def now() -> tuple[tuple[Metric, Mapping[tuple[str, ...], float]], ...]:
            asking, in_flight = counts()
            return (names.TRANSFERS_ASKING, {(): asking}), (names.TRANSFERS_IN_FLIGHT, {(): in_flight})

        self._registry.register(_Asked(now))

    def ended(self, ending: str) -> None:
        """One of ENDINGS came to a hand-off."""
        self._endings.labels(ending).inc()
        if ending == "failed":
            self._failed.inc()

    def granted(self, waited_s: float) -> None:
        """A decode worker has room for a hand-off that has asked for so long."""
        self._grants.observe(waited_s)

    def untold(self) -> None:
        """A decode worker could not be told that a hand-off was given up."""
        self._untold.inc()

    def sent(self, stats: HandoffStats) -> None:
        """One was committed, which moved so much. Nothing, where the decode worker had all of it: that is no transfer."""
        connector = stats.connector if stats.connector in CONNECTORS else "other"
        self._exposed.observe(stats.exposed_s)
        if not stats.num_writes:
            return
        self._bytes.labels(connector).inc(stats.kv_bytes)
        self._busy.series(connector).observe(stats.transfer_s)
        self._time.observe(stats.transfer_s)
        self._sizes.observe(stats.kv_bytes)
        self._writes.observe(stats.num_writes)
        if stats.transfer_s > 0:
            self._speed.series(connector).observe(stats.gb_per_s)


class ReceiverMetrics:
    """Of a decode worker."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._reservations = counter(registry, names.RESERVATIONS)
        self._adopted = counter(registry, names.ADOPTED)
        self._losses = counter(registry, names.LEASES_EXPIRED)
        self._expired = counter(registry, names.V_NIXL_EXPIRED).labels(model_name, "decode")
        self._mismatches = counter(registry, names.DIGEST_MISMATCHES)

    def watch(self, leases: Callable[[], Mapping[str, int]]) -> None:
        """Ask at each scrape how many hand-offs hold blocks, by state. Called once."""

        def now() -> tuple[tuple[Metric, Mapping[tuple[str, ...], float]], ...]:
            counts = leases()
            return ((names.KV_LEASES, {(state,): counts.get(state, 0) for state in LEASE_STATES}),)

        self._registry.register(_Asked(now))

    def reserved(self, outcome: str) -> None:
        """Room was asked for: one of RESERVATIONS came of it."""
        self._reservations.labels(outcome).inc()

    def adopted(self) -> None:
        """The engine went on with a hand-off."""
        self._adopted.inc()

    def lost(self, reason: str) -> None:
        """A lease ended without that, by one of LOSSES."""
        self._losses.labels(reason).inc()
        if reason == "expired":
            self._expired.inc()

    def digest_mismatch(self) -> None:
        """One hand-off was thrown away because a block was not what its sender had read."""
        self._mismatches.inc()


class _Asked(Collector):
    def __init__(self, now: Callable[[], Iterable[tuple[Metric, Mapping[tuple[str, ...], float]]]]) -> None:
        self._now = now

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for metric, values in self._now():
            family = gauge_family(metric)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
