"""What one router has given one worker and not got back, beside what the worker announces: together a policy's Candidate.

Does not know requests, connections or policies.
"""

from __future__ import annotations

from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad
from router.policies import Candidate
from router.workers.registry import Worker


class Tally:
    """Counts for one life of one worker."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.num_inflight = 0  # requests
        self._num_tokens = 0  # still to be computed
        self._num_kv_tokens = 0
        self._num_computing = 0  # requests that have any of the former
        self._announced: WorkerLoad | None = None
        self._others = 1.0

    def add(self, num_requests: int, num_tokens: int, num_kv_tokens: int) -> None:
        """A claim adds or takes."""
        self.num_inflight += num_requests
        self._num_tokens += num_tokens
        self._num_kv_tokens += num_kv_tokens
        self._num_computing += (num_tokens > 0) - (num_tokens < 0)

    @property
    def empty(self) -> bool:
        """Whether the worker has nothing of ours, as it must be when no claim on it is left."""
        return not (self.num_inflight or self._num_tokens or self._num_kv_tokens or self._num_computing)

    def candidate(self, worker: Worker, *, doubtful: bool = False) -> Candidate:
        """The worker as policies see it; what it announced last, less what is ours of it, is others'."""
        if worker.load is not self._announced:  # another word, not the same one heard of again
            self._announced = worker.load
            announced = worker.load.num_running + worker.load.num_waiting
            ours = self._num_computing if self.info.kind is WorkerKind.PREFILL else self.num_inflight
            self._others = max(0, announced - ours) / announced if announced else 0.0
        return Candidate(
            info=worker.info,
            load=worker.load,
            num_inflight=self.num_inflight,
            num_inflight_tokens=self._num_tokens,
            doubtful=doubtful,
            num_inflight_kv_tokens=self._num_kv_tokens,
            others=self._others,
        )
