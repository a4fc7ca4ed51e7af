"""How a worker becomes known: to routers one by one, or through a Redis to all that look there; one life for both.

    begin_life ──▶ announcers ──▶ (rpc.lifecycle runs them) ──▶ close

With a Redis the life begins there, so that no two lives of a worker are ever mixed up, whatever clocks say. A worker that
starts while Redis is away waits for it; one that is told of routers, too, begins as workers without a Redis do after a while, and
joins at the doors of these routers. Does not know what the worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.clock import Clock
from contracts.worker import WorkerInfo, WorkerLoad, WorkerRef, new_epoch
from observability.log import get_logger
from registry.client import RedisRegistryClient, begin_life
from registry.config import LeaseConfig
from registry.link import RedisLink, check_credentials
from rpc.announce import Announcer, GrpcRegistryClient
from rpc.channel import ChannelOpener
from rpc.server import join_address
from worker.config import WorkerConfig

log = get_logger(__name__)
_PATIENCE_S = 3.0  # with a Redis, where there are routers to turn to


class Registration:
    """Owns the link to Redis, if there is one, until `close`. Raises ConfigError for TLS files of no use."""

    def __init__(self, config: WorkerConfig, clock: Clock, opener: ChannelOpener) -> None:
        """`opener` makes the channels to routers."""
        self._config = config
        self._clock = clock
        self._opener = opener
        self._link = RedisLink(config.redis, clock) if config.redis is not None else None
        if self._link is not None:
            self._link.start()

    @property
    def toward(self) -> str:
        """host:port of something that the worker has to reach: which of its own addresses leads there is known then."""
        if self._config.routers:
            return self._config.routers[0]
        redis = self._config.redis
        return "" if redis is None else join_address(redis.address.host, redis.address.port)

    async def check(self) -> None:
        """Raise ConfigError where Redis is there and does not take our credentials."""
        if self._config.redis is not None:
            await check_credentials(self._config.redis, self._clock)

    async def begin_life(self) -> WorkerRef:
        """Who this worker is from now on."""
        worker_id = self._config.worker_id
        if self._link is None:
            return WorkerRef(worker_id, new_epoch())
        beginning = asyncio.ensure_future(begin_life(self._link, worker_id, self._clock))
        waits: list[asyncio.Future[WorkerRef] | asyncio.Future[None]] = [beginning]
        if self._config.routers:
            waits.append(asyncio.ensure_future(self._clock.sleep(_PATIENCE_S)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                return beginning.result()
        finally:
            for wait in waits:
                wait.cancel()
        log.warning(
            "redis is away: this worker begins without it, and joins at its routers' doors", waited_s=_PATIENCE_S
        )
        return WorkerRef(worker_id, new_epoch())

    def announcers(self, info: WorkerInfo, load: Callable[[], WorkerLoad]) -> list[Announcer]:
        """One for each router and for Redis; as soon as that comes back, it hears of the worker."""
        config = self._config
        found = [
            Announcer(GrpcRegistryClient(router, opener=self._opener), info, load, self._clock, config.announce)
            for router in config.routers
        ]
        if self._link is not None:
            client = RedisRegistryClient(self._link, LeaseConfig())
            shared = Announcer(client, info, load, self._clock, config.announce)
            self._link.presence.subscribe(lambda up: shared.soon() if up else None)
            found.append(shared)
        if not found:
            log.warning(
                "this worker makes itself known nowhere (neither --router nor --registry): nothing is sent to it"
            )
        return found

    async def close(self) -> None:
        """Let go of Redis. Idempotent."""
        if self._link is not None:
            await self._link.close()
