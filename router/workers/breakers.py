"""One circuit breaker per life of a worker: who has failed requests lately gets no more, but for a probe now and then.

    CLOSED ──failures_in_a_row, or failure_share of at least min_requests within window_s──▶ OPEN
    OPEN ──its back-off is over──▶ HALF_OPEN ──a probe worked──▶ CLOSED
      ▲                                │
      └──a probe failed: back-off doubled─┘        CLOSED ──another router warned──▶ HALF_OPEN

Every attempt's use of a worker is a `Trial`. What counts is what only the worker can be to blame for: a connection that
breaks or is not made, an internal fault, no answer in time; a full worker, one that drains, a client that leaves or errs, a
request's own deadline and a failed transfer (the pair's, see `router.workers.pairs`) do not. In HALF_OPEN one trial at a time
is let through, a user's or a canary's; one that says nothing for `probe_timeout_s` makes way for another. A trial that began
before the breaker opened says nothing of the worker as it is now. A warning is a rumour: it costs the worker one probe, no
outage, because the way from the other router to it may be what is broken. A worker whose breaker does not let a request
through is still offered where there is no other (`Candidate.doubtful`): a breaker guesses, and a refusal for certain is worse
than a guess. The retry budget keeps that from multiplying load. After Nygard's "Release It!" (circuit breaker) and Envoy's
outlier detection (growing ejections); pure over the clock. Does not know what a request is, nor routers besides this one: see
`router.workers.breaker_news`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from typing import Final

from contracts.clock import Clock
from contracts.errors import DiptychError, InternalError, Unavailable
from contracts.worker import WorkerInfo, WorkerRef
from observability.log import get_logger
from router.config import BreakerConfig
from router.workers.registry import Change, ChangeKind

log = get_logger(__name__)
_MOST_RUMOURS = 256  # of workers that are not here yet


class BreakerState(IntEnum):
    """Drawn above; the numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Event(IntEnum):
    """What a breaker hears."""

    WORKED = 0
    FAILED = 1  # not too much yet
    TRIPPED = 2  # one failure too many
    RESTED = 3  # its back-off is over
    WARNED = 4  # by another router


_S = BreakerState
TRANSITIONS: Final[dict[tuple[BreakerState, Event], BreakerState]] = {
    (_S.CLOSED, Event.WORKED): _S.CLOSED,
    (_S.CLOSED, Event.FAILED): _S.CLOSED,
    (_S.CLOSED, Event.TRIPPED): _S.OPEN,
    (_S.CLOSED, Event.WARNED): _S.HALF_OPEN,
    (_S.HALF_OPEN, Event.WORKED): _S.CLOSED,
    (_S.HALF_OPEN, Event.FAILED): _S.OPEN,
    (_S.HALF_OPEN, Event.TRIPPED): _S.OPEN,
    (_S.HALF_OPEN, Event.WARNED): _S.HALF_OPEN,
    (_S.OPEN, Event.WORKED): _S.CLOSED,  # a canary, or a request that had no other worker
    (_S.OPEN, Event.FAILED): _S.OPEN,
    (_S.OPEN, Event.TRIPPED): _S.OPEN,
    (_S.OPEN, Event.RESTED): _S.HALF_OPEN,
    (_S.OPEN, Event.WARNED): _S.OPEN,
}


def blames_worker(error: DiptychError) -> bool:
    """Whether this error counts against the worker that it came from."""
    return isinstance(error, Unavailable | InternalError)


