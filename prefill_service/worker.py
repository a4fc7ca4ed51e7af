"""A prefill worker without a process around it: an engine, its connectors, and the runs that are on it.

    starting ──start──▶ ready ──drain──▶ draining (no new runs; those here end, or go on elsewhere) ──stop──▶ gone

Tests start it in one event loop with a FakeRunner and the `local` connector; `main` puts it behind gRPC. Owns the engine's
thread and the runs; does not own the connectors' region. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from contracts.clock import Clock
from contracts.errors import Draining, InvalidRequest, Unavailable
from contracts.prefill import PrefillEvent, Target
from contracts.request import GenerationRequest
from contracts.worker import WorkerLoad, WorkerState
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.loop import EngineLoop, LoopFactory
from engine.output import Retained, StepOutput
from kv_transfer.endings import report, until_done, within
from kv_transfer.handoff import SourceState
from kv_transfer.links import Links, Side
from observability.log import get_logger
from observability.stages import HandoffStats
from prefill_service.peer import PeerSource
from prefill_service.run import PrefillRun, RunConfig, RunParts
from worker.block_feed import BlockFeed

log = get_logger(__name__)


class PrefillWorker:
    """See the module's docstring. Used from one event loop. `on_sent`, if set, hears of each hand-off that was committed, and
    `links.listener` what becomes of asking decode workers.
    """

    def __init__(
        self, side: Side, engine: Engine, peers: PeerSource, config: RunConfig, loop: LoopFactory = EngineLoop
    ) -> None:
        """`side` says who this is and has the engine's KV memory and clock. `loop` makes what steps the engine: a thread."""
        self.ref = side.ref
        self._clock: Clock = engine.clock
        self.driver = EngineDriver(engine, self._on_output, self._on_started, loop)
        self.blocks = BlockFeed(self.driver)
        self._peers = peers
        self.links = Links(side, config.sender)
        self._parts = RunParts(self.driver, self.links, peers, self._clock, config, lambda stats: self.on_sent(stats))
        self.on_sent: Callable[[HandoffStats], object] = _unheard
        self._runs: dict[str, PrefillRun] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # Set when runs that are still here shall go on elsewhere.
        self._enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state = WorkerState.STARTING
        # Resolves once it has drained: whoever listens to it for new runs may stop.
        self.drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """See rpc.lifecycle.ServedWorker."""
        return self.driver.fatal

    def start(self) -> None:
        """Start the engine's thread; runs are taken from now on."""
        self.driver.start()
        self._state = WorkerState.READY

    def load(self) -> WorkerLoad:
        """See rpc.lifecycle.ServedWorker."""
        return self.driver.load(self._state)

    def num_sending(self) -> tuple[int, int]:
        """Hand-offs that ask for room, and those that have it and are not over. From any thread."""
        senders = [run.chain.attempt.sender for run in list(self._runs.values())]
        states = [sender.state for sender in senders if sender is not None]
        return states.count(SourceState.COMPUTING), states.count(SourceState.SENDING)

    def stalled_s(self) -> float:
        """See rpc.lifecycle.ServedWorker."""
        return self.driver.stalled_s()

    async def run(
        self, request: GenerationRequest, target: Target, targets: asyncio.Queue[Target | None]
    ) -> AsyncGenerator[PrefillEvent, None]:
        """One request from its prompt to its hand-off; close the generator to abort it, at any moment.

        `targets` brings another target after each HandoffFailed, or None. Raises InvalidRequest, Overloaded, Draining (at
        any moment), UnknownHandoff (held in vain). Nothing of the request is left on this worker once it is closed.
        """
        if self._state is WorkerState.STARTING:
            raise Unavailable(f"{self.ref.worker_id} has not started yet")
        if self._state is not WorkerState.READY:
            raise self._draining()
        if request.request_id in self._runs:
            raise InvalidRequest(
                "request_id", request.request_id, "must be new; a request with this id is being served"
            )
        run = PrefillRun(self._parts, request, target)
        self._runs[request.request_id] = run
        self._idle.clear()
        try:
            async with aclosing(run.events(targets)) as events:
                while (event := await self._next(events)) is not None:
                    yield event
        finally:
            # A task of the worker's own: a second cancellation must not leave blocks behind.
            settling = asyncio.ensure_future(self._settle(request.request_id, run))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
            report(settling, self.driver.die)  # blocks that could not be given back are lost to everybody
            await asyncio.shield(settling)

    async def drain(self, patience_s: float) -> None:
        """Take no new runs, and let those that are here end for `patience_s`; then end them as Draining, to go on elsewhere.

        Returns when none is left.
        """
        self._state = WorkerState.DRAINING
        self.blocks.close()
        try:
            await within(self._clock, patience_s, self._idle.wait())
        except TimeoutError:
            log.info("sent away", runs=len(self._runs))
            self._enough.set_result(None)
            await self._idle.wait()
        if not self.drained.done():
            self.drained.set_result(None)

    async def stop(self) -> None:
        """Stop the engine; whoever still runs gets Unavailable. Connectors are the caller's to close. Idempotent."""
        self._state = WorkerState.GONE
        self.blocks.close()
        while self._settling:
            await asyncio.wait(set(self._settling))
        await self.links.close()
        await self._peers.close()
        await self.driver.stop()

    async def _next(self, events: AsyncGenerator[PrefillEvent, None]) -> PrefillEvent | None:
        """The next event, None after the last. Draining when this worker cannot wait for it any longer."""
        step = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait((step, self._enough), return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                raise self._draining()
            return step.result()
        finally:
            step.cancel()
            await until_done(step)

    def _draining(self) -> Draining:
        return Draining(f"{self.ref.worker_id} is about to stop")

    async def _settle(self, request_id: str, run: PrefillRun) -> None:
        try:
            await run.settle("the request's reader has left")
        except Unavailable as error:  # the engine is gone, and its blocks with it
            log.warning("could not give back", request_id=request_id, reason=error)
        finally:
            del self._runs[request_id]
            if not self._runs:
                self._idle.set()

    def _on_started(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            run = self._runs.get(request_id)
            if run is not None:
                run.on_started()

    def _on_output(self, output: StepOutput) -> None:
        for progress in output.progress:
            run = self._runs.get(progress.request_id)
            if run is not None:
                run.on_progress(progress)
        for retained in output.retained:
            self._take_retained_or_release(retained)
        for delta in output.deltas:
            run = self._runs.get(delta.request_id)
            if run is not None:
                run.on_delta(delta)

    def _take_retained_or_release(self, retained: Retained) -> None:
        run = self._runs.get(retained.request_id)
        if run is not None:
            run.on_retained(retained)
        else:  # its reader left while the step ran
            self.driver.post(lambda engine: engine.release(retained.lease))


def _unheard(stats: HandoffStats) -> None:
    del stats
