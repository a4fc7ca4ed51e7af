"""What the router asks of a registry, whichever it is: who is there, and what changed.

Two give it, over one table (`router.workers.worker_table`): `router.workers.embedded_registry`, to which workers announce
themselves at this router's own door, and `router.workers.redis_registry`, which several routers share. Does not know how a
worker is reached or chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef


class ChangeKind(StrEnum):
    """What happened to a worker."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Change:
    """One event in the life of one worker."""

    kind: ChangeKind
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class Worker:
    """A known worker, and when it last said so, in the table's time, which goes on no further than the router itself
    (`router.workers.awake`); believed for `ttl_s`, if its lease says another time than the router's configuration.
    """

    info: WorkerInfo
    load: WorkerLoad
    heard_at: float
    suspect: bool = False
    ttl_s: float | None = None


class Registry(Protocol):
    """What the router needs from any registry, embedded or shared."""

    @property
    def problem(self) -> str:
        """What keeps the registry away, in one line; empty while it is there. What it knew last stays known meanwhile."""
        ...

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """All known workers whose word is fresh, whatever their state."""
        ...

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """Those that take work."""
        ...

    def absent_s(self, kind: WorkerKind) -> float:
        """For how many seconds no worker of this pool has been known: 0 while one is, infinite if none ever was."""
        ...

    def suspect(self, ref: WorkerRef, *, for_good: bool = False) -> None:
        """A connection to this worker broke, or it refuses work: do not offer it until it announces again; or never in this
        life (`for_good`), because it does not show that it is of this cluster.
        """
        ...

    def acquit(self, ref: WorkerRef) -> None:
        """The connection to this suspect stands again: while the registry is away, nobody can announce, and that must do."""
        ...

    def expire(self) -> None:
        """Forget those whose word is no longer fresh."""
        ...

    def subscribe(
        self, listener: Callable[[Change], None], heard: Callable[[WorkerRef, WorkerLoad], None] | None = None
    ) -> None:
        """Call `listener` on the event loop for every change from now on, and `heard` for every word, after its change."""
        ...


class OpenRegistry(Registry, Protocol):
    """A registry that workers can speak to through this router: what its door for workers calls."""

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """Take a sign of life; return for how many seconds it is believed.

        Raises StaleEpoch, LayoutMismatch, WorkerIdTaken when another worker that is alive goes by this id, Overloaded when
        there are too many, or Unavailable when the registry is away.
        """
        ...

    async def leave(self, ref: WorkerRef) -> None:
        """A worker takes no new work from now on. Unknown or older lives are ignored. Raises Unavailable."""
        ...
