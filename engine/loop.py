"""The one thread that steps an engine: commands run between steps, in the order in which they came.

    asyncio ── call / post ──▶ commands ──▶ ┌──────────────────────┐ ──▶ on_output(StepOutput), in this thread
                                            │ commands → step → …  │
                                            └──────────────────────┘ ──▶ on_fatal(error), then the thread ends
    sleeps on a condition while there is nothing to do, or while all that is left waits for blocks held outside

An exception out of a step, an output callback or a posted command is a programming error: it goes to `on_fatal`, and every
caller that waits gets Unavailable. Does not know requests, transports or what others do with outputs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from contracts.errors import Unavailable
from engine.engine import Engine, OnStarted, StepOutput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """Evidence of life. `last_progress_s` is the instant of the engine's clock at which the loop last finished something."""

    num_steps: int
    last_progress_s: float
    busy: bool  # inside commands or a step, not asleep

    def stalled_s(self, now_s: float) -> float:
        """For how long the loop has been inside one step or command; 0 while it sleeps because nothing can be done."""
        return now_s - self.last_progress_s if self.busy else 0.0


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
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._on_fatal = on_fatal
        self._on_started = on_started
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._stopping = False
        self._ended = False
        self._runnable = False
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

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Run `fn` in the engine thread, from any thread. If it raises, that is fatal. After the loop's end it is dropped."""
        self._submit(_Post(fn))

    async def call(self, fn: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """The result of `fn`, run in the engine thread; what it raises is raised here. Unavailable once the loop has ended.

        If the caller is cancelled after `fn` ran, nobody would own its result (a lease!): then `undo` gets it, in the
        engine thread. Cancelled before, `fn` does not run.
        """

        def abandon(result: T) -> None:
            if undo is not None:
                self.post(lambda engine: undo(engine, result))

        call = _Call(fn, abandon, asyncio.get_running_loop())
        self._submit(call)
        return await call.result()

    def _submit(self, command: _Command) -> None:
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
                deadline_s = self._engine.next_deadline_s()
                left_s = None if deadline_s is None else deadline_s - self._engine.clock.now()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
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
            self._runnable = False
            return
        output = self._engine.step(self._on_started)
        self._note(busy=True, num_steps=1)
        self._runnable = output.made_progress and self._engine.has_work
        if output.made_progress:
            self._on_output(output)
        if not self._engine.has_work:
            self._engine.check_integrity()

    def _note(self, *, busy: bool, num_steps: int = 0) -> None:
        self._progress = LoopProgress(self._progress.num_steps + num_steps, self._engine.clock.now(), busy)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            commands, self._commands = self._commands, deque()
            self._note(busy=False)
        for command in commands:
            command.cancel()


class _Command(Protocol):
    def run(self, engine: Engine) -> None:
        """In the engine thread."""
        ...

    def cancel(self) -> None:
        """Instead of `run`, in any thread: the loop has ended."""
        ...


class _Post:
    """A command that nobody waits for."""

    def __init__(self, fn: Callable[[Engine], object]) -> None:
        self._fn = fn

    def run(self, engine: Engine) -> None:
        self._fn(engine)

    def cancel(self) -> None:
        """Nothing to do: the engine is gone, and with it all that the command could have changed."""


class _Call(Generic[T]):
    """A command whose caller waits in an event loop. Its result has exactly one owner: the caller, or `abandon`."""

    def __init__(
        self, fn: Callable[[Engine], T], abandon: Callable[[T], None], event_loop: asyncio.AbstractEventLoop
    ) -> None:
        self._fn = fn
        self._abandon = abandon
        self._event_loop = event_loop
        self._future: asyncio.Future[T] = event_loop.create_future()

    async def result(self) -> T:
        try:
            return await self._future
        except asyncio.CancelledError:
            # The result may have arrived while the caller was cancelled before its next turn.
            if not self._future.cancelled() and self._future.exception() is None:
                self._abandon(self._future.result())
            raise

    def run(self, engine: Engine) -> None:
        if self._future.cancelled():
            return
        try:
            result = self._fn(engine)
        except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it whole
            self._event_loop.call_soon_threadsafe(self._fail, error)
        else:
            self._event_loop.call_soon_threadsafe(self._deliver, result)

    def cancel(self) -> None:
        self._event_loop.call_soon_threadsafe(self._fail, Unavailable("the engine has stopped"))

    def _deliver(self, result: T) -> None:
        if self._future.cancelled():
            self._abandon(result)
        else:
            self._future.set_result(result)

    def _fail(self, error: Exception) -> None:
        if not self._future.cancelled():
            self._future.set_exception(error)
        elif not isinstance(error, Unavailable):
            self._event_loop.call_exception_handler({"message": "a cancelled engine call failed", "exception": error})
