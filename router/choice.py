"""The choice of a worker for one request: each pool's policy over the candidates, those that failed it already last.

An answer beside another goes where that one is, so that the prompt is computed once and its blocks are shared: always in the
prefill pool, where it adds a block's work; in the decode pool while that worker has room and is not far ahead of the others.

Does not know what the worker will be asked to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.policies import Candidate, Policy, Query
from router.pools import Pools
from router.progress import Progress

_CROWDED = 0.9  # share of the KV memory that is in use
_MOST_AHEAD = 16  # requests more than the one with the fewest: streams are worth more than shared blocks then


class Chooser:
    """Owns one policy per pool."""

    def __init__(self, pools: Pools, policies: Mapping[WorkerKind, Policy]) -> None:
        self._pools = pools
        self._policies = dict(policies)

    def choose(self, kind: WorkerKind, progress: Progress) -> WorkerInfo | None:
        """A worker of this pool, None when none is ready. One to avoid is taken only when there is no other."""
        return self.choose_fresh(kind, progress, progress.avoid) or self.choose_fresh(kind, progress, frozenset())

    def choose_fresh(self, kind: WorkerKind, progress: Progress, avoid: AbstractSet[WorkerRef]) -> WorkerInfo | None:
        """A worker of this pool that is not to be avoided, None when there is none."""
        preferred = [c for c in self._pools.candidates(kind) if c.info.ref not in avoid]
        if not preferred:
            return None
        near = progress.near(kind)
        for candidate in preferred:
            if candidate.info.ref == near and (kind is WorkerKind.PREFILL or _has_room(candidate, preferred)):
                return candidate.info
        return self._policies[kind].choose(preferred, Query(progress.job.prompt_token_ids)).info

    def has_other(self, kinds: Iterable[WorkerKind], avoid: AbstractSet[WorkerRef]) -> bool:
        """Whether each of these pools has a ready worker left that has not failed this request; empty pools do not count."""
        pools = [self._pools.candidates(kind) for kind in kinds]
        return all(any(c.info.ref not in avoid for c in pool) for pool in pools if pool)


def _has_room(candidate: Candidate, pool: Sequence[Candidate]) -> bool:
    is_ahead = candidate.num_inflight > min(c.num_inflight for c in pool) + _MOST_AHEAD
    return not is_ahead and candidate.load.num_waiting == 0 and candidate.load.kv_usage < _CROWDED
