"""What a run of the simulator comes to in a few numbers, and policies beside each other. Does not know how it was run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.world import Outcome


@dataclass(frozen=True, slots=True)
class Numbers:
    """Times in seconds, shares from 0 to 1. `busiest` is the largest share of prompt tokens of one prefill worker, times
    their number: 1 is even.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    second_p99_s: float  # gap to the second token
    answer_s: float  # mean time from the first token to the last
    whole_s: float  # mean time from arrival to the last token
    hits: float  # of prompt tokens, at prefill
    hits_decode: float
    busiest: float
    alone: float  # of requests that no prefill worker had

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], num_prefill: int) -> Numbers:
        """All requests of one run, each of which has ended."""
        ttfts = [o.first_s - o.arrived_s for o in outcomes]
        tokens = sum(o.num_prompt for o in outcomes)
        per_worker: Counter[str] = Counter()
        for o in outcomes:
            per_worker[o.prefill] += o.num_prompt
        return cls(
            ttft_p50_s=percentile(ttfts, 0.5),
            ttft_p99_s=percentile(ttfts, 0.99),
            second_p99_s=percentile([o.second_s - o.first_s for o in outcomes if o.second_s >= 0], 0.99),
            answer_s=sum(o.ended_s - o.first_s for o in outcomes) / len(outcomes),
            whole_s=sum(o.ended_s - o.arrived_s for o in outcomes) / len(outcomes),
            hits=sum(o.num_cached for o in outcomes) / tokens,
            hits_decode=sum(o.num_not_sent for o in outcomes) / tokens,
            busiest=max(per_worker.values()) * num_prefill / tokens,
            alone=sum(o.alone for o in outcomes) / len(outcomes),
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
