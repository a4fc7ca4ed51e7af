"""Routers in virtual time: the real chooser, policies, index and tallies; connections, retries and admission are left out.

    ask ──▶ Chooser.pair ──▶ prompts.sent, claims ──▶ the workers ──▶ computed, released

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
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from engine.kv.block_news import BlockChanges
from observability.policy_metrics import PolicyMetrics
from router.choosing.choice import Chooser
from router.choosing.prefix_index import PrefixIndex
from router.choosing.prompts import Prompts
from router.config import CanaryConfig, RetryConfig
from router.policies import Candidate, Policy, PolicyContext, make_policy
from router.serving.progress import Job, Progress
from router.workers.pairs import PairBook
from router.workers.registry import Change, ChangeKind, Worker
from router.workers.tally import Tally

_LONG_S = 1e9


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """Names of policies, the seed of what they draw, and for how long a prompt counts as cached where it was sent."""

    prefill: str
    decode: str
    seed: int = 0
    expect_s: float = 5.0


class SimulatedPools:
    """What `Pools` is to a chooser: candidates, from announcements and this router's own tallies."""

    def __init__(self, workers: Sequence[SimulatedWorker], timeline: Timeline) -> None:
        self._timeline = timeline
        self._tallies = {worker.info.ref: Tally(worker.info) for worker in workers}
        self._known = {worker.info.ref: Worker(worker.info, WorkerLoad(), 0.0) for worker in workers}

    def candidates(self, kind: WorkerKind) -> tuple[Candidate, ...]:
        """See Pools."""
        return tuple(
            self._tallies[ref].candidate(worker) for ref, worker in self._known.items() if worker.info.kind is kind
        )

    def announced(self, info: WorkerInfo, load: WorkerLoad) -> None:
        """A worker says how busy it is."""
        self._known[info.ref] = Worker(info, load, self._timeline.now())

    def tally(self, ref: WorkerRef) -> Tally:
        """What this router has given that worker."""
        return self._tallies[ref]


@dataclass(slots=True)
class Sent:
    """One request on its way, and what it burdens: `computed` and `released` give that back, each once."""

    prefill: WorkerRef
    decode: WorkerRef
    _prefill: Tally
    _decode: Tally
    _num_tokens: int
    _num_kv_tokens: int

    def computed(self) -> None:
        """Its first token has come; over the hand-off the prefill worker is done with it."""
        self._prefill.add(-1, -self._num_tokens, 0)

    def released(self) -> None:
        """It has ended."""
        self._decode.add(-1, 0, -self._num_kv_tokens)


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

    def send(self, request_id: str, asked: Asked, session: str) -> Sent:
        """Choose two workers for it, and count it there."""
        job = Job(
            request_id=request_id,
            prompt_token_ids=asked.token_ids,
            sampling=SamplingParams(max_tokens=asked.num_output),
            deadline=_LONG_S,
            session=session,
        )
        progress = Progress(job, self._timeline, RetryConfig())
        pair = self._chooser.pair(progress, forced=True)
        if pair is None:
            raise RuntimeError("there are workers of both pools, and no pair was chosen")
        prefill, decode = (info.ref for info in pair)
        num_tokens = len(asked.token_ids)
        to_compute = self._prompts.sent(progress, prefill, WorkerKind.PREFILL, num_tokens)
        self._prompts.sent(progress, decode, WorkerKind.DECODE, num_tokens)
        at_prefill, at_decode = self.pools.tally(prefill), self.pools.tally(decode)
        at_prefill.add(1, to_compute, 0)
        at_decode.add(1, 0, num_tokens)
        return Sent(prefill, decode, at_prefill, at_decode, to_compute, num_tokens)

    def hear(self, ref: WorkerRef, changes: BlockChanges) -> None:
        """A worker's block events."""
        self.index.removed(ref, short_names(changes.removed))
        self.index.stored(ref, short_names(changes.stored))
