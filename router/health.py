"""Whether a request can be served now, and what is missing: what both doors say of the router's health.

A request needs one decode worker that takes work; everything else is said and does not make it unhealthy, because requests
run on decode workers alone then. Does not know HTTP or gRPC.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from contracts.worker import WorkerKind, WorkerState
from router.admission.permits import Admission
from router.choosing.choice import Chooser
from router.openai.json import Json
from router.workers.breakers import BreakerReport, Breakers
from router.workers.pairs import Pair, PairBook, PairState
from router.workers.registry import Registry, Worker

_MOST_TROUBLES = 6
_REASON_CHARS = 100


@dataclass(frozen=True, slots=True)
class BadPair:
    """Two workers that are not combined, and why."""

    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class HealthReport:
    """`status` is ok, unavailable or stopping. `ready` counts workers by pool, `pairs` the pairs of them by state."""

    status: str
    ready: dict[str, int]
    missing: tuple[str, ...]
    pairs: dict[str, int]
    bad_pairs: tuple[BadPair, ...]
    breakers: tuple[BreakerReport, ...] = ()  # those that are not closed
    registry: str = "ok"  # or what keeps it away

    @property
    def servable(self) -> bool:
        """Whether a request can be served."""
        return self.status == "ok"

    def as_json(self) -> dict[str, Json]:
        """For a body."""
        bad: list[Json] = [{"prefill": p.prefill, "decode": p.decode, "reason": p.reason} for p in self.bad_pairs]
        breakers: list[Json] = [
            {"worker": b.worker_id, "pool": b.pool, "state": b.state, "reason": b.reason, "rests_s": b.rests_s}
            for b in self.breakers
        ]
        return {
            "status": self.status,
            "ready": self.ready,
            "missing": self.missing,
            "pairs": self.pairs,
            "bad_pairs": bad,
            "breakers": breakers,
            "registry": self.registry,
        }


class Health:
    """Asks registry, chooser, book and breakers at every question; owns nothing."""

    def __init__(
        self, registry: Registry, chooser: Chooser, book: PairBook, admission: Admission, breakers: Breakers
    ) -> None:
        self._breakers = breakers
        self._registry = registry
        self._chooser = chooser
        self._book = book
        self._admission = admission

    def report(self) -> HealthReport:
        """As it is now."""
        ready = {kind.value: len(self._registry.ready(kind)) for kind in WorkerKind}
        missing = [self._missing(kind) for kind in WorkerKind if ready[kind.value] == 0]
        states: Counter[PairState] = Counter(dict.fromkeys(PairState, 0))
        states.update(self._book.state(pair) for pair in self._chooser.pairs())
        if 0 < states[PairState.BAD] == states.total():
            missing.append("no hand-off gets through: every pair of workers is bad, decode workers run requests alone")
        servable = ready[WorkerKind.DECODE.value] > 0
        status = "stopping" if self._admission.closed else "ok" if servable else "unavailable"
        pairs = {state.value: states[state] for state in PairState}
        bad_pairs = tuple(map(self._bad, self._chooser.bad_pairs()))
        registry = f"away: {self._registry.problem}" if self._registry.problem else "ok"
        return HealthReport(status, ready, tuple(missing), pairs, bad_pairs, self._breakers.report(), registry)

    def troubles(self) -> tuple[str, ...]:
        """What is left out of serving though it is there, in a few words each; the first of them where they are many."""
        said = ["the registry is away"] if self._registry.problem else []
        said += [f"{b.worker_id} is left out ({_short(b.reason)})" for b in self._breakers.report()]
        bad = map(self._bad, self._chooser.bad_pairs())
        said += [f"no KV from {p.prefill} to {p.decode} ({_short(p.reason)})" for p in bad]
        more = len(said) - _MOST_TROUBLES
        return (*said[:_MOST_TROUBLES], *([f"{more} more, see /health"] if more > 0 else []))

    def _bad(self, pair: Pair) -> BadPair:
        return BadPair(pair.prefill.worker_id, pair.decode.worker_id, self._book.reason(pair))

    def _missing(self, kind: WorkerKind) -> str:
        states = Counter(_state(worker) for worker in self._registry.workers(kind))
        others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"no {kind} worker is ready" + (f" ({others})" if others else "")


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]}…"


def _state(worker: Worker) -> str:
    """Of one that is not offered."""
    if worker.load.state is not WorkerState.READY:
        return worker.load.state.value
    return "suspect" if worker.suspect else "silent"
