"""One attempt's news, in order: what its legs, its timers and its claims put in, and the flow takes out, one at a time.

    legs, timers ──put_nowait──▶ ┌───────┐
    decode session ──stash─────▶ │ Inbox │ ──get──▶ attempt          tokens that wait are one event, however many steps made them
                                 └───┬───┘
                                   Turns: so many inboxes may give tokens out per turn of the event loop, the others queue

A reader that keeps up gets every step's token by itself. One that does not — its client reads slowly, or this process has more
to do than its core can — finds all that came meanwhile in one event, so a message carries more tokens the more there is to do,
and costs as much as one. `Turns` keeps a turn of the loop short: a batch has news for every stream of a worker, and without a
limit nobody else would be heard, nor the next batch read, before all of them are written. First tokens do not queue.

What nobody reads is bounded: above MAX_UNREAD tokens and log-probabilities the inbox drops all and says why. Does not know
connections, or what an attempt does about its news.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, replace

from contracts.errors import DeadlineExceeded, DiptychError
from contracts.prefill import PrefillEvent
from contracts.request import TokenDelta

MAX_UNREAD = 65_536  # tokens, and alternatives with a log-probability; some megabytes
MAX_EVENT = 128  # of the same, in one event: a client that reads slowly shall be seen to read
READS_PER_TURN = (
    8  # about 0.3 ms: a request passes half a dozen turns before its prompt leaves, and waits for what it meets
)


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The call is over; `error` None means that the worker ended it in good order."""

    error: DiptychError | None


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """News of one request or hand-off of a decode session: one step's, or that of several in a row."""

    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """The session that carried this request broke."""

    request_id: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class TimeUp:
    """A timer of the attempt rang; `error` None means: wait no longer, go on with what there is."""

    error: DiptychError | None


Event = PrefillEvent | PrefillEnded | DecodeTokens | DecodeLost | TimeUp


class Inbox:
    """Owned by one attempt, which is its only reader."""

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self._max_unread = max_unread
        self._events: deque[Event | _Row] = deque()
        self._num_unread = 0
        self._overfull = False
        self._waiter: asyncio.Future[None] | None = None
        self._turns: Turns | None = None  # of the session that tokens come from
        self._admitted = False  # by it

    def put_nowait(self, event: Event) -> None:
        """Put it behind all else and wake the reader. After an overflow nothing is taken any more."""
        if not self._overfull:
            self._events.append(event)
            self._wake()

    def stash(self, delta: TokenDelta, turns: Turns) -> bool:
        """Put tokens behind all else, to be read when it is their turn. False when they are too many: the reader hears of it."""
        if self._overfull:
            return False
        self._num_unread += _weight(delta)
        if self._num_unread > self._max_unread:
            self._overflow()
            return False
        last = self._events[-1] if self._events else None
        if isinstance(last, DecodeTokens) and _continues(last.delta, delta):
            last = self._events[-1] = _Row(last.delta)
        if not (isinstance(last, _Row) and last.take(delta)):
            self._events.append(DecodeTokens(delta))
        self._turns = turns
        if self._waiter is not None and not self._waiter.done():
            turns.queue(self)
        return True

    async def get(self) -> Event:
        """The next event; waits for one, and with tokens for its turn."""
        while not (self._events and self._may_give()):
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        if isinstance(event, _Row):
            event = DecodeTokens(event.delta())
        if isinstance(event, DecodeTokens):
            self._num_unread -= _weight(event.delta)
        return event

    def admit(self) -> None:
        """It is its turn, which is kept for it until it is used."""
        self._admitted = True
        self._wake()

    def _may_give(self) -> bool:
        if self._turns is None or not isinstance(self._events[0], DecodeTokens | _Row):
            return True
        if self._admitted:
            self._admitted = False
            return True
        return self._turns.take(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _overflow(self) -> None:
        self._overfull = True
        self._events.clear()
        self._num_unread = 0
        why = f"the answer is not read: more than {self._max_unread} tokens and alternatives waited"
        self._events.append(TimeUp(DeadlineExceeded(why)))
        self._wake()


class Turns:
    """Lets `limit` inboxes give tokens out per turn of the event loop, in the order in which they asked."""

    def __init__(self, limit: int = READS_PER_TURN) -> None:
        self._limit = limit
        self._left = limit
        self._waiting: dict[Inbox, None] = {}  # in order
        self._next: asyncio.Handle | None = None

    def take(self, inbox: Inbox) -> bool:
        """Whether it may give tokens out now; if not, it is admitted in a turn to come."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return True
        self._waiting[inbox] = None
        return False

    def queue(self, inbox: Inbox) -> None:
        """It has news and its reader sleeps: admitted now if this turn has room."""
        if inbox not in self._waiting and self.take(inbox):
            inbox.admit()

    def _begin(self) -> None:
        self._left = self._limit
        self._next = asyncio.get_running_loop().call_soon(self._begin) if self._waiting else None
        for inbox in list(itertools.islice(self._waiting, self._limit)):
            del self._waiting[inbox]
            self._left -= 1
            inbox.admit()


class _Row:
    """Deltas of one request that follow each other, on their way to become one."""

    __slots__ = ("_first", "_last", "_logprobs", "_token_ids", "_weight")

    def __init__(self, first: TokenDelta) -> None:
        self._first = self._last = first
        self._token_ids = list(first.token_ids)
        self._logprobs = list(first.logprobs)
        self._weight = _weight(first)

    def take(self, delta: TokenDelta) -> bool:
        """Whether it continues the last, and is one of them now; not when there are many."""
        if self._weight >= MAX_EVENT or not _continues(self._last, delta):
            return False
        self._last = delta
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._weight += _weight(delta)
        return True

    def delta(self) -> TokenDelta:
        """All as one: begun by the first, ended by the last."""
        first, last = self._first, self._last
        return replace(
            first,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=last.finish_reason,
            stop_token_id=last.stop_token_id,
            stages=last.stages,
        )


def _continues(before: TokenDelta, delta: TokenDelta) -> bool:
    """Whether nothing is lost by saying both as one. A gap, a repetition or an error stays visible to whoever reads."""
    return (
        delta.first_index == before.first_index + len(before.token_ids)
        and before.request_id == delta.request_id
        and before.finish_reason is None
        and before.error is None
        and before.stages is None
        and delta.error is None
        and bool(delta.token_ids)
        and bool(before.token_ids)
        and bool(before.logprobs) == bool(delta.logprobs)
        and not delta.prompt_logprobs
        and delta.num_cached_tokens == 0
    )


def _weight(delta: TokenDelta) -> int:
    if not delta.logprobs:
        return len(delta.token_ids)
    return len(delta.token_ids) + sum(1 + len(entry.top) for entry in delta.logprobs)
