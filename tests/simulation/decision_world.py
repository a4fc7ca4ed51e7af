"""A cluster in virtual time for the choice of the way: one prefill and one decode worker that take what they truly take.

    Load ──▶ arrivals ──▶ Advisor (the real one) ──▶ P's queue and hand-off, or D's queue and its streams' stall ──▶ delays

What a request costs is measured here as bench/decision does on real workers: the time until its second token, and what its
prefill keeps D's streams from, together. Durations are the truth times noise, a few of them outliers; announcements are late
by up to a second. Nothing sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.prefill import HandedOff
from contracts.request import FinishReason, TokenDelta
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.decision_metrics import DecisionMetrics
from observability.stages import HandoffStats, StageTimes
from router.choosing.advisor import Advisor, Watch
from router.choosing.costs import PromptWork
from router.choosing.route import Reason, Route
from router.config import DisaggregationConfig, RetryConfig
from router.serving.progress import Job, Progress

LAYOUT = KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)
P, D = (
    WorkerInfo(WorkerRef(kind.value, 1), kind, f"{kind.value}:1", "m", LAYOUT, ("shm",), 8192, 4096, 2048)
    for kind in (WorkerKind.PREFILL, WorkerKind.DECODE)
)


@dataclass(frozen=True)
class Truth:
    """What things take: of a small model on one core each, unless said otherwise."""

    tokens_per_s: float = 900.0
    attend_s: float = 5e-8  # a pair of tokens
    step_s: float = 0.02
    row_s: float = 0.001
    byte_s: float = 1 / 5e9
    transfer_s: float = 0.002
    settle_s: float = 0.006
    noise: float = 0.1
    outliers: float = 0.02

    def prefill_s(self, work: PromptWork) -> float:
        attended = work.num_tokens**2 - (work.num_tokens - work.num_computed) ** 2
        weights_s = self.step_s  # a step reads them whatever it computes
        computed_s = work.num_computed / self.tokens_per_s
        return weights_s + computed_s + attended * self.attend_s + work.num_beside * self.row_s

    def decode_step_s(self, num_streams: int) -> float:
        return self.step_s + num_streams * self.row_s


@dataclass(frozen=True)
class Load:
    """One cell of the grid. `rate` 0 sends one probe after the other; `busy` prompts are queued at P before each probe."""

    num_tokens: int
    cached_share: float = 0.0
    streams: int = 0
    busy: int = 0
    rate: float = 0.0
    spread: float = 1.0  # prompts are from num_tokens / spread to num_tokens long


@dataclass
class Probe:
    """One request under measurement."""

    sent_s: float
    route: Route | None
    watch: Watch | None = None
    progress: Progress | None = None
    cost_s: float = 0.0


@dataclass
class World:
    """Runs cells one after the other; the advisor keeps what it has learnt."""

    truth: Truth = field(default_factory=Truth)
    seed: int = 0
    config: DisaggregationConfig = field(default_factory=DisaggregationConfig)

    def __post_init__(self) -> None:
        self.rng = random.Random()
        self.clock = VirtualClock()
        self.metrics = CollectorRegistry()
        self._cached = {P.ref: 0, D.ref: 0}
        self._loads = {P.ref: WorkerLoad(), D.ref: WorkerLoad()}
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._free_at = {P.ref: 0.0, D.ref: 0.0}
        self._streams = 0
        self.slower = {P.ref: 1.0, D.ref: 1.0}  # than the truth says
        self.paths: list[Route] = []  # that probes went
        self.advisor = Advisor(
            self.config,
            self.clock,
            self._loads,
            lambda ref, _: self._cached[ref],
            DecisionMetrics(self.metrics),
        )

    def run(self, load: Load, route: Route | None, num_probes: int, again: int = 0) -> list[float]:
        """The cost of each probe: seconds to its second token, and what it made streams wait. `route` None asks the advisor.

        Runs with the same number `again` meet the same prompts and the same luck, whichever way they go.
        """
        self._until_idle()
        self.rng = random.Random(f"{self.seed} {load} {again}")
        held = [self._stream() for _ in range(load.streams)]
        self._streams = load.streams
        self._loads[D.ref] = WorkerLoad(
            num_running=load.streams,
            num_queued_tokens=load.streams,
            decode_step_s=self.truth.decode_step_s(load.streams),
        )
        costs = []
        for _ in range(num_probes):
            for _ in range(load.busy):
                self._send(512, 0, Route.DISAGGREGATED)
            num_tokens = self.rng.randint(max(2, int(load.num_tokens / load.spread)), load.num_tokens)
            probe = self._send(num_tokens, int(load.cached_share * num_tokens), route)
            assert probe.watch is not None
            self.paths.append(probe.watch.path)
            costs.append(probe)
            if load.rate:
                self._until(self._now + self.rng.expovariate(load.rate))
            else:
                self._until_idle()
        self._until_idle()
        for watch in held:
            watch.end()
        self._streams = 0
        return [probe.cost_s for probe in costs]

    def _stream(self) -> Watch:
        """A background answer that is made at D as long as the cell lasts."""
        watch, _ = self._begin(16, Route.COLOCATED)
        watch.heard(TokenDelta("s", 0, (1,)), self._now)
        return watch

    def _begin(self, num_tokens: int, route: Route | None) -> tuple[Watch, Progress]:
        job = Job(request_id="r", prompt_token_ids=(1,) * num_tokens, sampling=SamplingParams(), deadline=1e9)
        progress = Progress(job, self.clock, RetryConfig())
        progress.at[WorkerKind.DECODE] = D.ref
        if route is Route.COLOCATED:
            return self.advisor.begin_alone(progress, D, Reason.REQUEST), progress
        reason = Reason.REQUEST if route is Route.DISAGGREGATED else None
        return self.advisor.begin(progress, (P, D), reason), progress

    def _send(self, num_tokens: int, num_cached: int, route: Route | None) -> Probe:
        self._cached[D.ref] = num_cached
        luck, sending, settling = self._luck(), self._luck(), self._luck()
        probe = Probe(self._now, route)
        probe.watch, probe.progress = self._begin(num_tokens, route)
        remote = probe.watch.path is Route.DISAGGREGATED
        ref = P.ref if remote else D.ref
        work = PromptWork(num_tokens, 0 if remote else num_cached, 0 if remote else self._streams)
        started_s = max(self._now + 0.002, self._free_at[ref])
        compute_s = luck * self.slower[ref] * self.truth.prefill_s(work)
        first_s = self._free_at[ref] = started_s + compute_s
        stages = StageTimes(prefill_queue_s=started_s - self._now - 0.001, prefill_compute_s=compute_s)
        step_s = self.truth.decode_step_s(self._streams)
        felt = None
        if remote:
            sent = (num_tokens - num_cached) * LAYOUT.token_bytes
            felt = StageTimes(
                transfer_s=sending * (self.truth.transfer_s + sent * self.truth.byte_s),
                commit_s=settling * self.truth.settle_s,
                decode_queue_s=max(0.0, self._free_at[D.ref] - first_s, step_s / 2 if self._streams else 0.0),
            )
            second_s = first_s + felt.transfer_s + felt.commit_s + felt.decode_queue_s
            self._at(first_s, lambda: self._hear(probe, TokenDelta("r", 0, (1,), stages=stages)))
            self._at(first_s + 0.01, lambda: self._handed_over(probe, sent, felt))
            probe.cost_s = second_s - self._now
        else:
            second_s = first_s + (step_s / 2 if self._streams else 0.0)
            first = TokenDelta("r", 0, (1,), num_cached_tokens=num_cached, stages=stages)
            self._at(first_s, lambda: self._hear(probe, first))
            probe.cost_s = second_s - self._now + self._streams * max(0.0, compute_s - step_s)
        last = TokenDelta("r", 1, (1,), finish_reason=FinishReason.LENGTH, stages=felt)
        self._at(max(second_s, first_s + 0.02), lambda: self._hear(probe, last))
        return probe

    def _handed_over(self, probe: Probe, sent: int, stages: StageTimes) -> None:
        assert probe.progress is not None
        probe.progress.handed_off(HandedOff("h", HandoffStats("shm", sent), stages))

    def _hear(self, probe: Probe, delta: TokenDelta) -> None:
        assert probe.watch is not None
        assert probe.progress is not None
        probe.watch.heard(probe.progress.accept(delta), self._now)
        if delta.finish_reason is not None:
            probe.watch.end()

    def _luck(self) -> float:
        """A factor on what something takes."""
        spoilt = 8 if self.rng.random() < self.truth.outliers else 1
        return spoilt * self.rng.lognormvariate(0, self.truth.noise)

    def _at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._numbers), do))

    def _until_idle(self) -> None:
        while self._due:
            self._until(self._due[0][0])
        self._until(self._now + 1.0)

    def _until(self, when_s: float) -> None:
        while self._due and self._due[0][0] <= when_s:
            at_s, _, do = heapq.heappop(self._due)
            self._move(at_s)
            do()
        self._move(when_s)

    def _move(self, when_s: float) -> None:
        self._now = max(self._now, when_s)
        self.clock.skip(self._now - self.clock.now())
