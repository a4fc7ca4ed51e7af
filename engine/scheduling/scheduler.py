"""Chooses what the next step computes: every request's num_computed_tokens catches up with its num_tokens, under a budget.

    1. running, in order: a decode takes 1 token, a prompt a chunk of what the decodes leave; each gets room for its tokens,
       and where there is none, the last in order is preempted until there is, or until the last is the asker itself
    2. waiting, in order, while slots, budget and blocks last: starts with room for all its known tokens; the first that
       finds no room ends the round, so nothing overtakes it

Prompts, chunks, prefix hits, adopted KV and recomputed answers are one case: a counter that lags behind another. The first in
order is never preempted for another, so it finishes, then the next is first: nobody starves and nothing deadlocks.
Does not know runners, sampling or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.kv.cache_manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduling.queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a step: how many of its uncomputed tokens are computed."""

    request: Request
    num_tokens: int


class Scheduler:
    """Owns the queue and the running set, and through the running requests their leases."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.num_preemptions = 0
        self._config = config
        self._kv = kv
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks, adopted ones that had no turn yet included."""
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return sum(r.num_uncomputed_tokens for r in (*self._waiting, *self._running))

    def next_order(self, priority: int) -> tuple[int, int]:
        """The place of a request that arrives now: by priority if the policy says so, then by arrival."""
        self._num_arrived += 1
        return (priority if self._config.policy == "priority" else 0, self._num_arrived)

    def add(self, request: Request) -> None:
        """A request that waits, or one that already holds its blocks (adopted)."""
        if request.status is RequestStatus.WAITING:
            self._waiting.add(request)
        else:
            self._running.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request; a running one's lease stays with it, for the caller to take."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)

    def has_room_for_reservation(self, num_tokens: int, num_reserved: int) -> bool:
        """Whether KV from elsewhere may take blocks now: never those, nor the slot, that the first waiting request needs.

        `num_reserved` counts reservations that will come in later. Else a stream of hand-offs could keep it waiting for ever.
        """
        head = self._waiting.head
        if head is None:
            return True
        num_left = self._kv.num_free_blocks - self._kv.num_blocks_for(num_tokens)
        has_slot = len(self._running) + num_reserved + 1 < self._config.max_num_seqs
        return has_slot and num_left >= self._kv.num_blocks_for(head.num_tokens)

    def schedule(self) -> tuple[Share, ...]:
        """The next step's shares, decodes first; empty when nothing can run. May preempt."""
        shares: list[Share] = []
        self._start_waiting(shares, self._continue_running(shares))
        shares.sort(key=lambda share: share.request.num_uncomputed_tokens > 1)
        return tuple(shares)

    def _continue_running(self, shares: list[Share]) -> int:
        self._running.sort(key=lambda request: request.order)
        turn = self._running[: self._config.max_num_seqs]
        budget = self._config.max_num_batched_tokens - sum(r.num_uncomputed_tokens == 1 for r in turn)
        for request in turn:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted in this very round
            if request.num_uncomputed_tokens == 1:
                num_tokens = 1
            else:
                num_tokens = min(request.num_uncomputed_tokens, budget)
                budget -= num_tokens
            if num_tokens and self._make_room(request):
                shares.append(Share(request, num_tokens))
        return budget

    def _start_waiting(self, shares: list[Share], budget: int) -> None:
        while budget and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.head
            if request is None:
                return
            self._kv.hasher.extend(request.block_hashes, request.token_ids)
            lease = self._kv.lease(
                request.request_id, request.num_tokens, request.block_hashes, request.max_cached_tokens
            )
            if lease is None:
                return
            self._waiting.remove(request)
            request.start(lease, lease.num_cached_tokens)
            self._running.append(request)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            budget -= num_tokens
            shares.append(Share(request, num_tokens))

    def _make_room(self, request: Request) -> bool:
        while not self._kv.grow(request.lease, request.num_tokens):
            # A request that retains its KV got all its room at its start, so the asker itself can always be the victim.
            victim = next(r for r in reversed(self._running) if not r.retain_kv)
            self._running.remove(victim)
            victim.give_up_lease(RequestStatus.WAITING).release()
            self._waiting.add(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        return True
