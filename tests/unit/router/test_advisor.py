"""What the choice of the way measures of what it did: also what streams lose to it, and not only what they should."""

import pytest
from prometheus_client import CollectorRegistry

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.request import FinishReason, TokenDelta
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from observability.decision_metrics import DecisionMetrics
from observability.stages import HandoffStats, StageTimes
from router.choosing.advisor import Advisor, Watch
from router.choosing.route import Decision, Reason, Route
from router.config import DisaggregationConfig, RetryConfig
from router.serving.progress import Job, Progress
from router.workers.registry import Change, ChangeKind

LAYOUT = KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)
P, D = (
    WorkerInfo(WorkerRef(kind.value, 1), kind, f"{kind.value}:1", "m", LAYOUT, ("shm",), 8192, 4096, 2048)
    for kind in (WorkerKind.PREFILL, WorkerKind.DECODE)
)
GAP_S, STREAMS, PREFILL_S = 0.02, 4, 0.4


class Pair:
    """One prefill and one decode worker, with streams whose tokens this test times."""

    def __init__(self, config: DisaggregationConfig | None = None) -> None:
        self.clock = VirtualClock()
        self.metrics = CollectorRegistry()
        config = config or DisaggregationConfig(explore_share=0.0)
        self.advisor = Advisor(config, self.clock, {}, lambda *_: 0, DecisionMetrics(self.metrics))
        self.streams: list[tuple[Watch, Progress]] = []

    def begin(self, num_tokens: int, route: Route) -> tuple[Watch, Progress]:
        job = Job(request_id="r", prompt_token_ids=(1,) * num_tokens, sampling=SamplingParams(), deadline=1e9)
        progress = Progress(job, self.clock, RetryConfig())
        progress.at[WorkerKind.DECODE] = D.ref
        if route is Route.DISAGGREGATED:
            return self.advisor.begin(progress, (P, D), Reason.REQUEST), progress
        # Both ways are predicted, and by the operator's word it runs alone.
        self.advisor.config = DisaggregationConfig(above_tokens=1_000_000, explore_share=0.0)
        return self.advisor.begin(progress, (P, D)), progress

    def hear(self, told: tuple[Watch, Progress], finish: FinishReason | None = None, **stages: float) -> None:
        watch, progress = told
        seen = StageTimes(**stages) if stages else None
        delta = TokenDelta("r", len(progress.token_ids), (1,), finish_reason=finish, stages=seen)
        watch.heard(progress.accept(delta), self.clock.now())
        if finish is not None:
            watch.end()

    def tick(self, count: int = 1, gap_s: float = GAP_S) -> None:
        """As many tokens of each stream."""
        for _ in range(count):
            self.clock.skip(gap_s)
            for stream in self.streams:
                self.hear(stream)

    def streaming(self) -> None:
        """Streams run, and it is known how fast."""
        for _ in range(STREAMS):
            self.streams.append(self.begin(16, Route.COLOCATED))
            self.hear(self.streams[-1])
        for _ in range(12):  # segments need an end: somebody short comes and goes
            self.tick(15)
            passing = self.begin(1, Route.COLOCATED)
            self.hear(passing, FinishReason.LENGTH, prefill_compute_s=1e-3)

    def local(self, stall_s: float) -> Decision:
        """A prompt is read at decode, and streams wait so long for a token."""
        told = self.begin(300, Route.COLOCATED)
        self.tick(1, stall_s)
        self.hear(told)
        self.tick()
        self.hear(told, FinishReason.LENGTH, prefill_compute_s=PREFILL_S)
        decision = told[1].decision
        assert decision is not None
        return decision

    def remote(self, gap_s: float) -> Decision:
        """A prompt is read at prefill, and streams go on at that gap."""
        told = self.begin(300, Route.DISAGGREGATED)
        self.tick(round(PREFILL_S / gap_s), gap_s)
        self.hear(told)
        self.tick()
        told[1].handoff = HandoffStats("shm", 1000)
        self.hear(told, FinishReason.LENGTH, prefill_compute_s=PREFILL_S, transfer_s=0.001, commit_s=0.001)
        decision = told[1].decision
        assert decision is not None
        return decision

    def total(self, name: str, path: str) -> float:
        return self.metrics.get_sample_value(f"diptych_disagg_{name}_seconds_total", {"path": path}) or 0.0


def test_what_streams_lose_is_measured_and_not_only_predicted() -> None:
    pair = Pair()
    pair.streaming()
    usual = pair.local(PREFILL_S)
    assert usual.measured_s == pytest.approx(PREFILL_S + STREAMS * (PREFILL_S - GAP_S), rel=0.1)
    for _ in range(4):  # what a prompt takes is learnt; that streams wait three times as long for it cannot be
        pair.tick(10)
        worse = pair.local(3 * PREFILL_S)
        expected_s = 3 * PREFILL_S + STREAMS * (3 * PREFILL_S - GAP_S)
        assert worse.measured_s == pytest.approx(expected_s, rel=0.1)
    assert worse.predicted_local_s is not None
    assert worse.measured_s > 2 * worse.predicted_local_s
    assert worse.other_s is not None
    assert worse.regret_s == pytest.approx(worse.measured_s - worse.other_s)
    assert worse.regret_s > 1.0
    short_s = pair.total("measured", "colocated") - pair.total("predicted", "colocated")
    assert short_s > 4.0, "predictions are off to one side, and it shows"


def test_a_prefill_worker_that_takes_nothing_from_streams_is_seen_to_take_nothing_and_one_that_does_to_do() -> None:
    pair = Pair()
    pair.streaming()
    free = pair.remote(GAP_S)
    dragging = pair.remote(2 * GAP_S)
    assert free.measured_s == pytest.approx(PREFILL_S, abs=0.1)
    assert dragging.measured_s == pytest.approx(PREFILL_S + STREAMS * PREFILL_S / 2, rel=0.15)


def test_the_weight_of_a_stall_is_the_operator_s_and_without_streams_there_is_none() -> None:
    idle = Pair()
    assert idle.local(PREFILL_S).measured_s == pytest.approx(PREFILL_S, abs=0.01)
    pair = Pair()
    pair.streaming()
    pair.advisor.config = DisaggregationConfig(stall_weight=0.0, explore_share=0.0)
    assert pair.remote(2 * GAP_S).measured_s == pytest.approx(PREFILL_S, abs=0.1)


def test_a_worker_that_went_is_forgotten_once_its_requests_are_over() -> None:
    pair = Pair()
    pair.streaming()
    for kind in (ChangeKind.LEFT, ChangeKind.LOST):
        pair.advisor.on_change(Change(kind, D))
    assert set(pair.advisor.ledger.known) == {D.ref, P.ref}
    for stream in pair.streams:
        pair.hear(stream, FinishReason.LENGTH)
    assert pair.advisor.ledger.known == (P.ref,)
    pair.advisor.on_change(Change(ChangeKind.LOST, P))
    assert pair.advisor.ledger.known == ()
