"""The shell of a worker process: event loop, signals, end with the parent, exit code.

    start ──▶ running ──SIGTERM/SIGINT──▶ stopping (drain, bounded) ──▶ exit 0
                 │                            └─ second signal ──▶ stop at once
                 └──fatal──▶ exit 1          ConfigError ──▶ one line on stderr, exit 2

Does not know what the process serves.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import NoReturn, Self, TypeVar, cast

import uvloop

from contracts.errors import ConfigError
from observability import lastwords
from observability.log import get_logger
from observability.private import LoggableError
from rpc.files import raise_file_limit

log = get_logger(__name__)
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_COLLECT_AFTER = (
    10_000,
    10,
    10,
)  # objects more, and collections of the generation before; Python's own is (700, 10, 10)


class FatalError(LoggableError):
    """The process cannot go on; `run_process` turns it into exit code 1."""


def run_process(main: Callable[[], Coroutine[None, None, None]]) -> int:
    """Run `main` on uvloop and return the exit code: 0, 1 after a fatal error, 2 for a ConfigError."""

    async def watched() -> None:
        lastwords.watch(asyncio.get_running_loop())
        await main()

    raise_file_limit()
    try:
        uvloop.run(watched())
    except ConfigError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    except FatalError as error:
        log.error("fatal", error.__cause__, reason=error)
        return 1
    except KeyboardInterrupt:  # a signal before the handlers stood
        return 130
    return 0


def settle_heap() -> None:
    """Leave what there is now out of every garbage collection to come; said once, when a process has started.

    Modules, a tokenizer, compiled schemas: a hundred thousand objects that live as long as the process. Looking through them
    stopped a router for 0.3 s, now and then, in the middle of its streams. What comes and goes with a request is looked through
    less often, too: little of it is garbage that only the collector finds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def abandon(code: int) -> NoReturn:
    """End this process now, its threads where they are: one of them computes and cannot be told to stop.

    An ordinary exit would unwind that thread under its C++ code, and the process would abort.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


class StopSignals:
    """SIGTERM and SIGINT as something to wait for. `async with` installs the handlers and takes them off again."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Install the handlers in the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the handlers off."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    async def wait(self) -> None:
        """Until the first signal."""
        await self._asked.wait()

    async def unless_asked(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None, and `work` cancelled, when a signal comes first."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            asked.cancel()

    @property
    def hurried(self) -> bool:
        """Whether a second signal came: everything shall end at once."""
        return self._hurried.is_set()

    async def bounded(self, work: Awaitable[None], limit_s: float, what: str) -> bool:
        """Await `work`, but no longer than `limit_s` nor past a second signal; whether it ended by itself."""
        task = asyncio.ensure_future(work)
        hurried = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait((task, hurried), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
        if task.done():
            task.result()
            return True
        log.warning("cut short", what=what, limit_s=limit_s, second_signal=self._hurried.is_set())
        task.cancel()
        await asyncio.wait((task,))
        return False

    def _on_signal(self, number: int) -> None:
        log.info("signal", name=signal.Signals(number).name, again=self._asked.is_set())
        if self._asked.is_set():
            self._hurried.set()
        self._asked.set()


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when `parent_pid`, which must be its parent, ends.

    Linux only (a no-op elsewhere, logged). If the parent is gone already, the signal is sent at once.
    """
    if not sys.platform.startswith("linux"):
        log.warning("this system cannot end a process with its parent")
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise ConfigError(f"cannot end with the parent process: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """The result of `work`, run in a thread that does not keep the process alive when nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return  # nobody waits any more
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast("T", value))

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - it is the caller's, who gets it whole
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
