"""The last words of a process, a thread or a forgotten task: an event in the log like any other, with what may be said of it.

Python's own way writes the whole message of an error to stderr, where it may repeat what a user sent. Does not know why
anything ended.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from types import TracebackType
from typing import Any

from observability.log import get_logger

log = get_logger(__name__)
_WORDS = re.compile(r"[A-Za-z ,'-]*")  # asyncio's own; a callback, and what it was called with, come after them


def install() -> None:
    """For this process, from now on; once, by whoever starts it."""
    sys.excepthook = _on_crash
    threading.excepthook = _on_thread
    sys.unraisablehook = _on_unraisable


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """For the tasks and callbacks of `loop` whose error nobody takes."""
    loop.set_exception_handler(_on_loop)


def _on_crash(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    del kind, where
    log.error("this process crashed", error)


def _on_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else ""
    log.error("a thread died", args.exc_value, thread=name)


def _on_unraisable(args: sys.UnraisableHookArgs) -> None:
    log.error("an error that nobody could take", args.exc_value)


def _on_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    del loop
    error = context.get("exception")
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else ""
    said = _WORDS.match(str(context.get("message", "")))
    log.error("an error that nobody took", error, what=said[0].strip() if said else "", task=name)
