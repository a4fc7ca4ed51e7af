"""A policy that breaks costs one request its best worker, not the router its life.

choose ──▶ one of the candidates ─────────────────▶ passed on
       └─▶ raises, or returns what is none of them ─▶ the least loaded; counted, and logged ever more rarely
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from observability.log import get_logger
from observability.private import reason
from router.policies.interface import Candidate, Policy, Query
from router.policies.load import LeastLoaded

log = get_logger(__name__)


class GuardedPolicy:
    """Wraps the policy called `name`. `on_fault` hears of every request that it could not choose for."""

    def __init__(self, name: str, policy: Policy, on_fault: Callable[[], None]) -> None:
        self._name = name
        self._policy = policy
        self._on_fault = on_fault
        self._fallback = LeastLoaded()
        self._num_faults = 0

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """See Policy."""
        try:
            chosen = self._policy.choose(candidates, query)
        except Exception as error:  # noqa: BLE001 - anybody's code runs here, and this request can still be served
            return self._instead(candidates, query, f"{type(error).__name__}: {reason(error)}")
        if not any(chosen is candidate for candidate in candidates):
            return self._instead(candidates, query, f"it returned {type(chosen).__name__}, none of the candidates")
        return chosen

    def _instead(self, candidates: Sequence[Candidate], query: Query, why: str) -> Candidate:
        self._num_faults += 1
        if (
            self._num_faults & (self._num_faults - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th …: a broken policy fails every request
            log.error(
                "policy failed", policy=self._name, reason=why, instead="the least loaded", times=self._num_faults
            )
        self._on_fault()
        return self._fallback.choose(candidates, query)
