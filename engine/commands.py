"""What an engine's loop is asked to do between two steps, and how the asker hears of it.

    call ──▶ Call ──run──▶ result, or what it raised, to the caller      post ──▶ Post ──run──▶ nobody waits
                 └─cancel─▶ Unavailable                                            └─cancel─▶ dropped

Does not know which loop runs it, nor in which thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from contracts.errors import Unavailable
from engine.engine import Engine

T = TypeVar("T")


class Command(Protocol):
    """One thing to do."""

    def run(self, engine: Engine) -> None:
        """Between two steps."""
        ...

    def cancel(self) -> None:
        """Instead of `run`, in any thread: the loop has ended."""
        ...


class Post:
    """A command that nobody waits for."""

    def __init__(self, fn: Callable[[Engine], object]) -> None:
        self._fn = fn

    def run(self, engine: Engine) -> None:
        """See Command."""
        self._fn(engine)

    def cancel(self) -> None:
        """Nothing to do: the engine is gone, and with it all that the command could have changed."""


class Call(Generic[T]):
    """A command whose caller waits in an event loop. Its result has exactly one owner: the caller, or `abandon`."""

    def __init__(
        self, fn: Callable[[Engine], T], abandon: Callable[[T], None], event_loop: asyncio.AbstractEventLoop
    ) -> None:
        self._fn = fn
        self._abandon = abandon
        self._event_loop = event_loop
        self._future: asyncio.Future[T] = event_loop.create_future()

    async def result(self) -> T:
        """Wait for it; what `fn` raised is raised here."""
        try:
            return await self._future
        except asyncio.CancelledError:
            # The result may have arrived while the caller was cancelled before its next turn.
            if not self._future.cancelled() and self._future.exception() is None:
                self._abandon(self._future.result())
            raise

    def run(self, engine: Engine) -> None:
        """See Command."""
        if self._future.cancelled():
            return
        try:
            result = self._fn(engine)
        except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it whole
            self._event_loop.call_soon_threadsafe(self._fail, error)
        else:
            self._event_loop.call_soon_threadsafe(self._deliver, result)

    def cancel(self) -> None:
        """See Command."""
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


async def called(
    submit: Callable[[Command], None], fn: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None
) -> T:
    """The result of `fn`, submitted as a Call; if its caller was cancelled after it ran, `undo` is submitted with it."""

    def abandon(result: T) -> None:
        if undo is not None:
            submit(Post(lambda engine: undo(engine, result)))

    call = Call(fn, abandon, asyncio.get_running_loop())
    submit(call)
    return await call.result()
