"""What one router has given one worker and not got back, beside what the worker announces: together a policy's Candidate.

    asked ── ours: 3 ── 2 ── 4 ── 1 ── word: 5 running ── 0 ── asked        of the 5, 4 may be ours: 1 is others', 4 have ended

A word is looked at when a policy asks next, and ours may have ended meanwhile, or while it was on its way: it may speak of as
many of ours as there were at once since the policy asked before. Were those others', a worker would seem busy with what it has
just done until its next word, and the next turn of a conversation went elsewhere. Does not know requests, connections or policies.
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
        self._num_announced = 0  # requests, or for prefill those that compute
        self._num_ours = 0  # of those
        self._most = 0  # of ours at once, since a policy asked

    def add(self, num_requests: int, num_tokens: int, num_kv_tokens: int) -> None:
        """A claim adds or takes."""
        self.num_inflight += num_requests
        self._num_tokens += num_tokens
        self._num_kv_tokens += num_kv_tokens
        self._num_computing += (num_tokens > 0) - (num_tokens < 0)
        self._most = max(self._most, self._ours)

    @property
    def empty(self) -> bool:
        """Whether the worker has nothing of ours, as it must be when no claim on it is left."""
        return not (self.num_inflight or self._num_tokens or self._num_kv_tokens or self._num_computing)

    def candidate(self, worker: Worker, *, doubtful: bool = False) -> Candidate:
        """The worker as policies see it; what it announced last, less what is ours of it, is others'."""
        if worker.load is not self._announced:  # another word, not the same one heard of again
            self._announced = worker.load
            self._num_announced = worker.load.num_running + worker.load.num_waiting
            self._num_ours = min(self._most, self._num_announced)
        self._most, announced = self._ours, self._num_announced
        ended = max(0, self._num_ours - self._ours)
        return Candidate(
            info=worker.info,
            load=worker.load,
            num_inflight=self.num_inflight,
            num_inflight_tokens=self._num_tokens,
            doubtful=doubtful,
            num_inflight_kv_tokens=self._num_kv_tokens,
            others=(announced - self._num_ours) / announced if announced else 0.0,
            ended=ended / announced if announced else 0.0,
        )

    @property
    def _ours(self) -> int:
        """What is ours of what the worker would announce now."""
        return self._num_computing if self.info.kind is WorkerKind.PREFILL else self.num_inflight
