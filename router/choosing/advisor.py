"""Decides the way of each attempt from what this router knows of the workers, and learns from how it went.

    begin(progress, pair) ─▶ loads, caches, backlogs, costs ─▶ Options ─▶ decide ─▶ Watch
    Watch: first token ─▶ second ─▶ hand-off known ─▶ the last ─▶ costs learn, the decision gets its measured cost

Every request teaches, whoever chose its way: a prompt what prefill costs, by itself or with those that were before it, unless
another of ours came after it, which may have shared its steps. What broke on the way teaches nothing.
Does not know attempts, connections or what is done with a decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from contracts.clock import Clock
from contracts.request import TokenDelta
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.decision_metrics import DecisionMetrics
from router.choosing.backlog import Run
from router.choosing.costs import Costs, PromptWork
from router.choosing.decision import Exploration, LocalCost, Options, RemoteCost, decide
from router.choosing.drag import Drag
from router.choosing.ledger import Ledger
from router.choosing.route import Decision, Reason, Route
from router.config import DisaggregationConfig, DisaggregationMode
from router.serving.progress import Progress
from router.workers.registry import Change, ChangeKind

_MOST_STEP_S = 60.0  # what a worker says of its step is not believed above
_REFIT_S = 0.25  # between two curves that follow what was measured: below a millisecond each, but of everybody's time
Pair = tuple[WorkerInfo, WorkerInfo]  # prefill, decode
Cached = Callable[[WorkerRef, Progress], int]  # leading tokens of the request that this worker has
Loads = Mapping[WorkerRef, WorkerLoad]  # the newest that each announced
_NO_LOAD = WorkerLoad()  # of a worker that is not there any more


def nothing_cached(ref: WorkerRef, progress: Progress) -> int:  # noqa: ARG001
    """For a router that does not know what workers have."""
    return 0


@dataclass(frozen=True, slots=True)
class Lost:
    """What the streams of a worker lose to a prefill, as predicted: `per_second` of its time, all of them together and weighted,
    beyond the first `free_s`. `ours` is the weight of a second that those lost that are ours, whose tokens we see: of others'
    streams there each is taken to lose as much. 0 where none is ours.
    """

    worker: WorkerRef
    per_second: float
    free_s: float
    ours: float

    def to(self, prefill_s: float) -> float:
        """Seconds."""
        return self.per_second * max(0.0, prefill_s - self.free_s)


@dataclass(frozen=True, slots=True)
class _Scene:
    """One worker as it is seen when an attempt begins."""

    info: WorkerInfo
    queue_s: float
    num_streams: int
    num_ours: int  # of the streams
    num_cached: int
    step_s: float  # of decode while nobody disturbs it


class Advisor:
    """Owns what has been learnt, `costs`, and one backlog per worker that has something of ours."""

    def __init__(
        self, config: DisaggregationConfig, clock: Clock, loads: Loads, cached: Cached, metrics: DecisionMetrics
    ) -> None:
        self.config = config
        self.clock = clock
        self.metrics = metrics
        self.costs = Costs()
        self._loads = loads
        self._cached = cached
        self.ledger = Ledger()
        self.exploration = Exploration(config.explore_share, config.explore_every_s, clock.now())
        self._keys = itertools.count()
        self._refit_at = 0.0

    @property
    def never(self) -> bool:
        """Whether no pair of workers need be looked for, unless the request asks for it."""
        return self.config.mode is DisaggregationMode.NEVER

    def on_change(self, change: Change) -> None:
        """A listener of the registry: workers that are gone are forgotten."""
        if change.kind is not ChangeKind.JOINED:
            self.ledger.gone(change.info.ref)

    def refit(self) -> None:
        """Called where nobody waits, after an answer: let the costs follow what was measured, a little at a time."""
        now = self.clock.now()
        if now >= self._refit_at and self.costs.refit():
            self._refit_at = now + _REFIT_S

    def begin(self, progress: Progress, pair: Pair, reason: Reason | None = None) -> Watch:
        """An attempt that may go both ways begins; with a `reason` it goes over both pools."""
        prefill, decode = self._scene(pair[0], progress), self._scene(pair[1], progress)
        options = self._options(progress, prefill, decode)
        if reason is None:
            by_model = self.config.mode is DisaggregationMode.AUTO and self.config.above_tokens is None
            explore = by_model and self.exploration.wants(options, self.clock.now())
            decision = decide(self.config, options, explore=explore)
        else:
            local_s, remote_s = options.local.total_s, options.remote.total_s
            decision = Decision(Route.DISAGGREGATED, reason, remote_s, local_s)
        if decision.path is Route.COLOCATED:
            return self._watch(progress, decision, (decode, options.local.prefill_s), self._stall(decode))
        drag = self._drag(prefill, decode)
        return self._watch(progress, decision, (prefill, options.remote.prefill_s), drag)

    def begin_alone(self, progress: Progress, decode: WorkerInfo, reason: Reason) -> Watch:
        """An attempt that goes on a decode worker alone for this reason."""
        scene = self._scene(decode, progress)
        local = self._local(progress, scene)
        decision = Decision(Route.COLOCATED, reason, None, local.total_s)
        return self._watch(progress, decision, (scene, local.prefill_s), self._stall(scene))

    def _watch(self, progress: Progress, decision: Decision, place: tuple[_Scene, float], lost: Lost) -> Watch:
        """`place` is who computes the prompt, and for how long."""
        scene, work_s = place
        now = self.clock.now()
        self.exploration.went(decision.path, now)
        self.metrics.decided(decision.path.value, decision.reason.value)
        progress.decision = decision
        beside = scene.num_streams if decision.path is Route.COLOCATED else 0
        work = PromptWork(_num_tokens(progress), scene.num_cached, beside)
        watch = Watch(self, progress, scene.info.ref, (next(self._keys), now), (work, lost))
        self.ledger.prompt((scene.info.ref, scene.info.kind), watch.key, (work, work_s), now)
        return watch

    def _scene(self, info: WorkerInfo, progress: Progress) -> _Scene:
        now, load, backlog = self.clock.now(), self._loads.get(info.ref, _NO_LOAD), self.ledger.backlog(info.ref)
        costs = self.costs.prefill[info.kind]
        costs.believe(load.prefill_tokens_per_s)
        requests = load.num_running + load.num_waiting
        tokens, others = backlog.others((load.num_queued_tokens, requests), now)
        waiting = max(1, min(load.num_waiting, others))
        queue_s = backlog.waiting_s(now)
        if tokens > others:  # a stream has one token to compute always
            queue_s += waiting * costs.predict(info.ref, PromptWork(max(1, tokens // waiting)))
        num_streams = backlog.num_streams + min(others, load.num_running)
        num_cached = min(self._cached(info.ref, progress), _num_tokens(progress) - 1)
        step_s = load.decode_step_s if load.decode_step_s < _MOST_STEP_S else 0.0  # nor where it is no number
        if info.kind is WorkerKind.PREFILL:
            return _Scene(info, queue_s, 0, 0, num_cached, step_s)
        undisturbed_s = self.ledger.drag(info.ref).step_s(num_streams)
        step_s = step_s if undisturbed_s is None else undisturbed_s
        return _Scene(info, queue_s, num_streams, backlog.num_streams, num_cached, step_s)

    def _options(self, progress: Progress, prefill: _Scene, decode: _Scene) -> Options:
        num_tokens = _num_tokens(progress)
        num_uncached = num_tokens - decode.num_cached
        token_bytes = decode.info.layout.token_bytes
        work = PromptWork(num_tokens, prefill.num_cached)
        prefill_s = self.costs.prefill[WorkerKind.PREFILL].predict(prefill.info.ref, work)
        whole_s = transfer_s = self.costs.transfer_s(num_tokens * token_bytes)
        if decode.num_cached:
            transfer_s = self.costs.transfer_s(num_uncached * token_bytes)
        remote = RemoteCost(
            queue_s=prefill.queue_s + self.costs.overhead[WorkerKind.PREFILL].mean_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            settle_s=self.costs.settle.mean_s,
            busy_s=self._busy_s(decode),
            drag_s=self._drag(prefill, decode).to(prefill_s),
            saved_s=whole_s - transfer_s,
        )
        return Options(remote, self._local(progress, decode), num_uncached)

    def _busy_s(self, decode: _Scene) -> float:
        """For how long decode may not take a continuation in: it does so between steps, one of which may be a whole chunk."""
        chunk = decode.info.max_num_batched_tokens
        if not chunk:
            return decode.queue_s
        costs = self.costs.prefill[WorkerKind.DECODE]
        return min(decode.queue_s, costs.predict(decode.info.ref, PromptWork(chunk, 0, decode.num_streams)))

    def _local(self, progress: Progress, decode: _Scene) -> LocalCost:
        num_tokens, stall = _num_tokens(progress), self._stall(decode)
        costs, ref = self.costs.prefill[WorkerKind.DECODE], decode.info.ref
        whole_s = left_s = costs.predict(ref, PromptWork(num_tokens, 0, decode.num_streams))
        if decode.num_cached:
            left_s = costs.predict(ref, PromptWork(num_tokens, decode.num_cached, decode.num_streams))
        own_step_s = decode.step_s / 2 if decode.num_streams else 0.0  # the one that runs when it comes
        return LocalCost(
            queue_s=decode.queue_s + self.costs.overhead[WorkerKind.DECODE].mean_s + own_step_s,
            prefill_s=left_s,
            stall_s=stall.to(left_s),
            saved_s=whole_s - left_s + stall.to(whole_s) - stall.to(left_s),
        )

    def _stall(self, decode: _Scene) -> Lost:
        """Streams wait while their worker reads a prompt, but for one step, which they would have taken anyway."""
        return self._lost(decode, 1.0, decode.step_s)

    def _drag(self, prefill: _Scene, decode: _Scene) -> Lost:
        """Streams get slower while a prefill worker on the same machine reads a prompt."""
        return self._lost(decode, self.ledger.drag(decode.info.ref).share(prefill.info.ref), 0.0)

    def _lost(self, decode: _Scene, share: float, free_s: float) -> Lost:
        weight = self.config.stall_weight * decode.num_streams
        ours = weight / decode.num_ours if decode.num_ours else 0.0
        return Lost(decode.info.ref, weight * share, free_s, ours)


def _num_tokens(progress: Progress) -> int:
    """Of the prompt and the answer so far."""
    return len(progress.job.prompt_token_ids) + len(progress.token_ids)


class Watch:
    """One attempt from its beginning to its end: hears its deltas, keeps the backlogs, teaches the costs."""

    def __init__(
        self,
        advisor: Advisor,
        progress: Progress,
        computes: WorkerRef,
        begun: tuple[int, float],
        expected: tuple[PromptWork, Lost],
    ) -> None:
        """`computes` is the worker that reads the prompt; `begun` a key and when; `expected` its work, and streams' losses."""
        self.key, self._started_at = begun
        self._advisor = advisor
        self._progress = progress
        self._computes = computes
        self._streams_at: WorkerRef | None = None
        self._work, self._lost = expected
        self._computing_since = self._started_at
        self._lost_s: float | None = None  # what streams were seen to lose, weighted
        self._drag: Drag | None = None  # of the worker that the tokens come from
        self._run: Run | None = None
        self._first_at: float | None = None
        self._second = False
        self._taught_transfer = False
        self._clean = progress.num_failures + progress.num_moves + progress.num_handoff_failures == 0

    @property
    def path(self) -> Route:
        """The way of the attempt."""
        return self._decision.path

    def heard(self, delta: TokenDelta, now: float) -> None:
        """A delta that came at `now`, and that the progress has accepted. It may be told of once it was passed on."""
        if self._drag is not None:
            self._drag.heard(len(delta.token_ids), now)
        if self._first_at is None:
            self._first_at = now
            self._computing_since = max(self._started_at, self._advisor.ledger.begun_s(self._computes))
            self._work = replace(self._work, num_cached=delta.num_cached_tokens)
            self._run = self._advisor.ledger.computed(self._computes, self.key, now)
            if self.path is Route.COLOCATED:
                self._stream(self._computes, now)
        elif not self._second:
            self._second = True
            self._see_lost(self._first_at)  # now that streams have had the tokens of that step
            if self.path is Route.DISAGGREGATED:
                self._stream(self._progress.at[WorkerKind.DECODE], now)
        if not self._taught_transfer and self._progress.handoff is not None:
            self._teach_transfer()
        if delta.finish_reason is not None:
            self._finish()

    def end(self) -> None:
        """The attempt is over, however it ended. Idempotent."""
        advisor = self._advisor
        now = advisor.clock.now()
        advisor.ledger.end(self._computes, self.key, now)
        if self._streams_at is not None and self._streams_at != self._computes:
            advisor.ledger.end(self._streams_at, self.key, now)
        advisor.refit()

    @property
    def _decision(self) -> Decision:
        decision = self._progress.decision
        assert decision is not None
        return decision

    def _stream(self, ref: WorkerRef, now: float) -> None:
        self._streams_at = ref
        self._drag = self._advisor.ledger.stream(ref, self.key, now)

    @property
    def _undisturbed(self) -> bool:
        progress = self._progress
        return self._clean and progress.num_failures + progress.num_moves + progress.num_handoff_failures == 0

    def _teach_transfer(self) -> None:
        self._taught_transfer = True
        handoff = self._progress.handoff
        if handoff is not None and self._undisturbed:
            self._advisor.costs.transferred(handoff.kv_bytes, self._progress.stages.transfer_s)
            self._teach_prefill(WorkerKind.PREFILL)

    def _teach_prefill(self, kind: WorkerKind) -> None:
        stages, costs = self._progress.stages, self._advisor.costs
        if self._run is not None and self._first_at is not None and stages.prefill_compute_s > 0:
            alone = self._run.before.num_prompts == 0
            sizes = self._run.before.plus(self._work).sizes
            took_s = stages.prefill_compute_s if alone else self._first_at - self._run.since
            costs.prefill[kind].observe(self._computes, sizes, took_s)
        if self._first_at is not None:
            waited_s = self._first_at - self._started_at
            costs.overhead[kind].observe(waited_s - stages.prefill_queue_s - stages.prefill_compute_s)

    def _see_lost(self, first_at: float) -> None:
        if self._lost.ours:
            lost_s = self._advisor.ledger.drag(self._lost.worker).lost_s(self._computing_since, first_at)
            self._lost_s = None if lost_s is None else self._lost.ours * lost_s

    def _finish(self) -> None:
        """The answer is whole, and its stages are known."""
        if not self._undisturbed or self._first_at is None:
            return
        if not self._second:
            self._see_lost(self._first_at)
        stages = self._progress.stages
        lost_s = self._lost.to(stages.prefill_compute_s) if self._lost_s is None else self._lost_s
        measured_s = self._first_at - self._started_at + lost_s
        if self.path is Route.COLOCATED:
            self._teach_prefill(WorkerKind.DECODE)
        elif self._progress.handoff is None:  # it ended with its first token
            self._teach_prefill(WorkerKind.PREFILL)
        else:
            settled_s = stages.commit_s + stages.decode_queue_s
            self._advisor.costs.settle.observe(settled_s)
            measured_s += stages.transfer_s + settled_s
        self._progress.decision = decision = replace(self._decision, measured_s=measured_s)
        self._advisor.exploration.learnt(decision)
        self._advisor.metrics.measured(decision.path.value, measured_s, decision.predicted_s, decision.regret_s)
