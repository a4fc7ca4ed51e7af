"""A decode worker without a process around it: an engine, the receiver of hand-offs, and the sessions that read answers.

    starting ──start──▶ ready ──drain──▶ draining (nothing new; what is here ends, or goes on elsewhere) ──stop──▶ gone

Tests start it in one event loop with a FakeRunner and the `local` connector; `main` puts it behind gRPC. Owns the engine's
thread, the receiver (a HandoffPeer) and the desk where sessions are served; not the connectors. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.worker import WorkerLoad, WorkerState
from decode_service.desk import AnswerDesk
from decode_service.outputs import AnswerBook, OutputConfig
from decode_service.pool import EnginePool, HandoffListener
from engine.driver import EngineDriver
from engine.engine import Engine, KVLease
from engine.loop import EngineLoop, LoopFactory
from kv_transfer.config import ReceiverConfig
from kv_transfer.endings import report, until_done
from kv_transfer.links import Side
from kv_transfer.receiver import Receiver
from kv_transfer.staging import StagedLease, StagedPool
from worker.block_feed import BlockFeed


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """How hand-offs are received and answers are read. `session_batches`: how many unread batches end a session."""

    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    outputs: OutputConfig = field(default_factory=OutputConfig)
    session_batches: int = 4096
    sweep_every_s: float = 0.1
    drain_poll_s: float = 0.02

    def __post_init__(self) -> None:
        if self.session_batches < 1:
            raise ConfigError(f"session_batches: got {self.session_batches}, must be at least 1")


class DecodeWorker:
    """See the module's docstring. Used from one event loop. `on_mismatch`, if set, hears of each hand-off with wrong bytes."""

    def __init__(self, side: Side, engine: Engine, config: AnswerConfig, loop: LoopFactory = EngineLoop) -> None:
        """`side` says who this is and has the engine's KV memory and clock. `loop` makes what steps the engine: a thread."""
        self.ref = ref = side.ref
        self._clock: Clock = engine.clock
        self._config = config
        self.driver = EngineDriver(engine, lambda output: self._book.deliver(output.deltas), loop=loop)
        self.blocks = BlockFeed(self.driver)
        self._book = AnswerBook(self._abort, self._clock, config.outputs)
        self.desk = AnswerDesk(ref, self.driver, self._book, config.session_batches)
        self._sweeping: asyncio.Task[None] | None = None
        self._state = WorkerState.STARTING
        self.on_mismatch: Callable[[], None] | None = None
        self._pool = EnginePool(self.driver, self._book)
        around = (HandoffListener(self._book, self._on_mismatch), config.receiver, self.driver.die)
        self.receiver: Receiver[KVLease] | Receiver[StagedLease[KVLease]]
        if side.staging is None:
            self.receiver = Receiver(side, self._pool, *around)
        else:
            self.receiver = Receiver(side, StagedPool(self._pool, side.staging, side.layout.block_size), *around)
        self._book.on_unread = self.receiver.give_up

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """See rpc.lifecycle.ServedWorker."""
        return self.driver.fatal

    def start(self) -> None:
        """Start the engine's thread, the receiver and the sweep."""
        self.driver.start()
        self.receiver.start()
        self._sweeping = asyncio.ensure_future(self._sweep())
        report(self._sweeping, self.driver.die)
        self._state = WorkerState.READY

    def load(self) -> WorkerLoad:
        """See rpc.lifecycle.ServedWorker."""
        return self.driver.load(self._state)

    def stalled_s(self) -> float:
        """See rpc.lifecycle.ServedWorker."""
        return self.driver.stalled_s()

    async def drain(self, patience_s: float) -> None:
        """Take nothing new, and let hand-offs and answers that are here end for `patience_s`; then end them as Draining, to
        go on elsewhere. Returns when nothing is left.
        """
        self._state = WorkerState.DRAINING
        self.blocks.close()
        enough_at = self._clock.now() + patience_s
        self.desk.drain(self._pool.holds)
        handoffs = asyncio.ensure_future(self.receiver.drain(patience_s))
        try:
            while self._book.num_open or not handoffs.done():
                self.desk.send_away(everything=self._clock.now() >= enough_at)
                await self._clock.sleep(self._config.drain_poll_s)
        finally:
            handoffs.cancel()
            await until_done(handoffs)
        self.desk.end_sessions()
        handoffs.result()  # a fault of the receiver is no drain that went well

    async def stop(self) -> None:
        """Abort what is left, stop the engine. Connectors are the caller's to close. Idempotent."""
        self._state = WorkerState.GONE
        self.blocks.close()
        await self.desk.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait((self._sweeping,))
        await self.receiver.close()
        await self.driver.stop()

    def count_reservations(self, listener: Callable[[str], object]) -> None:
        """Tell `listener` what came of each request for room: granted, no_room or refused."""
        self._pool.on_reserved = listener

    def _on_mismatch(self) -> None:
        if self.on_mismatch is not None:
            self.on_mismatch()

    def _abort(self, request_id: str) -> None:
        self.driver.post(lambda engine: engine.abort(request_id))

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self._config.sweep_every_s)
            self._book.sweep()
