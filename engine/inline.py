"""An engine stepped in the event loop instead of a thread: whole pools in one thread, on any clock, the same every time.

    call / post ──▶ commands ──▶ ┌─────────────────────────────────────────────────┐ ──▶ on_output(StepOutput)
                                 │ commands → step → step_time(output) passes → …  │ ──▶ on_fatal(error), then the loop ends
                                 └─────────────────────────────────────────────────┘

For simulators and tests: what a step takes is said by `step_time` and passes on the engine's clock, between the computing and
the news of it, so commands wait for it as they would for a running step. What the engine itself measures within a step is 0.
Otherwise as `engine.loop`, which see.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from engine.commands import Command, Post, called
from engine.engine import Engine, OnStarted, StepOutput
from engine.loop import LoopFactory, LoopProgress

T = TypeVar("T")
StepTime = Callable[[StepOutput], float]  # seconds


def inline(step_time: StepTime) -> LoopFactory:
    """What makes an InlineLoop whose steps take `step_time`."""
    return lambda engine, on_output, on_fatal, on_started: InlineLoop(
        engine, on_output, on_fatal, on_started, step_time
    )


class InlineLoop:
    """See the module, and StepLoop. Everything of it is used in one running event loop."""

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[StepOutput], None],
        on_fatal: Callable[[BaseException], None],
        on_started: OnStarted | None,
        step_time: StepTime,
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._on_fatal = on_fatal
        self._on_started = on_started
        self._step_time = step_time
        self._changed = asyncio.Event()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._runnable = False
        self._progress = LoopProgress(0, engine.clock.now(), busy=False)
        self._task: asyncio.Task[None] | None = None

    @property
    def progress(self) -> LoopProgress:
        """See StepLoop."""
        return self._progress

    def start(self) -> None:
        """See StepLoop."""
        self._task = asyncio.ensure_future(self._run())

    async def aclose(self) -> None:
        """See StepLoop."""
        self._stopping = True
        self._changed.set()
        if self._task is not None:
            await asyncio.wait((self._task,))
        self._end()

    def post(self, fn: Callable[[Engine], object]) -> None:
        """See StepLoop."""
        self._submit(Post(fn))

    async def call(self, fn: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """See StepLoop."""
        return await called(self._submit, fn, undo)

    def _submit(self, command: Command) -> None:
        if self._stopping:
            command.cancel()
        else:
            self._commands.append(command)
            self._changed.set()

    async def _run(self) -> None:
        try:
            while await self._wait():
                self._run_commands()
                await self._step()
        except Exception as error:  # noqa: BLE001 - nothing may end this loop unheard
            self._end()
            self._on_fatal(error)

    async def _wait(self) -> bool:
        """Return when there is something to do; False to stop."""
        while not (self._stopping or self._commands or self._runnable):
            self._note(busy=False)
            self._changed.clear()
            deadline_s = self._engine.next_deadline_s()
            if deadline_s is None:
                await self._changed.wait()
            elif deadline_s <= self._engine.clock.now():
                break
            else:
                await self._changed_or_passed(deadline_s - self._engine.clock.now())
        self._note(busy=True)
        return not self._stopping

    async def _changed_or_passed(self, left_s: float) -> None:
        waiting = (
            asyncio.ensure_future(self._changed.wait()),
            asyncio.ensure_future(self._engine.clock.sleep(left_s)),
        )
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    def _run_commands(self) -> None:
        commands, self._commands = self._commands, deque()
        while commands:
            try:
                commands.popleft().run(self._engine)
            except BaseException:
                self._commands.extendleft(reversed(commands))  # their callers are told with the others
                raise

    async def _step(self) -> None:
        if not self._engine.has_work:
            self._runnable = False
            return
        output = self._engine.step(self._on_started)
        await self._engine.clock.sleep(self._step_time(output))
        self._note(busy=True, num_steps=1)
        self._runnable = output.made_progress and self._engine.has_work
        if output.made_progress:
            self._on_output(output)
        if not self._engine.has_work:
            self._engine.check_integrity()

    def _note(self, *, busy: bool, num_steps: int = 0) -> None:
        self._progress = LoopProgress(self._progress.num_steps + num_steps, self._engine.clock.now(), busy)

    def _end(self) -> None:
        self._stopping = True
        commands, self._commands = self._commands, deque()
        self._note(busy=False)
        for command in commands:
            command.cancel()
