"""The policy that goes where the prompt's blocks are, unless the way through that worker's queue is longer than theirs.

    cost(worker) = burden - HIT_WEIGHT * tokens that it has of the prompt          the least wins

With a weight of 1 this would be the work until the first token: all that is queued, and what is left to compute of this prompt
(the estimate of Mooncake's Algorithm 1, FAST '25). A hit also saves work that others would wait for, and a copy of the prefix
elsewhere that takes the place of other blocks, so it may cost this request up to half of itself in waiting. In the simulator
(docs/policies.md) 1.5 has nearly the hits of 3 and nearly the 99th percentile of 1.

At a decode worker cached tokens are neither pushed again nor kept twice. A hot prefix spreads by itself: once a worker's queue is
longer than the prefix is worth, the next request goes elsewhere, and its blocks are there from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.burden import burden
from router.policies.interface import Candidate, NoPrefixes, PolicyContext, Prefixes, Query
from router.policies.load import LeastLoaded

HIT_WEIGHT = 1.5
_CROWDED = 0.95  # share of a worker's KV memory in use; what it has cached goes first when more comes


class PrefixAware:
    """The least cost; among equals the least loaded, each in turn. Blocks at a crowded worker do not count."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        self._prefixes: Prefixes = NoPrefixes() if context is None else context.prefixes
        self._ties = LeastLoaded()

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """See Policy."""
        cached = self._prefixes.match(query.block_hashes) if len(candidates) > 1 else {}
        costs = [
            burden(c) - (0 if c.load.kv_usage > _CROWDED else HIT_WEIGHT * cached.get(c.info.ref, 0))
            for c in candidates
        ]
        least = min(costs)
        return self._ties.choose([c for c, cost in zip(candidates, costs, strict=True) if cost == least], query)
