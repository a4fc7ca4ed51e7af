"""The one thread that steps an engine: commands run between steps, in the order in which they came.

    asyncio ── call / post ──▶ commands ──▶ ┌──────────────────────┐ ──▶ on_output(StepOutput), in this thread
                                            │ commands → step → …  │
                                            └──────────────────────┘ ──▶ on_fatal(error), then the thread ends
    sleeps on a condition while there is nothing to do, or while all that is left waits for blocks held outside;
    when the last work has gone, and now and then while there is none, the engine's books are checked

An exception out of a step, an output callback or a posted command is a programming error: it goes to `on_fatal`, and every
caller that waits gets Unavailable. Does not know requests, transports or what others do with outputs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.commands import Command, Post, called
from engine.engine import Engine, OnStarted, StepOutput

T = TypeVar("T")

IDLE_CHECK_S = 5.0  # between two looks at the books of an idle engine
_CHECK_SHARE = 100  # a look that takes long is made more seldom: it costs at most a hundredth of the time


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """Evidence of life. `last_progress_s` is the instant of the engine's clock at which the loop last finished something,
    `starved_since_s` that at which the work that is here first found nothing of it could run; None when some can.
    """

    num_steps: int
    last_progress_s: float
    busy: bool  # inside commands or a step, not asleep
    starved_since_s: float | None = None

    def stalled_s(self, now_s: float) -> float:
        """For how long the loop has been inside one step or command; 0 while it sleeps because nothing can be done."""
        return now_s - self.last_progress_s if self.busy else 0.0

    def starved_s(self, now_s: float) -> float:
        """For how long all work that is here has waited for blocks held outside; 0 when some can run or there is none."""
        return now_s - self.starved_since_s if self.starved_since_s is not None else 0.0


class StepLoop(Protocol):
    """Whatever steps an engine: the thread below, or `engine.inline.InlineLoop`. Made by a LoopFactory, started once."""

    @property
    def progress(self) -> LoopProgress:
        """Evidence of life."""
        ...

    def start(self) -> None:
        """Begin to step; once."""
        ...

    async def aclose(self) -> None:
        """Let the running step finish, then run nothing more. Callers that wait get Unavailable. Idempotent."""
        ...

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Run `fn` between two steps. If it raises, that is fatal. After the loop's end it is dropped."""
        ...

    async def call(self, fn: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """The result of `fn`, run between two steps. `undo` gets it when the caller was cancelled after `fn` ran."""
        ...


LoopFactory = Callable[
    [Engine, Callable[[StepOutput], None], Callable[[BaseException], None], OnStarted | None], StepLoop
]


class EngineLoop:
    """Owns the engine once started: from then on nobody touches it but through `call` and `post`.

    `on_started` hears which retaining requests begin, just before the step that computes their first chunk.
    """

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[StepOutput], None],
        on_fatal: Callable[[BaseException], None],
        on_started: OnStarted | None = None,
        *,
        idle_check_s: float = IDLE_CHECK_S,
    ) -> None:
        self._idle_check_s = idle_check_s
        self._check_at = engine.clock.now() + idle_check_s
        self._engine = engine
        self._on_output = on_output
        self._on_fatal = on_fatal
        self._on_started = on_started
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._ended = False
        self._runnable = False
        self._starved_since_s: float | None = None
        self._progress = LoopProgress(0, engine.clock.now(), busy=False)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def progress(self) -> LoopProgress:
        """Read from any thread."""
        return self._progress

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def stop(self) -> None:
        """Let the running step finish, run nothing more, and join the thread. Callers that wait get Unavailable. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._end()

    async def aclose(self) -> None:
        """`stop`, without keeping the event loop waiting."""
        await asyncio.to_thread(self.stop)

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Run `fn` in the engine thread, from any thread. If it raises, that is fatal. After the loop's end it is dropped."""
        self._submit(Post(fn))

    async def call(self, fn: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """The result of `fn`, run in the engine thread; what it raises is raised here. Unavailable once the loop has ended.

        If the caller is cancelled after `fn` ran, nobody would own its result (a lease!): then `undo` gets it, in the
        engine thread. Cancelled before, `fn` does not run.
        """
        return await called(self._submit, fn, undo)

    def _submit(self, command: Command) -> None:
        with self._changed:
            if not (self._ended or self._stopping):
                self._commands.append(command)
                self._changed.notify()
                return
        command.cancel()

    def _run(self) -> None:
        try:
            while self._wait():
                self._run_commands()
                self._step()
        except BaseException as error:  # noqa: BLE001 - nothing may end this thread unheard
            self._end()
            self._on_fatal(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False to stop."""
        with self._changed:
            while not (self._stopping or self._commands or self._runnable):
                self._note(busy=False)
                deadline_s = self._engine.next_deadline_s() if self._engine.has_work else self._check_at
                left_s = None if deadline_s is None else deadline_s - self._engine.clock.now()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
            self._note(busy=True)
            return not self._stopping

    def _run_commands(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, deque()
        while commands:
            try:
                commands.popleft().run(self._engine)
            except BaseException:
                self._commands.extendleft(reversed(commands))  # their callers are told with the others
                raise
            self._note(busy=True)

    def _step(self) -> None:
        if not self._engine.has_work:
            self._runnable, self._starved_since_s = False, None
            if self._engine.clock.now() >= self._check_at:  # also by commands alone: leases come and go without work
                self._check_books()
            return
        output = self._engine.step(self._on_started)
        if output.made_progress:
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = self._engine.clock.now()
        self._note(busy=True, num_steps=1)
        self._runnable = output.made_progress and self._engine.has_work
        if output.made_progress:
            self._on_output(output)
        if not self._engine.has_work:
            self._check_books()

    def _check_books(self) -> None:
        began = self._engine.clock.now()
        self._engine.check_integrity()
        ended = self._engine.clock.now()
        self._check_at = ended + max(self._idle_check_s, _CHECK_SHARE * (ended - began))

    def _note(self, *, busy: bool, num_steps: int = 0) -> None:
        num_steps += self._progress.num_steps
        self._progress = LoopProgress(num_steps, self._engine.clock.now(), busy, self._starved_since_s)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            commands, self._commands = self._commands, deque()
            self._note(busy=False)
        for command in commands:
            command.cancel()
