"""The choice of workers for one request: each pool's policy over the candidates, those that failed it already last.

A prefill and a decode worker that are a bad pair (`router.workers.pairs`) are never combined. So the decode worker is chosen among
those that some prefill worker can hand over to, and then the prefill worker among those that can hand over to it. Workers that
are too small for the request (`router.choosing.fit`) are none of its candidates.

An answer beside another goes where that one is, so that the prompt is computed once and its blocks are shared: always in the
prefill pool, where it adds a block's work; in the decode pool while that worker has room and is not far ahead of the others.

Does not know what the worker will be asked to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing.fit import fits
from router.choosing.prompts import Prompts
from router.policies import Candidate, Policy
from router.serving.progress import Progress
from router.workers.pairs import Pair, PairBook, PairState

_CROWDED = 0.9  # share of the KV memory that is in use
_MOST_AHEAD = 16  # requests more than the one with the fewest: streams are worth more than shared blocks then


class Offers(Protocol):
    """Who takes work now: `router.workers.pools.Pools`, or the simulator's."""

    def candidates(self, kind: WorkerKind) -> tuple[Candidate, ...]:
        """The workers of a pool that take work now."""
        ...


class Chooser:
    """Owns one policy per pool."""

    def __init__(self, pools: Offers, policies: Mapping[WorkerKind, Policy], book: PairBook, prompts: Prompts) -> None:
        """`prompts` knows who has what of a request's prompt."""
        self.prompts = prompts
        self._pools = pools
        self._policies = dict(policies)
        self._book = book

    def decode(self, progress: Progress) -> WorkerInfo | None:
        """A decode worker to run the request alone, None when none is ready. One to avoid only when there is no other."""
        pool = self.candidates(WorkerKind.DECODE, progress)
        return self._pick(WorkerKind.DECODE, progress, (_fresh(pool, progress), pool))

    def decode_for(self, prefill: WorkerRef, progress: Progress) -> WorkerInfo | None:
        """A decode worker that this prefill worker can hand over to; never one with which it is a bad pair."""
        pool = [c for c in self.candidates(WorkerKind.DECODE, progress) if not self._book.is_bad(prefill, c.info.ref)]
        return self._pick(WorkerKind.DECODE, progress, (_fresh(pool, progress), pool))

    def pair(self, progress: Progress, *, forced: bool) -> tuple[WorkerInfo, WorkerInfo] | None:
        """A prefill and a decode worker that are no bad pair, None when there are none.

        Those that failed the request come last; a prefill worker that did only if the hand-over is `forced`, because a
        decode worker alone is better.
        """
        prefills, decodes = (self.candidates(kind, progress) for kind in (WorkerKind.PREFILL, WorkerKind.DECODE))
        fresh = _fresh(prefills, progress)
        by_whom = (fresh, prefills) if forced else (fresh,)
        # Lazily, here and below: the first pool is nearly always the one, and each asks the book about every pair.
        pools = (self._reached(by, of) for by in by_whom for of in (_fresh(decodes, progress), decodes))
        decode = self._pick(WorkerKind.DECODE, progress, pools)
        if decode is None:
            return None
        reaching = ([c for c in pool if not self._book.is_bad(c.info.ref, decode.ref)] for pool in by_whom)
        prefill = self._pick(WorkerKind.PREFILL, progress, reaching)
        return None if prefill is None else (prefill, decode)

    def offer(self) -> tuple[object, ...]:
        """What can be chosen now, to be compared with what could before: who takes work, and which pairs are bad."""
        pools = (self._pools.candidates(kind) for kind in WorkerKind)
        return (*(tuple((c.info.ref, c.doubtful) for c in pool) for pool in pools), self._book.bad)

    def bad_pairs(self) -> list[Pair]:
        """The bad ones among the workers that take work now."""
        return [pair for pair in self.pairs() if self._book.state(pair) is PairState.BAD]

    def pairs(self) -> list[Pair]:
        """All pairs of workers that take work now."""
        prefills, decodes = (self._pools.candidates(kind) for kind in (WorkerKind.PREFILL, WorkerKind.DECODE))
        return [Pair(prefill.info.ref, decode.info.ref) for prefill in prefills for decode in decodes]

    def candidates(self, kind: WorkerKind, progress: Progress) -> list[Candidate]:
        """The workers of a pool that take work now and are large enough for the request."""
        return [c for c in self._pools.candidates(kind) if fits(c.info, progress)]

    def has_other(self, kinds: Iterable[WorkerKind], progress: Progress) -> bool:
        """Whether each of these pools has a candidate left that has not failed this request; empty pools do not count."""
        pools = [self.candidates(kind, progress) for kind in kinds]
        return all(any(c.info.ref not in progress.avoid for c in pool) for pool in pools if pool)

    def _reached(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> list[Candidate]:
        """Of the decode workers those that some of the prefill workers can hand over to."""
        return [d for d in decodes if any(not self._book.is_bad(p.info.ref, d.info.ref) for p in prefills)]

    def _pick(self, kind: WorkerKind, progress: Progress, pools: Iterable[Sequence[Candidate]]) -> WorkerInfo | None:
        """One of the first of `pools` that is not empty; None when all are. The policy is asked where there is a choice."""
        preferred = next((pool for pool in pools if pool), None)
        if preferred is None:
            return None
        if len(preferred) == 1:
            return preferred[0].info
        near = progress.near(kind)
        for candidate in preferred:
            if candidate.info.ref == near and (kind is WorkerKind.PREFILL or _has_room(candidate, preferred)):
                return candidate.info
        return self._policies[kind].choose(preferred, self.prompts.query(progress)).info


def _fresh(pool: Sequence[Candidate], progress: Progress) -> list[Candidate]:
    """Those that have not failed the request, nor others so often that their breaker is open."""
    return [c for c in pool if c.info.ref not in progress.avoid and not c.doubtful]


def _has_room(candidate: Candidate, pool: Sequence[Candidate]) -> bool:
    is_ahead = candidate.num_inflight > min(c.num_inflight for c in pool) + _MOST_AHEAD
    return not is_ahead and candidate.load.num_waiting == 0 and candidate.load.kv_usage < _CROWDED
