"""The registry that lives in a router's own process: workers announce themselves at its gRPC door.

Does not know how a worker is reached or chosen, nor other routers: a worker announces itself to each.
"""

from __future__ import annotations

from collections.abc import Callable

from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.config import RegistryConfig
from router.workers.awake import Time
from router.workers.registry import Change, Worker
from router.workers.worker_table import WorkerTable


class EmbeddedRegistry:
    """See `router.workers.registry`. Owns its table; called on the event loop only."""

    problem = ""  # it is here as long as the router is

    def __init__(self, config: RegistryConfig, model_name: str, clock: Time) -> None:
        self._config = config
        self._table = WorkerTable(config, model_name, clock)

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """See OpenRegistry."""
        self._table.announce(info, load)
        return self._config.ttl_s

    async def leave(self, ref: WorkerRef) -> None:
        """See OpenRegistry."""
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

    def suspect(self, ref: WorkerRef, *, for_good: bool = False) -> None:
        """See Registry."""
        self._table.suspect(ref, for_good=for_good)

    def acquit(self, ref: WorkerRef) -> None:
        """See Registry: a word comes within a second, and says more than a connection does."""

    def expire(self) -> None:
        """See Registry."""
        self._table.expire()

    def subscribe(
        self, listener: Callable[[Change], None], heard: Callable[[WorkerRef, WorkerLoad], None] | None = None
    ) -> None:
        """See Registry."""
        self._table.subscribe(listener, heard)
