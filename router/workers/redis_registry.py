"""The registry that several routers share: workers are judged in Redis, and every router keeps its own table of them.

What is heard of Redis is `router.workers.lookout`'s; here are the table, and what this router itself says: words of workers that
announce themselves at its own door, and suspicions. Redis judges whose an id is; the table still refuses an older life, another
model or another layout. A worker can join through this router's door while Redis is away, and is handed to Redis afterwards.
Does not know requests, policies or connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.clock import Clock
from contracts.errors import DiptychError, LayoutMismatch, Unavailable
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.log import get_logger
from registry import keys, scripts
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig
from registry.link import RedisLink
from router.config import RegistryConfig
from router.workers.awake import Time
from router.workers.lookout import Lookout
from router.workers.registry import Change, ChangeKind, Worker
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
        self._marks: dict[asyncio.Task[None], str] = {}  # and whom they are about
        self._unjudged: set[WorkerRef] = set()  # taken by this router alone
        self._table.subscribe(self._on_change)

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
        """See OpenRegistry: a worker that speaks to this router is made known to all, or to this router while Redis is away.

        Then this router judges by what it knows. The worker's next words go to Redis as soon as that is back; if it takes none
        of them, because another has the name by then, this router drops the worker.
        """
        if info.model_name != self._model_name:
            raise LayoutMismatch("model_name", self._model_name, info.model_name)
        marks = [mark for mark, worker_id in self._marks.items() if worker_id == info.ref.worker_id]
        await asyncio.gather(*marks)
        try:
            ttl_s = await self._client.announce(info, load)
        except Unavailable as error:
            self._table.announce(info, load)
            if info.ref not in self._unjudged:
                self._unjudged.add(info.ref)
                log.info("a worker is known to this router only", worker_id=info.ref.worker_id, reason=error)
            return self._config.ttl_s
        except DiptychError:
            if info.ref in self._unjudged:
                self._table.leave(info.ref, ChangeKind.LOST)
            raise
        self._unjudged.discard(info.ref)
        self._table.announce(info, load, judged=True)
        return ttl_s

    async def leave(self, ref: WorkerRef) -> None:
        """See OpenRegistry. Known here at once; a lease in a Redis that does not hear of it ends by itself."""
        self._table.leave(ref)
        await self._client.leave(ref)

    def _on_change(self, change: Change) -> None:
        if change.kind is not ChangeKind.JOINED:
            self._unjudged.discard(change.info.ref)

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """See Registry."""
        return self._table.workers(kind)

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """See Registry."""
        return self._table.ready(kind)

    def absent_s(self, kind: WorkerKind) -> float:
        """See Registry."""
        return self._table.absent_s(kind)

    def suspect(self, ref: WorkerRef, *, for_good: bool = False) -> None:
        """See Registry. Redis is told, best effort, so that the worker's next life can have its name elsewhere at once."""
        self._table.suspect(ref, for_good=for_good)
        if self._link.up:
            mark = asyncio.ensure_future(_mark(self._link, ref, self._config.ttl_s))
            self._marks[mark] = ref.worker_id
            mark.add_done_callback(self._marks.pop)

    def acquit(self, ref: WorkerRef) -> None:
        """See Registry."""
        self._table.acquit(ref)

    def expire(self) -> None:
        """See Registry."""
        self._table.expire()

    def subscribe(
        self, listener: Callable[[Change], None], heard: Callable[[WorkerRef, WorkerLoad], None] | None = None
    ) -> None:
        """See Registry."""
        self._table.subscribe(listener, heard)


async def _mark(link: RedisLink, ref: WorkerRef, ttl_s: float) -> None:
    names = (keys.suspect(ref.worker_id), keys.worker(ref.worker_id))
    try:
        await link.script(scripts.SUSPECT, names, (ref.epoch, round(ttl_s * 1e3)))
    except Unavailable as error:
        log.info("a suspicion was not shared", worker_id=ref.worker_id, reason=error)
