"""Tokens in, tokens out: one engine, whatever pool it serves.

    admit ───────────────▶ waiting ─▶ running ─▶ finished            a prompt whose KV does not exist yet
    admit(retain_kv) ────▶ waiting ─▶ running ─▶ Retained ─ release  one token here, then its KV belongs to the caller
    reserve ─ adopt ────────────────▶ running ─▶ finished            its KV came from elsewhere into the reserved lease

A step is schedule → execute → commit. All calls come from one thread, between steps (engine.loop sees to it). Errors of a
request are values or DiptychErrors; a RuntimeError out of here is a programming error and must end the process.
Does not know networks, workers or text, nor why KV is reserved or retained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from contracts.clock import Clock
from contracts.errors import InvalidRequest, Overloaded
from contracts.request import GenerationRequest
from contracts.worker import WorkerLoad
from engine.commit import Committer, News
from engine.config import EngineConfig
from engine.execution.interface import ModelRunner, SampledToken, ScheduledBatch, ScheduledRequest
from engine.kv.cache_manager import KVCacheManager
from engine.kv.lease import KVLease, LeaseError
from engine.lent import LentLeases
from engine.limits import EngineLimits
from engine.output import EngineStats, Progress, Retained, StepOutput
from engine.pace import Pace
from engine.request import Request
from engine.roster import Roster
from engine.scheduling.scheduler import Scheduler, Share
from engine.tempo import Tempo

__all__ = ["Engine", "EngineStats", "KVLease", "OnStarted", "Progress", "Retained", "StepOutput"]

OnStarted = Callable[[tuple[str, ...]], None]


class EngineStuck(RuntimeError):
    """Requests wait, no block is lent out, and yet nothing can run: a programming error."""


@dataclass(slots=True)
class _Step:
    """One step while it happens."""

    started_s: float
    news: News
    shares: tuple[Share, ...]
    num_preempted: int
    runner_s: float = 0.0

    def output(self, now_s: float) -> StepOutput:
        """What it tells the outside."""
        return StepOutput(
            deltas=tuple(self.news.deltas),
            progress=tuple(self.news.progress),
            retained=tuple(self.news.retained),
            num_scheduled_requests=len(self.shares),
            num_scheduled_tokens=sum(share.num_tokens for share in self.shares),
            num_preempted=self.num_preempted,
            ended=tuple(self.news.ended),
            num_made=self.news.num_made,
            step_s=now_s - self.started_s,
            runner_s=self.runner_s,
        )


class Engine:
    """Owns the scheduler, the KV books and every request between admit/adopt and its last delta.

    `pace` knows how long steps take here, from warm-up on; it may be read in any thread. `block_news` tells what the prefix cache
    finds, to whoever listens; `watch_blocks` takes who hears how long blocks live and lie idle.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, clock: Clock, pace: Pace | None = None) -> None:
        self.clock = clock
        self.pace = pace if pace is not None else Pace()
        self._runner = runner
        self._config = config.scheduler
        layout = runner.layout
        self._limits = EngineLimits(runner.vocab_size, runner.max_model_len, runner.num_blocks, layout)
        caching = self._config.enable_prefix_caching
        self._kv = KVCacheManager(runner.num_blocks, layout.block_size, layout.hash_seed, enable_prefix_caching=caching)
        self.block_news = self._kv.news
        self.watch_blocks = partial(self._kv.watch_lives, clock.now)
        self._scheduler = Scheduler(self._config, self._kv)
        self._roster = Roster()
        self._lent = LentLeases()
        self._committer = Committer(self._scheduler, self._kv, self._roster, self._lent, runner.eos_token_ids)
        self._num_steps = 0
        self._tempo = Tempo()

    def admit(self, request: GenerationRequest, *, retain_kv: bool = False, arrived_s: float | None = None) -> None:
        """Take a request whose KV is to be computed here; an answer that began elsewhere goes on at its next token.

        With `retain_kv` it makes one token, then leaves in StepOutput.retained with its lease (unless that token ended it).
        It has waited since `arrived_s`, an instant of the engine's clock: a step may have run when it came. None: since now.
        Raises InvalidRequest (malformed, id in use, could never fit) and Overloaded (queue full).
        """
        self._limits.check(request, retain_kv=retain_kv)
        self._roster.check_new(request.request_id)
        self._lent.check_new(request.request_id)
        if self._scheduler.num_waiting >= self._config.max_waiting:
            raise Overloaded(f"{self._scheduler.num_waiting} requests wait, the queue takes {self._config.max_waiting}")
        order = self._scheduler.next_order(request.priority)
        since_s = self.clock.now() if arrived_s is None else arrived_s
        self._committer.enter(Request(request, since_s, order, retain_kv=retain_kv))

    def reserve(self, request_id: str, num_tokens: int, block_hashes: tuple[bytes, ...]) -> KVLease | None:
        """Room for `num_tokens` tokens of KV from elsewhere, or None while there is none.

        The first `lease.num_cached_tokens` tokens are here already and must not be written. The caller gives the lease to
        `adopt` or `release`. Raises InvalidRequest when it could never fit, and for an id in use: of a request that runs, or
        of a lease that is lent out.
        """
        self._roster.check_new(request_id)
        self._lent.check_new(request_id)
        if num_tokens < 1:
            raise InvalidRequest("num_tokens", num_tokens, "must be at least 1")
        self._limits.check_fits("num_tokens", num_tokens, num_tokens)
        if not self._scheduler.has_room_for_reservation(num_tokens, self._lent.num_reserved):
            return None
        lease = self._kv.lease(request_id, num_tokens, block_hashes, num_tokens)
        if lease is not None:
            self._lent.reserve(lease)
        return lease

    def adopt(
        self,
        request: GenerationRequest,
        lease: KVLease,
        num_computed_tokens: int,
        seals: Sequence[bytes] = (),
        arrived_s: float | None = None,
    ) -> None:
        """Go on with a request whose first `num_computed_tokens` tokens' KV is in `lease`, which is the engine's from now on.

        `seals`, of its leading blocks, come back in `cached_seals` of a later lease that shares these blocks. `arrived_s` as in
        `admit`.
        Raises InvalidRequest (malformed, id in use, could never fit); then the lease is still the caller's.
        """
        self._lent.check_reserved(lease)
        self._limits.check(request, retain_kv=False)
        self._roster.check_new(request.request_id)
        most = min(len(lease.block_ids) * self._kv.block_size, request.num_tokens - 1)
        if not lease.num_cached_tokens <= num_computed_tokens <= most:
            allowed = f"must be from {lease.num_cached_tokens} to {most}"
            raise InvalidRequest("num_computed_tokens", num_computed_tokens, allowed)
        since_s = self.clock.now() if arrived_s is None else arrived_s
        record = Request(request, since_s, self._scheduler.next_order(request.priority))
        record.adopted = True
        record.start(self._lent.take_back(lease), num_computed_tokens)
        # Now, not after its first step: if it is preempted before that, its KV can still be found.
        self._committer.publish(record)
        self._kv.seal(lease, seals, num_computed_tokens)
        self._committer.enter(record)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks, without a delta. False if it is not (or no longer) here."""
        request = self._roster.find(request_id)
        if request is not None:
            self._committer.drop(request)
        return request is not None

    def release(self, lease: KVLease, spoiled: Sequence[int] = ()) -> None:
        """Give back a lease from `reserve` or StepOutput.retained. LeaseError for any other, or the second time.

        `spoiled` are positions of blocks whose content is not what it should be: the prefix cache forgets them.
        """
        self._lent.take_back(lease)
        self._kv.forget(lease, spoiled)
        lease.release()

    def step(self, on_started: OnStarted | None = None) -> StepOutput:
        """Compute once and tell what came of it. `on_started` hears, before the computing, which retaining requests begin."""
        step = self._schedule(on_started)
        self.pace.begin(sum(share.num_tokens for share in step.shares))
        sampled = self._execute(step)
        self._committer.commit(step.news, step.shares, sampled, self.clock.now())
        output = step.output(self.clock.now())
        self.pace.end(output.step_s)
        self._tempo.note(output.num_scheduled_requests, output.num_scheduled_tokens, output.step_s)
        return output

    @property
    def has_work(self) -> bool:
        """Whether any request is here; reserved and retained leases are not work."""
        return len(self._roster) > 0

    def next_deadline_s(self) -> float | None:
        """The instant of the engine's clock at which `step` must be called again even if nothing can run."""
        return self._roster.next_deadline_s()

    def load(self) -> WorkerLoad:
        """How busy the engine is; the state is the door's to fill in."""
        return WorkerLoad(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            kv_usage=self._kv.usage,
            decode_step_s=self._tempo.decode_step_s,
            prefill_tokens_per_s=self._tempo.prefill_tokens_per_s,
        )

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_prefix_queried_tokens=self._kv.num_queried_tokens,
            num_prefix_hit_tokens=self._kv.num_hit_tokens,
        )

    def block_hashes(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The chained hashes of the full blocks of `token_ids`, equal on every worker with the same layout."""
        return self._kv.hasher.chain(token_ids)

    def check_integrity(self) -> None:
        """Raise a RuntimeError unless free + cached + leased is all blocks and every lease has exactly one owner."""
        self._kv.check_integrity()
        owned = [*self._roster.leases(), *self._lent.leases()]
        if len(owned) != len(set(owned)) or set(owned) != self._kv.living_leases():
            raise LeaseError(f"{len(self._kv.living_leases())} leases live, {len(owned)} have an owner")

    def _schedule(self, on_started: OnStarted | None) -> _Step:
        now_s, num_preemptions = self.clock.now(), self._scheduler.num_preemptions
        news = News(now_s)
        self._committer.expire(news, now_s)
        shares = self._scheduler.schedule()
        num_preempted = self._scheduler.num_preemptions - num_preemptions
        if self.has_work and not (shares or num_preempted or self._lent):
            raise EngineStuck(f"{self._scheduler.num_waiting} requests wait and nothing can run")
        started = [share.request for share in shares if share.request.started_s is None]
        for request in started:
            request.begin(now_s)
        if on_started is not None and (retaining := tuple(r.request_id for r in started if r.retain_kv)):
            on_started(retaining)
        return _Step(now_s, news, shares, num_preempted)

    def _execute(self, step: _Step) -> tuple[SampledToken, ...]:
        self._num_steps += 1
        if not step.shares:
            return ()
        batch = ScheduledBatch(tuple(_scheduled(share) for share in step.shares))
        started_s = self.clock.now()
        sampled = self._runner.execute(batch)
        step.runner_s = self.clock.now() - started_s
        return sampled


def _scheduled(share: Share) -> ScheduledRequest:
    request = share.request
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_scheduled_tokens=share.num_tokens,
        block_ids=request.lease.block_ids,
        sampling=request.sampling,
    )
