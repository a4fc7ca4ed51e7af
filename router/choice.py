"""The choice of a worker for one request: each pool's policy over the candidates, those that failed it already last.

Does not know what the worker will be asked to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.policies import Policy, Query
from router.pools import Pools
from router.progress import Job


class Chooser:
    """Owns one policy per pool."""

    def __init__(self, pools: Pools, policies: Mapping[WorkerKind, Policy]) -> None:
        self._pools = pools
        self._policies = dict(policies)

    def choose(self, kind: WorkerKind, job: Job, avoid: AbstractSet[WorkerRef]) -> WorkerInfo | None:
        """A worker of this pool, None when none is ready. One to avoid is taken only when there is no other."""
        return self.choose_fresh(kind, job, avoid) or self.choose_fresh(kind, job, frozenset())

    def choose_fresh(self, kind: WorkerKind, job: Job, avoid: AbstractSet[WorkerRef]) -> WorkerInfo | None:
        """A worker of this pool that is not to be avoided, None when there is none."""
        preferred = [c for c in self._pools.candidates(kind) if c.info.ref not in avoid]
        if not preferred:
            return None
        return self._policies[kind].choose(preferred, Query(job.prompt_token_ids)).info

    def has_other(self, kinds: Iterable[WorkerKind], avoid: AbstractSet[WorkerRef]) -> bool:
        """Whether each of these pools has a ready worker left that has not failed this request; empty pools do not count."""
        pools = [self._pools.candidates(kind) for kind in kinds]
        return all(any(c.info.ref not in avoid for c in pool) for pool in pools if pool)
