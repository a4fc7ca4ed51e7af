"""An engine and its loop as an asyncio service sees them: news arrive on the event loop, death is a future, load is at hand.

    engine thread: on_started, StepOutput ──call_soon_threadsafe──▶ the service's callbacks, in the same order
                   exception              ──────────────────────▶ `fatal`

Does not know what the service does with the news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from contracts.worker import WorkerLoad, WorkerState
from engine.engine import Engine
from engine.kv.block_news import BlockChanges
from engine.loop import EngineLoop, LoopFactory
from engine.output import StepOutput

T = TypeVar("T")
STEP_LIMIT_S = 3.0  # what any step or command may take before it is a stall, or
STEP_LIMIT_TIMES = 3.0  # this many times what a step of its size should take on this machine, if that is more
STARVED_LIMIT_S = 60.0  # longer than any hand-off may hold blocks that all work waits for (docs/adr/0003)


class EngineDriver:
    """Owns the engine's loop, which `loop` makes: a thread unless told otherwise. Made and used in one running event loop.

    `on_step`, if set before the start, is called in the engine's thread after every step that made progress. `on_blocks`, if
    set, hears on the event loop of each step's changes in the prefix cache while the engine's `block_news` are listened to,
    and before that step's output.
    """

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[StepOutput], None],
        on_started: Callable[[tuple[str, ...]], None] | None = None,
        loop: LoopFactory = EngineLoop,
    ) -> None:
        self._engine = engine
        self.now = engine.clock.now
        self.stats = engine.stats  # from any thread: counters
        self._event_loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._on_started = on_started
        self.on_step: Callable[[StepOutput], None] | None = None
        self.on_blocks: Callable[[BlockChanges], None] | None = None
        self._load = WorkerLoad()
        self._started = False
        self._fatal: asyncio.Future[BaseException] = self._event_loop.create_future()
        self._loop = loop(
            engine, self._hear_output, self._hear_fatal, None if on_started is None else self._hear_started
        )

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """Resolves with what killed the engine, if anything does."""
        return self._fatal

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return self._loop.progress.num_steps

    def start(self) -> None:
        """Start the loop; once."""
        self._started = True
        self._loop.start()

    async def stop(self) -> None:
        """Let the running step finish and end the loop; callers that wait get Unavailable. Idempotent."""
        if self._started:
            await self._loop.aclose()

    def post(self, fn: Callable[[Engine], object]) -> None:
        """See EngineLoop.post."""
        self._loop.post(fn)

    async def call(self, fn: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """See EngineLoop.call."""
        return await self._loop.call(fn, undo)

    def load(self, state: WorkerState) -> WorkerLoad:
        """How busy the engine was when it last said so; asks it to say so again, and does not wait."""
        self._loop.post(self._note_load)
        return replace(self._load, state=state)

    def stalled_s(self) -> float:
        """For how long there has been work without any progress, once that is too long; 0 before, and while it moves or idles.

        Too long is more than STEP_LIMIT_S inside one step or command, unless a step of this size should take a third of that
        or more here (`engine.pace`), and more than STARVED_LIMIT_S in which all work waits for blocks held outside. From any
        thread.
        """
        now_s, progress = self.now(), self._loop.progress
        inside_s, starved_s = progress.stalled_s(now_s), progress.starved_s(now_s)
        if inside_s > max(STEP_LIMIT_S, STEP_LIMIT_TIMES * self._engine.pace.expected_s()):
            return inside_s
        return starved_s if starved_s > STARVED_LIMIT_S else 0.0

    def die(self, error: BaseException) -> None:
        """A fault of ours outside the engine's thread: `fatal` resolves with the first."""
        if not self._fatal.done():
            self._fatal.set_result(error)

    def _note_load(self, engine: Engine) -> None:
        self._load = engine.load()  # one reference, replaced whole: safe to read from any thread

    def _hear_output(self, output: StepOutput) -> None:
        self._note_load(self._engine)
        if self.on_step is not None:
            self.on_step(output)
        changes = self._engine.block_news.take()
        if changes is not None and self.on_blocks is not None:
            self._event_loop.call_soon_threadsafe(self.on_blocks, changes)
        if output.deltas or output.progress or output.retained:
            self._event_loop.call_soon_threadsafe(self._on_output, output)

    def _hear_started(self, request_ids: tuple[str, ...]) -> None:
        if self._on_started is not None:
            self._event_loop.call_soon_threadsafe(self._on_started, request_ids)

    def _hear_fatal(self, error: BaseException) -> None:
        self._event_loop.call_soon_threadsafe(self.die, error)