@dataclass(slots=True)
class _Breaker:
    """Of one life of one worker. `outcomes` are instants and whether it worked, within the window."""

    info: WorkerInfo
    state: BreakerState = BreakerState.CLOSED
    reason: str = ""  # of the last opening or warning
    generation: int = 0  # of its last opening: what began before it says nothing
    in_a_row: int = 0
    num_openings: int = 0  # one after the other, the closed times between them short
    rests_until: float = 0.0
    closed_at: float = 0.0
    probing_until: float | None = None
    outcomes: deque[tuple[float, bool]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class BreakerReport:
    """One breaker that is not closed, for people."""

    worker_id: str
    pool: str
    state: str
    reason: str
    rests_s: float  # before it lets a probe through


class Trial:
    """One attempt's use of one worker. It may work and then fail, as when a worker goes away in the middle of an answer."""

    def __init__(self, breakers: Breakers, ref: WorkerRef, generation: int, probes_until: float | None) -> None:
        self._breakers = breakers
        self._ref = ref
        self._generation = generation
        self._probes_until = probes_until  # this is a probe, if set
        self._open = True
        self._worked = False

    def worked(self) -> None:
        """The worker did something for the request. Idempotent."""
        if self._open and not self._worked:
            self._worked = True
            self._breakers.judge(self._ref, self._generation, None)

    def failed(self, error: DiptychError) -> None:
        """It failed the request, and the trial ends; without a verdict where that is not to be blamed on the worker."""
        if self._open and blames_worker(error):
            self._breakers.judge(self._ref, self._generation, error.message)
        self.end()

    def end(self) -> None:
        """Nothing more is said. Idempotent."""
        if self._open:
            self._open = False
            self._breakers.forgo(self._ref, self._probes_until)


class Breakers:
    """The breakers of all workers that are here. Used on the event loop. `on_trip` hear of each opening by our own trials."""

    def __init__(self, config: BreakerConfig, clock: Clock, random: Random | None = None) -> None:
        """`random` draws the jitter."""
        self._config = config
        self._clock = clock
        self._random = random if random is not None else Random()
        self._breakers: dict[WorkerRef, _Breaker] = {}
        self._rumours: dict[WorkerRef, tuple[float, str]] = {}  # and until when they count
        self.on_trip: list[Callable[[WorkerRef, str], None]] = []
        self.on_open: Callable[[str, str], None] | None = None  # pool and cause, for a metric

    def on_change(self, change: Change) -> None:
        """A life that begins has a closed breaker, unless another router has warned of it; one that is over has none."""
        ref = change.info.ref
        if change.kind is ChangeKind.JOINED:
            self._breakers[ref] = _Breaker(change.info)
            until, reason = self._rumours.pop(ref, (0.0, ""))
            if self._clock.now() < until:
                self.warn(ref, reason)
        else:
            self._breakers.pop(ref, None)

    def state(self, ref: WorkerRef) -> BreakerState:
        """As it is now; closed for one that is not here."""
        breaker = self._breakers.get(ref)
        return BreakerState.CLOSED if breaker is None else self._now(breaker).state

    def offers(self, ref: WorkerRef) -> bool:
        """Whether a request may be sent there."""
        breaker = self._breakers.get(ref)
        if breaker is None or self._now(breaker).state is BreakerState.CLOSED:
            return True
        return breaker.state is BreakerState.HALF_OPEN and not self._probes(breaker)

    def begin(self, ref: WorkerRef) -> Trial:
        """A request is sent there, whatever the state: in HALF_OPEN it is the probe."""
        breaker = self._breakers.get(ref)
        if breaker is None:
            return Trial(self, ref, -1, None)
        probes_until: float | None = None
        if self._now(breaker).state is BreakerState.HALF_OPEN and not self._probes(breaker):
            probes_until = breaker.probing_until = self._clock.now() + self._config.probe_timeout_s
        return Trial(self, ref, breaker.generation, probes_until)

    def warn(self, ref: WorkerRef, reason: str) -> None:
        """Another router has found that this worker fails. Warnings and workers come in any order to a router that is new."""
        breaker = self._breakers.get(ref)
        if breaker is None:
            self._rumours.pop(ref, None)
            self._rumours[ref] = self._clock.now() + self._config.max_open_s, reason
            if len(self._rumours) > _MOST_RUMOURS:
                del self._rumours[next(iter(self._rumours))]
        elif self._now(breaker).state is BreakerState.CLOSED:
            breaker.reason = f"another router: {reason}"
            self._turn(breaker, Event.WARNED)

    def report(self) -> tuple[BreakerReport, ...]:
        """Those that are not closed."""
        now = self._clock.now()
        return tuple(
            BreakerReport(
                b.info.ref.worker_id,
                b.info.kind.value,
                b.state.name.lower(),
                b.reason,
                round(max(0.0, b.rests_until - now), 3) if b.state is BreakerState.OPEN else 0.0,
            )
            for b in map(self._now, self._breakers.values())
            if b.state is not BreakerState.CLOSED
        )

    def samples(self) -> list[tuple[str, str, int]]:
        """(worker id, pool, state as a number) of every worker that is here."""
        return [
            (b.info.ref.worker_id, b.info.kind.value, int(b.state)) for b in map(self._now, self._breakers.values())
        ]

    # What trials say

    def forgo(self, ref: WorkerRef, probes_until: float | None) -> None:
        """A trial is over: if it is the probe, another may be one."""
        breaker = self._breakers.get(ref)
        if breaker is not None and probes_until is not None and breaker.probing_until == probes_until:
            breaker.probing_until = None

    def judge(self, ref: WorkerRef, generation: int, reason: str | None) -> None:
        """A trial of this generation worked (`reason` None) or failed."""
        breaker = self._breakers.get(ref)
        if breaker is None or generation != breaker.generation:
            return
        before = self._now(breaker).state
        if reason is None:
            breaker.in_a_row = 0
        else:
            breaker.in_a_row += 1
        breaker.outcomes.append((self._clock.now(), reason is None))
        _forget(breaker.outcomes, self._clock.now() - self._config.window_s)
        tripped = reason is not None and (before is not BreakerState.CLOSED or self._is_too_much(breaker))
        if tripped:
            breaker.reason = reason or ""
        self._turn(breaker, Event.TRIPPED if tripped else Event.WORKED if reason is None else Event.FAILED)

    def _is_too_much(self, breaker: _Breaker) -> bool:
        config, outcomes = self._config, breaker.outcomes
        if breaker.in_a_row >= config.failures_in_a_row:
            return True
        failures = sum(not worked for _, worked in outcomes)
        return len(outcomes) >= config.min_requests and failures >= config.failure_share * len(outcomes)

    def _turn(self, breaker: _Breaker, event: Event) -> None:
        before, breaker.state = breaker.state, TRANSITIONS[breaker.state, event]
        if breaker.state is BreakerState.OPEN and event is Event.TRIPPED:
            self._open(breaker, is_new=before is not BreakerState.OPEN)
        elif breaker.state is not before and breaker.state is BreakerState.CLOSED:
            breaker.closed_at, breaker.in_a_row, breaker.probing_until = self._clock.now(), 0, None
            breaker.outcomes.clear()
            _say("worker's breaker closes: it works again", breaker)
        elif breaker.state is not before:
            breaker.probing_until = None
            _say("worker's breaker lets one request at a time through", breaker)
        if event is Event.WARNED and breaker.state is not before and self.on_open is not None:
            self.on_open(breaker.info.kind.value, "warned")

    def _open(self, breaker: _Breaker, *, is_new: bool) -> None:
        """Rest for twice the time of the last opening, unless that is forgotten."""
        config, now = self._config, self._clock.now()
        if breaker.num_openings and breaker.closed_at > 0 and now - breaker.closed_at > config.max_open_s:
            breaker.num_openings = 0
        rest_s = min(config.open_s * 2 ** min(breaker.num_openings, 20), config.max_open_s)
        rest_s *= 1 + config.jitter * self._random.uniform(-1.0, 1.0)
        breaker.num_openings += 1
        breaker.generation += 1
        breaker.rests_until, breaker.probing_until, breaker.closed_at = now + rest_s, None, 0.0
        breaker.outcomes.clear()
        if is_new:
            _say(
                "worker's breaker opens: it gets no requests while there is another", breaker, rests_s=round(rest_s, 3)
            )
            if self.on_open is not None:
                self.on_open(breaker.info.kind.value, "failures")
            for listener in self.on_trip:
                listener(breaker.info.ref, breaker.reason)

    def _now(self, breaker: _Breaker) -> _Breaker:
        """The same, after what time alone has changed."""
        if breaker.state is BreakerState.OPEN and self._clock.now() >= breaker.rests_until:
            self._turn(breaker, Event.RESTED)
        return breaker

    def _probes(self, breaker: _Breaker) -> bool:
        return breaker.probing_until is not None and self._clock.now() < breaker.probing_until


def _say(what: str, breaker: _Breaker, **more: float) -> None:
    ref, pool = breaker.info.ref, breaker.info.kind.value
    say = log.warning if breaker.state is BreakerState.OPEN else log.info
    say(what, worker_id=ref.worker_id, epoch=ref.epoch, pool=pool, reason=breaker.reason, **more)


def _forget(outcomes: deque[tuple[float, bool]], until_s: float) -> None:
    """Done at every outcome: a worker that never fails would have them kept for ever."""
    while outcomes and outcomes[0][0] <= until_s:
        outcomes.popleft()
