"""What one router hears of the workers from Redis, into its table: messages at once, and a look at all leases now and then.

    AWAY            the table is held: the last known workers are routed to; a connection that breaks takes one out
      │ listening, and a look has come through                ▲ the link or the subscription breaks,
      ▼                                                       │ or Redis takes no writes
    THERE           words come as messages; a look heals what was missed; who does not speak within ttl_s is lost

Clocks of different machines are never compared: how old a word is follows from its lease in Redis, how long ago it was heard
from this router's clock, how long it is believed from its lease again: workers and routers need not be told the same. What is
damaged in Redis, or does not fit, costs a line in the log and a count (`num_refused`). Does not know requests, policies or
connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

from contracts.clock import Clock
from contracts.errors import DiptychError, InternalError, InvalidRequest, Unavailable
from contracts.upkeep import kept_up, pause, watched
from contracts.worker import WorkerRef
from observability.log import get_logger
from registry import keys, scripts, wire
from registry.link import RedisLink
from registry.pipeline import Reply
from registry.subscription import Message, Signal, Subscription
from router.config import RegistryConfig
from router.workers.worker_table import WorkerTable

log = get_logger(__name__)
# In shares of ttl_s: a Redis that takes no words is found out before anybody has been silent for too long.
_LOOK_TTLS = 0.2
_LOOK_TIMEOUT_TTLS = 0.4
_GRUMBLE_S = 10.0
_LONGEST_TTL_S = 3600.0


class Lookout:
    """Fills a table. Owns two tasks, and the subscription of one of them, from `start` to `close`."""

    def __init__(self, link: RedisLink, table: WorkerTable, config: RegistryConfig, clock: Clock) -> None:
        self._link = link
        self._table = table
        self._config = config
        self._clock = clock
        self._router = keys.router(uuid4().hex)
        self._listening: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._look_now = asyncio.Event()
        self._grumbled_at = -_GRUMBLE_S
        self._problem = "not reached yet"
        self.num_refused = 0
        table.hold()

    @property
    def problem(self) -> str:
        """What keeps the registry away, as it is now; empty while it is there."""
        if not self._problem:
            return ""
        deaf = "" if self._listening is None else self._listening.problem
        return self._link.presence.problem or deaf or self._problem

    def start(self) -> None:
        """Begin to listen and to look. Returns at once, whether or not Redis is there."""
        self._tasks = [
            self._kept_up("registry listener", self._listen),
            self._kept_up("registry look", self._keep_looking),
        ]

    def _kept_up(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        def died(task: str = name) -> None:
            self._away(f"{task} died, see the log")

        return watched(name, kept_up(name, work, self._clock, died), died)

    async def close(self) -> None:
        """End what `start` began. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        subscription = self._listening = Subscription(self._link, (keys.ANNOUNCED, keys.LEFT), self._clock)
        try:
            async for event in subscription:
                match event:
                    case Signal.LISTENING:
                        self._look_now.set()
                    case Signal.DEAF:
                        self._away(self._link.presence.problem or "the subscription broke")
                    case Message():
                        self._take(event)
        finally:
            await subscription.close()
        raise InternalError("the subscription to the registry ended")

    async def _keep_looking(self) -> None:
        """Look now and then, and at once when listening begins; the table goes on when both a look and listening succeed."""
        while True:
            self._look_now.clear()
            subscription = self._listening
            listening = subscription is not None and subscription.listening
            try:
                await self._look()
            except Unavailable as error:
                self._away(error.message)
            else:
                if listening and subscription is not None and subscription.listening:
                    self._there()
            await pause(self._clock, _LOOK_TTLS * self._config.ttl_s, self._look_now)

    async def _look(self) -> None:
        args = (keys.WORKER, round(2 * self._config.ttl_s * 1e3))
        found = await self._link.script(
            scripts.LOOK, (keys.WORKERS, self._router), args, _LOOK_TIMEOUT_TTLS * self._config.ttl_s
        )
        if not isinstance(found, list):
            raise Unavailable(f"{self._link.config.address}: an answer that is not understood: {found!r:.80}")
        for entry in found:
            try:
                self._take_lease(entry)
            except DiptychError as error:
                self._refuse(error)

    def _take_lease(self, entry: Reply) -> None:
        match entry:
            case [bytes(name), bytes(epoch), bytes(word), int(left_ms), bytes(ttl_ms)] if len(epoch + ttl_ms) <= 40:
                pass
            case _:
                raise InvalidRequest("lease", repr(entry)[:80], "must be one of registry.keys")
        worker_id = name.decode(errors="replace")
        if not epoch.isdigit():
            raise InvalidRequest("lease.epoch", epoch, f"must be a number, of {worker_id}")
        ref = WorkerRef(worker_id, int(epoch))
        if not word:
            self._table.leave(ref)
            return
        if left_ms < 0 or not ttl_ms.isdigit():
            raise InvalidRequest("lease", worker_id, "must have an end")
        age_s, ttl_s = max(0, int(ttl_ms) - left_ms) / 1e3, int(ttl_ms) / 1e3
        if not 0 < ttl_s <= _LONGEST_TTL_S:
            raise InvalidRequest("lease.ttl", ttl_ms, f"must be above 0 and at most {_LONGEST_TTL_S:g} s")
        if age_s > ttl_s or self._table.touch(ref, age_s, ttl_s):
            return
        info, load = wire.word_from_bytes(word)
        if info.ref != ref:
            raise InvalidRequest("lease", worker_id, "is not of the worker whose word it has")
        self._table.announce(info, load, age_s, judged=True, ttl_s=ttl_s)

    def _take(self, message: Message) -> None:
        try:
            if message.channel == keys.LEFT:
                self._table.leave(wire.farewell_from_bytes(message.data))
            else:
                info, load = wire.word_from_bytes(message.data)
                self._table.announce(info, load, judged=True)
        except DiptychError as error:
            self._refuse(error)

    def _refuse(self, error: DiptychError) -> None:
        """What is in Redis cannot be used: count it, and say so now and then."""
        self.num_refused += 1
        if self._clock.now() - self._grumbled_at >= _GRUMBLE_S:
            self._grumbled_at = self._clock.now()
            log.warning("a word in redis is refused", reason=error, refused=self.num_refused)

    def _away(self, problem: str) -> None:
        if not self._problem:
            log.warning("the registry is away; routing to the last known workers", reason=problem)
        self._problem = problem
        self._table.hold()

    def _there(self) -> None:
        if self._problem:
            log.info("the registry is there", workers=len(self._table.workers()))
        self._problem = ""
        self._table.resume()
