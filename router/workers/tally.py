"""What one router has given one worker and not got back, beside what the worker announces: together a policy's Candidate.

    ours: 3 ── 2 ── 4 ── word: 5 running, 1 is others' ── 1 ── asked: 3 of the 5 have ended

What of a word is ours is counted when it comes, not when a policy asks: by then ours may have ended, and were they taken for
others', a worker would seem busy with what it has just done until its next word, and the next turn of a conversation would go
elsewhere. What ended a moment before counts too: the word was on its way. Does not know requests, connections or policies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from contracts.clock import MonotonicClock
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad
from router.policies import Candidate
from router.workers.registry import Worker

_ON_ITS_WAY_S = 0.1  # a word, at most, from the step that it tells of


class Tally:
    """Counts for one life of one worker."""

    def __init__(self, info: WorkerInfo, now: Callable[[], float] | None = None) -> None:
        self.info = info
        self.num_inflight = 0  # requests
        self._num_tokens = 0  # still to be computed
        self._num_kv_tokens = 0
        self._num_computing = 0  # requests that have any of the former
        self._announced: WorkerLoad | None = None
        self._num_announced = 0  # requests, or for prefill those that compute
        self._num_ours = 0  # of those
        self._ends: deque[float] = deque()  # of ours, lately
        self._now = MonotonicClock().now if now is None else now

    def add(self, num_requests: int, num_tokens: int, num_kv_tokens: int) -> None:
        """A claim adds or takes."""
        if (num_tokens if self.info.kind is WorkerKind.PREFILL else num_requests) < 0:
            self._ends.append(self._now())
            self._forget()
        self.num_inflight += num_requests
        self._num_tokens += num_tokens
        self._num_kv_tokens += num_kv_tokens
        self._num_computing += (num_tokens > 0) - (num_tokens < 0)

    def heard(self, load: WorkerLoad) -> None:
        """The worker's word; the same one heard of again says nothing."""
        if load is not self._announced:
            self._forget()
            self._announced = load
            self._num_announced = load.num_running + load.num_waiting
            self._num_ours = min(self._ours + len(self._ends), self._num_announced)

    @property
    def empty(self) -> bool:
        """Whether the worker has nothing of ours, as it must be when no claim on it is left."""
        return not (self.num_inflight or self._num_tokens or self._num_kv_tokens or self._num_computing)

    def candidate(self, worker: Worker, *, doubtful: bool = False) -> Candidate:
        """The worker as policies see it; what it announced last, less what is ours of it, is others'."""
        self.heard(worker.load)
        announced = self._num_announced
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

    def _forget(self) -> None:
        """Ends that are too long ago for any word that comes now."""
        oldest = self._now() - _ON_ITS_WAY_S
        while self._ends and self._ends[0] < oldest:
            self._ends.popleft()
