"""The registry that several routers share: workers are judged in Redis, and every router keeps its own table of them.

What is heard of Redis is `router.workers.lookout`'s; here are the table, and what this router itself says: words of workers that
announce themselves at its own door, and suspicions. Redis judges whose an id is; the table still refuses an older life, another
model or another layout. Does not know requests, policies or connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.clock import Clock
from contracts.errors import LayoutMismatch, Unavailable
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.log import get_logger
from registry import keys, scripts
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig
from registry.link import RedisLink
from router.config import RegistryConfig
from router.workers.awake import Time
from router.workers.lookout import Lookout
from router.workers.registry import Change, Worker
from router.workers.worker_table import WorkerTable

log = get_logger(__name__)


class RedisRegistry:
    """See `router.workers.registry`. Owns its table and, from `start` to `close`, who listens; not the link."""

    def __init__(
        self, link: RedisLink, config: RegistryConfig, model_name: str, clock: Clock, time: Time | None = None
    ) -> None:
        """`time` is what silence is measured by, if not `clock`."""
        self._link = link
        self._config = config
        self._model_name = model_name
        self._client = RedisRegistryClient(link, LeaseConfig(config.ttl_s))
        self._table = WorkerTable(config, model_name, clock if time is None else time)
        self._lookout = Lookout(link, self._table, config, clock)
        self._marks: set[asyncio.Task[None]] = set()

    @property
    def problem(self) -> str:
        """See Registry."""
        return self._lookout.problem

    @property
    def num_refused(self) -> int:
        """Words in Redis that could not be used, damaged or of workers that do not fit."""
        return self._lookout.num_refused

    def start(self) -> None:
        """Begin to listen and to look. Returns at once, whether or not Redis is there."""
        self._lookout.start()

    async def close(self) -> None:
        """End what `start` began. Idempotent."""
        marks = tuple(self._marks)
        for mark in marks:
            mark.cancel()
        await asyncio.gather(*marks, return_exceptions=True)
        await self._lookout.close()

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """See OpenRegistry: a worker that speaks to this router is made known to all."""
        if info.model_name != self._model_name:
            raise LayoutMismatch("model_name", self._model_name, info.model_name)
        await asyncio.gather(*self._marks, return_exceptions=True)
        ttl_s = await self._client.announce(info, load)
        self._table.announce(info, load, judged=True)
        return ttl_s

    async def leave(self, ref: WorkerRef) -> None:
        """See OpenRegistry."""
        await self._client.leave(ref)
        self._table.leave(ref)

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """See Registry."""
        return self._table.workers(kind)

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """See Registry."""
        return self._table.ready(kind)

    def absent_s(self, kind: WorkerKind) -> float:
        """See Registry."""
        return self._table.absent_s(kind)

    def suspect(self, ref: WorkerRef) -> None:
        """See Registry. Redis is told, best effort, so that the worker's next life can have its name elsewhere at once."""
        self._table.suspect(ref)
        if self._link.up:
            mark = asyncio.ensure_future(self._mark(ref))
            self._marks.add(mark)
            mark.add_done_callback(self._marks.discard)

    def acquit(self, ref: WorkerRef) -> None:
        """See Registry."""
        self._table.acquit(ref)

    def expire(self) -> None:
        """See Registry."""
        self._table.expire()

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """See Registry."""
        self._table.subscribe(listener)

    async def _mark(self, ref: WorkerRef) -> None:
        ttl_ms = round(self._config.ttl_s * 1e3)
        names = (keys.suspect(ref.worker_id), keys.worker(ref.worker_id))
        try:
            await self._link.script(scripts.SUSPECT, names, (ref.epoch, ttl_ms))
        except Unavailable as error:
            log.info("a suspicion was not shared", worker_id=ref.worker_id, reason=error)
