"""Routers that share a Redis warn each other of workers whose breakers open: one message per opening, published to all.

    our breaker opens ──▶ waits here ──▶ Redis ──published──▶ every router: `Breakers.warn`, unless it is from this router
                                           └─ kept for `keep_s` ──▶ a router that begins to listen: the same

So a router that joins, or whose connection to Redis broke, hears of what it has missed. While Redis is away nobody is warned and
each router goes on alone: what would have been said is not said later, because by then it is no news. A message that cannot be
read is counted as nothing and logged. Does not know what a breaker is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from contracts.clock import Clock
from contracts.errors import InternalError, Unavailable
from contracts.worker import WorkerRef
from observability.log import get_logger
from registry.link import RedisLink, Script
from registry.subscription import Message, Signal, Subscription

log = get_logger(__name__)
CHANNEL = "diptych:breakers"
KEPT = "diptych:warnings"
_MOST_WAITING = 256
_MOST_CHARS = 200  # of a reason
_MOST_BYTES = 4096  # of a message
_MOST_KEPT = 256  # the newest

_FRESH = """
local is = redis.call('TYPE', KEYS[1]).ok
if is ~= 'zset' and is ~= 'none' then redis.call('DEL', KEYS[1]) end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
"""

# KEYS what is kept: messages by the instant (ms) until which they are news. ARGV channel, message, ms that it is news, most kept.
TELL = Script(
    _FRESH
    + """
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('PUBLISH', ARGV[1], ARGV[2])
"""
)

# KEYS as above. Returns the messages that are news.
MISSED = Script(_FRESH + "return redis.call('ZRANGE', KEYS[1], 0, -1)")


class BreakerNews:
    """Publishes our openings and hears those of others, while `run` runs. `warn` is told of each; used on the event loop."""

    def __init__(
        self,
        link: RedisLink,
        clock: Clock,
        router_id: str,
        warn: Callable[[WorkerRef, str], object],
        keep_s: float = 60.0,
    ) -> None:
        """`link` is the caller's to start and close."""
        self._keep_ms = round(keep_s * 1e3)
        self._link = link
        self._clock = clock
        self._router_id = router_id
        self._warn = warn
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(_MOST_WAITING)

    def tripped(self, ref: WorkerRef, reason: str) -> None:
        """Say that our breaker for this worker has opened. Never waits; without Redis it is not said."""
        if self._link.up and not self._waiting.full():
            word = {
                "router": self._router_id,
                "worker": ref.worker_id,
                "epoch": ref.epoch,
                "reason": reason[:_MOST_CHARS],
            }
            self._waiting.put_nowait(json.dumps(word).encode())

    async def run(self) -> None:
        """Publish and listen until cancelled. Raises, in a group, what ends either."""
        subscription = Subscription(self._link, [CHANNEL], self._clock)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._publish())
                group.create_task(self._listen(subscription))
        finally:
            await subscription.close()

    async def _publish(self) -> None:
        while True:
            word = await self._waiting.get()
            try:
                args = (self._link.channel(CHANNEL), word, self._keep_ms, _MOST_KEPT)
                await self._link.script(TELL, (KEPT,), args)
            except Unavailable as error:
                log.info("other routers are not warned", reason=error)

    async def _listen(self, subscription: Subscription) -> None:
        async for event in subscription:
            if isinstance(event, Message):
                self._hear(event.data)
            elif event is Signal.LISTENING:
                await self._catch_up()
        raise InternalError("the subscription to warnings of other routers ended")

    async def _catch_up(self) -> None:
        try:
            missed = await self._link.script(MISSED, (KEPT,))
        except Unavailable as error:
            log.info("what other routers warned of is not known", reason=error)
            return
        for word in missed if isinstance(missed, list) else ():
            if isinstance(word, bytes):
                self._hear(word)

    def _hear(self, data: bytes) -> None:
        try:
            if len(data) > _MOST_BYTES:
                raise ValueError(f"{len(data)} bytes")
            match json.loads(data):
                case {"router": str(router), "worker": str(worker), "epoch": int(epoch), "reason": str(reason)}:
                    if router != self._router_id:
                        self._warn(WorkerRef(worker, epoch), reason[:_MOST_CHARS])
                case other:
                    raise ValueError(f"{other!r:.80}")
        except (ValueError, RecursionError) as error:
            log.warning("a warning of another router cannot be read", reason=error)
