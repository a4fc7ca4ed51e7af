"""One life of a served worker: from a loaded model to exit, the same for both pools.

    run ──▶ started, announced ──signal──▶ left, draining (refuses new work, finishes or sends away what it has) ──▶ stopped
                  │  └─ stalled with work: NOT_SERVING, announced as such at once, until it moves
                  └─ worker.fatal ──▶ NOT_SERVING, calls cancelled, FatalError

Does not know what the worker does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.worker import WorkerLoad, WorkerState
from observability.log import get_logger
from observability.private import reason
from rpc.announce import Announcer
from rpc.process import FatalError, StopSignals, abandon
from rpc.server import RpcServer

log = get_logger(__name__)
_LEAST_FAREWELL_S = 0.25
_LEAST_STOP_S = 1.0  # for the step that is running


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

    async def drain(self, patience_s: float) -> None:
        """Refuse new work from now on, and end what is not done after `patience_s` so that it goes on elsewhere.

        Returns when nothing is left.
        """
        ...

    async def stop(self) -> None:
        """Drop what is left and give everything back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LifecycleConfig:
    """Seconds. A stall is known `stall_check_s` after it is one, at most.

    From a signal to the end it takes at most `drain_limit_s`, after a second one no time. What is here may end by itself
    for `finish_share` of that; it is sent elsewhere then, but where there is no other worker of this pool only
    `drain_margin_s` before the limit. A router that had not heard the farewell when it sent a request is refused in good
    order: for `linger_s` at least.
    """

    drain_limit_s: float = 120.0
    finish_share: float = 0.5
    drain_margin_s: float = 2.0
    linger_s: float = 0.25
    stall_check_s: float = 0.25
    grace_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.finish_share <= 1:
            raise ConfigError(f"finish_share: got {self.finish_share}, must be from 0 to 1")

    @property
    def margin_s(self) -> float:
        """What of the limit is kept for sending work away, ending calls and stopping the engine."""
        return min(self.drain_margin_s, self.drain_limit_s / 4)

    def patience_s(self, num_others: int) -> float:
        """How long after the signal work may go on here, with so many other workers to take it."""
        most_s = self.drain_limit_s - self.margin_s
        return min(most_s, self.finish_share * self.drain_limit_s) if num_others else most_s


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
        self._num_others = 0  # of this pool, said by each router on the farewell; the least
        self._stop_by: float | None = None
        self._announcing: list[asyncio.Task[None]] = []
        self.abandon: Callable[[int], object] = abandon  # ends a process of which a thread cannot be ended

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
            await self._end()

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
            raise FatalError(f"the engine died: {reason(cause)}") from cause

    async def _leave(self) -> None:
        """Say NOT_SERVING and farewell, once; a registry that heard the farewell takes no later word from this life."""
        self._draining = True
        await self._server.set_serving(False)
        announcing, self._announcing = self._announcing, []
        for task in announcing:
            await _cancelled(task)
        if announcing:
            self._num_others = min(await asyncio.gather(*(announcer.leave() for announcer in self._announcers)))

    async def _drain(self, signals: StopSignals) -> None:
        began, config = self._clock.now(), self._config
        self._stop_by = began + config.drain_limit_s
        log.info("draining", limit_s=config.drain_limit_s)
        await signals.bounded(self._leave(), max(config.drain_limit_s / 4, _LEAST_FAREWELL_S), "farewell")
        patience_s = began + config.patience_s(self._num_others) - self._clock.now()
        log.info("left", others=self._num_others, patience_s=round(patience_s, 3))
        drained = asyncio.ensure_future(self._drained(patience_s))

        async def drained_or_dead() -> None:
            try:
                await asyncio.wait((drained, self._worker.fatal), return_when=asyncio.FIRST_COMPLETED)
            finally:
                drained.cancel()

        limit_s = max(0.0, self._stop_by - config.margin_s / 2 - self._clock.now())
        whole = await signals.bounded(drained_or_dead(), limit_s, "drain")
        if signals.hurried:
            self._stop_by = self._clock.now()
        self._raise_if_dead()
        if whole:
            drained.result()
            log.info("drained")

    async def _drained(self, patience_s: float) -> None:
        linger_s = min(self._config.linger_s, self._config.drain_limit_s / 4) if self._announcers else 0.0
        await asyncio.gather(self._worker.drain(max(0.0, patience_s)), self._clock.sleep(linger_s))

    async def _end(self) -> None:
        """Close the server and stop the worker. A step that does not come to an end is left behind, and the process with it."""
        left_s = self._config.grace_s if self._stop_by is None else max(0.0, self._stop_by - self._clock.now())
        dead = self._worker.fatal.done()
        grace_s = 0.0 if dead else min(self._config.grace_s, left_s / 2)

        async def end() -> None:
            await self._server.stop(grace_s)
            await self._worker.stop()

        ending = asyncio.ensure_future(end())
        await asyncio.wait((ending,), timeout=max(left_s, grace_s + _LEAST_STOP_S))
        if ending.done():
            ending.result()
            return
        log.error("the engine does not come to the end of its step; it is left behind")
        self.abandon(1 if dead else 0)

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
