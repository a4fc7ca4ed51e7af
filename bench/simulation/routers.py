"""Routers in virtual time: the real chooser, policies, index and tallies; connections, retries and admission are left out.

    ask ──▶ Chooser.pair ──▶ the way: both pools, or as the Advisor says ──▶ prompts.sent, claims ──▶ the workers ──▶ heard, ended

Each router hears announcements every second and block events a moment after each step, as over a network. Does not know what
workers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from bench.simulation.trace import Asked
from bench.simulation.workers import SimulatedWorker, Timeline
from contracts.block_hash import short_names
from contracts.prefill import HandedOff
from contracts.request import TokenDelta
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from engine.kv.block_news import BlockChanges
from observability.decision_metrics import DecisionMetrics
from observability.policy_metrics import PolicyMetrics
from observability.stages import HandoffStats, StageTimes
from router.choosing.advisor import Advisor, Watch
from router.choosing.choice import Chooser
from router.choosing.prefix_index import PrefixIndex
from router.choosing.prompts import Prompts
from router.choosing.route import Route
from router.config import CanaryConfig, DisaggregationConfig, RetryConfig
from router.policies import Candidate, Policy, PolicyContext, make_policy
from router.serving.progress import Job, Progress
from router.workers.pairs import PairBook
from router.workers.registry import Change, ChangeKind, Worker
from router.workers.tally import Tally

_LONG_S = 1e9


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """Names of policies, the seed of what they draw, and for how long a prompt counts as cached where it was sent.

    `ways` None sends everything over both pools, and asks nobody. `sessions` passes on what clients say.
    """

    prefill: str
    decode: str
    seed: int = 0
    expect_s: float = 5.0
    ways: DisaggregationConfig | None = None
    sessions: bool = False


class SimulatedPools:
    """What `Pools` is to a chooser: candidates, from announcements and this router's own tallies."""

    def __init__(self, workers: Sequence[SimulatedWorker], timeline: Timeline) -> None:
        self._timeline = timeline
        self._tallies = {worker.info.ref: Tally(worker.info, timeline.now) for worker in workers}
        self._known = {worker.info.ref: Worker(worker.info, WorkerLoad(), 0.0) for worker in workers}
        self.loads: dict[WorkerRef, WorkerLoad] = {}  # see Pools

    def candidates(self, kind: WorkerKind) -> tuple[Candidate, ...]:
        """See Pools."""
        return tuple(
            self._tallies[ref].candidate(worker) for ref, worker in self._known.items() if worker.info.kind is kind
        )

    def announced(self, info: WorkerInfo, load: WorkerLoad) -> None:
        """A worker says how busy it is."""
        self._known[info.ref] = Worker(info, load, self._timeline.now())
        self.loads[info.ref] = load
        self._tallies[info.ref].heard(load)

    def tally(self, ref: WorkerRef) -> Tally:
        """What this router has given that worker."""
        return self._tallies[ref]


@dataclass(slots=True)
class Sent:
    """One request on its way, and what it burdens: its first token and its last give that back.

    `prefill` is who computes the prompt: the decode worker where `alone`.
    """

    prefill: WorkerRef
    decode: WorkerRef
    alone: bool
    progress: Progress
    _prefill: Tally
    _decode: Tally
    _num_tokens: int
    _watch: Watch | None
    _now: Callable[[], float]

    def heard(self, delta: TokenDelta) -> None:
        """One of its tokens has come; over the hand-off the prefill worker is done with it after the first."""
        if not self.progress.token_ids:
            self._prefill.add(0 if self.alone else -1, -self._num_tokens, 0)
        self.progress.accept(delta)
        if self._watch is not None:
            self._watch.heard(delta, self._now())
        if delta.finish_reason is not None:
            self._decode.add(-1, 0, -len(self.progress.job.prompt_token_ids))
            if self._watch is not None:
                self._watch.end()

    def handed_over(self, stages: StageTimes, num_bytes: int) -> None:
        """Its KV is at the decode worker."""
        self.progress.handed_off(HandedOff("", HandoffStats("local", num_bytes), stages))


class SimulatedRouter:
    """One router over all workers."""

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        timeline: Timeline,
        setup: RouterSetup,
        make: Callable[[str, PolicyContext], Policy] = make_policy,
    ) -> None:
        self.pools = SimulatedPools(workers, timeline)
        self.index = PrefixIndex(timeline, setup.expect_s)
        book = PairBook(CanaryConfig(interval_s=0.0), timeline)
        for worker in workers:
            self.index.join(worker.info)
            book.on_change(Change(ChangeKind.JOINED, worker.info))
        names = {WorkerKind.PREFILL: setup.prefill, WorkerKind.DECODE: setup.decode}
        policies = {kind: make(name, PolicyContext(kind, self.index, setup.seed)) for kind, name in names.items()}
        self._timeline = timeline
        self._prompts = Prompts(self.index, PolicyMetrics(CollectorRegistry()))
        self._chooser = Chooser(self.pools, policies, book, self._prompts)
        self._sessions = setup.sessions
        self._advisor: Advisor | None = None
        if setup.ways is not None:
            ways = DecisionMetrics(CollectorRegistry())
            self._advisor = Advisor(setup.ways, timeline, self.pools.loads, self._prompts.cached_tokens, ways)

    def send(self, request_id: str, asked: Asked) -> Sent:
        """Choose two workers for it, and count it there."""
        job = Job(
            request_id=request_id,
            prompt_token_ids=asked.token_ids,
            sampling=SamplingParams(max_tokens=asked.num_output),
            deadline=_LONG_S,
            session=asked.session if self._sessions else "",
        )
        progress = Progress(job, self._timeline, RetryConfig())
        pair = self._chooser.pair(progress, forced=self._advisor is None)
        if pair is None:
            raise RuntimeError("there are workers of both pools, and no pair was chosen")
        watch = None if self._advisor is None else self._advisor.begin(progress, pair)
        alone = watch is not None and watch.path is Route.COLOCATED
        prefill, decode = (pair[1].ref, pair[1].ref) if alone else (pair[0].ref, pair[1].ref)
        progress.at = {WorkerKind.PREFILL: prefill, WorkerKind.DECODE: decode}
        num_tokens = len(asked.token_ids)
        to_compute = num_tokens
        if not alone:
            to_compute = self._prompts.sent(progress, prefill, WorkerKind.PREFILL, num_tokens)
        left = self._prompts.sent(progress, decode, WorkerKind.DECODE, num_tokens)
        at_prefill, at_decode = self.pools.tally(prefill), self.pools.tally(decode)
        if alone:
            to_compute = left
            at_decode.add(1, to_compute, num_tokens)
        else:
            at_prefill.add(1, to_compute, 0)
            at_decode.add(1, 0, num_tokens)
        return Sent(prefill, decode, alone, progress, at_prefill, at_decode, to_compute, watch, self._timeline.now)

    def hear(self, ref: WorkerRef, changes: BlockChanges) -> None:
        """A worker's block events."""
        self.index.removed(ref, short_names(changes.removed))
        self.index.stored(ref, short_names(changes.stored))
