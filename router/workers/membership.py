"""Which registry a router has, and the link to the Redis that it shares with others, if it shares one.

    no redis    embedded_registry    workers announce themselves here and at every other router
    redis       redis_registry       workers announce themselves there, or here, and are known everywhere

Does not know what else goes over the link.
"""

from __future__ import annotations

import asyncio

from contracts.clock import Clock
from contracts.upkeep import kept_up
from contracts.worker import WorkerState
from observability.log import get_logger
from registry.config import RedisConfig
from registry.link import RedisLink
from router.config import RegistryConfig
from router.workers.awake import AwakeTime
from router.workers.embedded_registry import EmbeddedRegistry
from router.workers.pools import Pools
from router.workers.redis_registry import RedisRegistry
from router.workers.registry import OpenRegistry, Registry

log = get_logger(__name__)
_AWAKE_TTLS = 0.2  # of a time in which this router did not run, this much counts as silence


class Membership:
    """Owns `registry`, and `link` if there is one, from `start` to `close`. Must be made in a running event loop."""

    registry: OpenRegistry

    def __init__(self, config: RegistryConfig, redis: RedisConfig | None, model_name: str, clock: Clock) -> None:
        """Raises ConfigError for TLS files of no use."""
        self.link: RedisLink | None = None
        self._shared: RedisRegistry | None = None
        self._clock = clock
        self._awake = AwakeTime(clock, _AWAKE_TTLS * config.ttl_s)
        self._pulse: asyncio.Task[None] | None = None
        if redis is None:
            self.registry = EmbeddedRegistry(config, model_name, self._awake)
        else:
            self.link = RedisLink(redis, clock)
            self.registry = self._shared = RedisRegistry(self.link, config, model_name, clock, self._awake)

    @property
    def num_refused(self) -> int:
        """Words in a shared registry that this router could not use."""
        return 0 if self._shared is None else self._shared.num_refused

    def start(self) -> None:
        """Begin to look for the others. Returns at once, whether or not Redis is there."""
        self._pulse = asyncio.ensure_future(kept_up("registry time", self._awake.run, self._clock, lambda _: None))
        if self.link is not None and self._shared is not None:
            self.link.start()
            self._shared.start()

    async def close(self) -> None:
        """Let go of Redis. Idempotent."""
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.wait((self._pulse,))
        if self._shared is not None:
            await self._shared.close()
        if self.link is not None:
            await self.link.close()


def reprieve(registry: Registry, pools: Pools) -> None:
    """Tell the registry of suspects whose connection stands (again); to be called again and again.

    A registry that is there waits for their own word, which says more. While it is away nobody can say one.
    """
    if not registry.problem:
        return
    for worker in registry.workers():
        if worker.suspect and worker.load.state is WorkerState.READY and pools.connected(worker.info.ref):
            registry.acquit(worker.info.ref)
