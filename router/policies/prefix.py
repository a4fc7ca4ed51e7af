"""The policy that goes where the prompt's blocks are, unless the way through that worker's queue is longer than theirs.

    cost(worker) = burden + prompt tokens - tokens that it has of it          the least wins

At a prefill worker this is the work until the first token: all that is queued, and what it has to compute of this prompt (the
estimate of Mooncake's Algorithm 1, FAST '25). At a decode worker it is what the worker has to hold and be sent: cached
tokens are neither pushed again nor kept twice. A hot prefix spreads by itself: once a worker's queue is longer than the
prefix, the next request goes elsewhere, and its blocks are there from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.burden import burden
from router.policies.interface import Candidate, NoPrefixes, PolicyContext, Prefixes, Query
from router.policies.load import LeastLoaded

_CROWDED = 0.95  # share of a worker's KV memory in use; what it has cached goes first when more comes


class PrefixAware:
    """The least cost; among equals the least loaded, each in turn. Blocks at a crowded worker do not count."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        self._prefixes: Prefixes = NoPrefixes() if context is None else context.prefixes
        self._ties = LeastLoaded()

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """See Policy."""
        cached = self._prefixes.match(query.block_hashes) if len(candidates) > 1 else {}
        costs = [burden(c) - (0 if c.load.kv_usage > _CROWDED else cached.get(c.info.ref, 0)) for c in candidates]
        least = min(costs)
        return self._ties.choose([c for c, cost in zip(candidates, costs, strict=True) if cost == least], query)
