"""One life of a served worker: from a loaded model to exit, the same for both pools.

    run ──▶ started, announced ──signal──▶ left, draining (refuses new work, finishes what it has, bounded) ──▶ stopped
                  │  └─ stalled with work: NOT_SERVING, announced as such at once, until it moves
                  └─ worker.fatal ──▶ NOT_SERVING, calls cancelled, FatalError

Does not know what the worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.clock import Clock
from contracts.worker import WorkerLoad, WorkerState
from observability.log import get_logger
from rpc.announce import Announcer
from rpc.process import FatalError, StopSignals
from rpc.server import RpcServer

log = get_logger(__name__)


class ServedWorker(Protocol):
    """What the shell asks of a worker."""

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """Resolves when the worker cannot go on, with the reason."""
        ...

    def load(self) -> WorkerLoad:
        """How busy it is, from what it last knew; never waits."""
        ...

    def stalled_s(self) -> float:
        """For how long it has had work without any progress, once that is too long for its work; 0 until then."""
        ...

    async def drain(self) -> None:
        """Refuse new work from now on; return when all work is done."""
        ...

    async def stop(self) -> None:
        """Drop what is left and give everything back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LifecycleConfig:
    """Seconds. A stall is known `stall_check_s` after it is one, at most."""

    drain_limit_s: float = 120.0
    stall_check_s: float = 0.25
    grace_s: float = 2.0


def honest_load(worker: ServedWorker) -> WorkerLoad:
    """The worker's load as a registry should hear it: a ready worker that does not move is called stalled."""
    load = worker.load()
    stalled = load.state is WorkerState.READY and worker.stalled_s() > 0
    return replace(load, state=WorkerState.STALLED) if stalled else load


class Lifecycle:
    """Runs one worker behind one server that is bound or not yet. Owns the announcements; stops server and worker."""

    def __init__(
        self,
        worker: ServedWorker,
        server: RpcServer,
        announcers: Sequence[Announcer],
        clock: Clock,
        config: LifecycleConfig | None = None,
    ) -> None:
        self._worker = worker
        self._server = server
        self._announcers = tuple(announcers)
        self._clock = clock
        self._config = config if config is not None else LifecycleConfig()
        self._draining = False
        self._announcing: list[asyncio.Task[None]] = []

    async def run(self, signals: StopSignals) -> None:
        """Serve until a signal, then drain and stop. Raises FatalError when the worker died."""
        await self._server.start()
        await self._server.set_serving(True)
        self._announcing = [asyncio.create_task(a.run()) for a in self._announcers]
        watching = asyncio.create_task(self._watch_progress())
        try:
            await self._until_asked(signals)
            await self._drain(signals)
        finally:
            await _cancelled(watching)
            await self._leave()
            await self._server.stop(0.0 if self._worker.fatal.done() else self._config.grace_s)
            await self._worker.stop()

    async def _until_asked(self, signals: StopSignals) -> None:
        asked = asyncio.ensure_future(signals.wait())
        try:
            await asyncio.wait((asked, self._worker.fatal), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self._worker.fatal.done():
            cause = self._worker.fatal.result()
            raise FatalError(f"the engine died: {type(cause).__name__}: {cause}") from cause

    async def _leave(self) -> None:
        """Say NOT_SERVING and farewell, once; a registry that heard the farewell takes no later word from this life."""
        self._draining = True
        await self._server.set_serving(False)
        announcing, self._announcing = self._announcing, []
        for task in announcing:
            await _cancelled(task)
        if announcing:
            await asyncio.gather(*(announcer.leave() for announcer in self._announcers))

    async def _drain(self, signals: StopSignals) -> None:
        log.info("draining")
        await self._leave()
        drained = asyncio.ensure_future(self._worker.drain())

        async def drained_or_dead() -> None:
            try:
                await asyncio.wait((drained, self._worker.fatal), return_when=asyncio.FIRST_COMPLETED)
            finally:
                drained.cancel()

        whole = await signals.bounded(drained_or_dead(), self._config.drain_limit_s, "drain")
        self._raise_if_dead()
        if whole:
            drained.result()
            log.info("drained")

    async def _watch_progress(self) -> None:
        while True:
            await self._clock.sleep(self._config.stall_check_s)
            await self.check_progress()

    async def check_progress(self) -> None:
        """Make health and registries say whether the worker moves, as soon as that changes."""
        stalled_s = self._worker.stalled_s()
        healthy = stalled_s == 0
        if self._draining or healthy == self._server.serving:
            return
        if healthy:
            log.info("it moves again; health says SERVING")
        else:
            log.error("no progress although there is work; health says NOT_SERVING", stalled_s=stalled_s)
        await self._server.set_serving(healthy)
        for announcer in self._announcers:
            announcer.soon()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
