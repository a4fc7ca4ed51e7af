"""How much one caller may use per minute: token buckets for requests and for tokens, taken together or not at all.

    take(wanted) ──▶ granted, all are charged        give(back) ──▶ what was not used is there again; what was used beyond
                 ──▶ refused, none is charged; when to come back        what was taken is owed

A bucket of `per_minute` refills evenly and holds what `burst_s` refill: in any window of w seconds at most
per_minute * (burst_s + w) / 60 are granted. It is one number, the instant at which it will be full again (the "theoretical
arrival time" of the generic cell rate algorithm, ITU-T I.371): there is no timer, and nothing to keep of who is idle. One that
wants more than a bucket holds takes all of it, and owes the rest when it turns out to need it.

`GCRA` is the same arithmetic in Lua, for buckets that several routers share (`router.admission.shared_limits`). Does not know
requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from contracts.clock import Clock

_KEPT = 10_000  # buckets, before those that are full are forgotten


class Kind(StrEnum):
    """What is counted."""

    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket's rule. Raises ValueError when it would never let anything through."""

    per_minute: int
    burst_s: float = 60.0

    def __post_init__(self) -> None:
        if self.per_minute < 1 or not self.burst_s > 0:
            raise ValueError(
                f"a rate of {self.per_minute} per minute, of {self.burst_s} s at once, lets nothing through"
            )

    @property
    def interval_s(self) -> float:
        """In which one is refilled."""
        return 60.0 / self.per_minute

    @property
    def capacity(self) -> float:
        """Most that it holds: never below one, so that something gets through."""
        return max(1.0, self.per_minute * self.burst_s / 60.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to take from one bucket."""

    kind: Kind
    rate: Rate
    amount: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One bucket after it was asked: what is left, and in how many seconds it is full."""

    kind: Kind
    limit: int  # per minute
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it. `lacking` is the bucket that has too little for the longest, `retry_after_s` until it has enough."""

    standings: tuple[Standing, ...] = ()
    lacking: Kind | None = None
    retry_after_s: float = 0.0

    @property
    def granted(self) -> bool:
        """Whether it was taken."""
        return self.lacking is None


class Buckets(Protocol):
    """Where the buckets are."""

    async def take(self, owner: str, wanted: Sequence[Wanted]) -> Verdict:
        """Take everything that is wanted for `owner`, or nothing."""
        ...

    async def give(self, owner: str, back: Sequence[Wanted]) -> None:
        """Correct what was taken: positive amounts were not used, negative ones were used beyond it."""
        ...


def asked(full_at: Mapping[Kind, float], now: float, wanted: Sequence[Wanted]) -> tuple[Verdict, dict[Kind, float]]:
    """What comes of wanting all this at `now` from buckets that will be full at `full_at` (absent: they are).

    Returns the verdict and the buckets after it: charged when it is granted, as they were when not.
    """
    before = {want.kind: max(now, full_at.get(want.kind, now)) for want in wanted}
    after = dict(before)
    lacking, retry_after_s = None, 0.0
    for want in wanted:
        rate = want.rate
        after[want.kind] += min(want.amount, rate.capacity) * rate.interval_s
        wait_s = after[want.kind] - now - rate.capacity * rate.interval_s
        if wait_s > max(retry_after_s, rate.interval_s * 1e-6):  # else it is rounding
            lacking, retry_after_s = want.kind, wait_s
    left = before if lacking is not None else after
    standings = tuple(standing(want, left[want.kind] - now) for want in wanted)
    return Verdict(standings, lacking, retry_after_s), left


def standing(want: Wanted, full_in_s: float) -> Standing:
    """A bucket that is full in so many seconds."""
    remaining = want.rate.capacity - full_in_s / want.rate.interval_s
    return Standing(want.kind, want.rate.per_minute, max(0, int(remaining + 1e-6)), full_in_s)


def corrected(full_at: float, now: float, back: Wanted) -> float:
    """When a bucket will be full to which `back` is given: no sooner than now."""
    return max(now, max(now, full_at) - back.amount * back.rate.interval_s)


class LocalBuckets:
    """Buckets of this process. Forgets those that are full, so that it grows with callers that are busy, not with all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._full_at: dict[tuple[str, Kind], float] = {}

    async def take(self, owner: str, wanted: Sequence[Wanted]) -> Verdict:
        """See Buckets."""
        now = self._clock.now()
        held = {want.kind: self._full_at.get((owner, want.kind), now) for want in wanted}
        verdict, after = asked(held, now, wanted)
        self._full_at.update({(owner, kind): instant for kind, instant in after.items()})
        if len(self._full_at) > _KEPT:
            self._full_at = {key: instant for key, instant in self._full_at.items() if instant > now}
        return verdict

    def level(self, owner: str, standings: Sequence[Standing], *, at_least: bool = False) -> None:
        """Make the buckets as full as these are; with `at_least` only those that are fuller than these."""
        now = self._clock.now()
        for standing in standings:
            key, full_at = (owner, standing.kind), now + standing.reset_s
            self._full_at[key] = max(full_at, self._full_at.get(key, now)) if at_least else full_at

    async def give(self, owner: str, back: Sequence[Wanted]) -> None:
        """See Buckets."""
        now = self._clock.now()
        for part in back:
            key = (owner, part.kind)
            self._full_at[key] = corrected(self._full_at.get(key, now), now, part)
