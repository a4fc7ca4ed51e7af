"""Waiting that always ends in a known state: for work that must be over before anything it touches may be reused.

asyncio's `wait_for` and plain `await` give up a task when the caller is cancelled. Here the task is asked to stop and then
awaited all the same, so that "it returned or raised" means "it is over". Time is a Clock's. Does not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from contracts.clock import Clock
from contracts.errors import DiptychError

T = TypeVar("T")


async def run_to_end(work: asyncio.Future[T], stop: Callable[[], object]) -> T:
    """The result of `work`; on cancellation `stop()` is called once, `work` is awaited, then CancelledError raised."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.done():
            stop()
            await until_done(work)
        raise


async def until_done(work: asyncio.Future[T]) -> None:
    """Return when `work` is over, whatever became of it; cancellations of the caller are held back until then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not work.cancelled():
        work.exception()  # seen: whoever cancelled us has lost interest in it
    if cancelled is not None:
        raise cancelled


def report(task: asyncio.Future[T], on_fatal: Callable[[BaseException], None]) -> None:
    """Let no background task fail unseen: a DiptychError is an answer to somebody, everything else is fatal."""

    def look(ended: asyncio.Future[T]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, DiptychError):
            on_fatal(error)

    task.add_done_callback(look)


async def within(clock: Clock, limit_s: float, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, or TimeoutError when `clock` has moved on by `limit_s`; in every case `work` is over."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(limit_s))
    try:
        await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        task.cancel()
        # Also if it ended in the same turn in which the caller was cancelled: then nobody hears of it.
        await until_done(task)
    if task.cancelled():
        raise TimeoutError(f"nothing within {limit_s:g} s")
    return task.result()
