"""Policies that look at load alone, or at nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.burden import burden, num_sequences
from router.policies.interface import Candidate, PolicyContext, Query


class RoundRobin:
    """Each worker in turn, by worker id, so that those who come and go do not disturb the order of the others."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        del context
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:  # noqa: ARG002
        """See Policy."""
        ordered = sorted(candidates, key=worker_id)
        chosen = next((c for c in ordered if worker_id(c) > self._last), ordered[0])
        self._last = worker_id(chosen)
        return chosen


class LeastLoaded:
    """The worker with the least burden; of those with the same the fewest requests; among equals, each in turn."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        del context
        self._ties = RoundRobin()

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """See Policy."""
        works = [_work(c) for c in candidates]
        least = min(works)
        return self._ties.choose([c for c, work in zip(candidates, works, strict=True) if work == least], query)


class PowerOfTwo:
    """The less burdened of two drawn at random (Mitzenmacher, "The Power of Two Choices", 2001).

    Nearly as even as the least burdened of all, and several routers that see the same late announcements do not all run to
    the same worker.
    """

    def __init__(self, context: PolicyContext | None = None) -> None:
        self._random = random.Random(None if context is None else context.seed)

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:  # noqa: ARG002
        """See Policy."""
        drawn = self._random.sample(list(candidates), min(2, len(candidates)))
        return min(drawn, key=_work)


def worker_id(candidate: Candidate) -> str:
    """What policies order workers by."""
    return candidate.info.ref.worker_id


def _work(candidate: Candidate) -> tuple[int, int]:
    return burden(candidate), num_sequences(candidate)
