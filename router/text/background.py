"""Threads for work that is long and gives the interpreter lock up: they come after the event loop wherever both want a core.

    loop ── run(work) ──▶ one of `num_threads` threads, of low priority ──▶ result          more work waits, first come first served

A prompt of 32,000 tokens takes its thread about 50 ms. asyncio's own threads are as many as 32 and equals of the loop's: a few
long prompts at once then leave it a part of its core, and every stream waits with it. Here one core is left to the loop where
there are two, and where there is one the scheduler prefers it. Does not know what is worked at.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_MAX_THREADS = 4
_NICE = 10  # a tenth of the loop's share, where they compete
_NAME = "background"
_PAUSE_S = 50e-6  # long enough for another thread to wake up and take the interpreter


class Background:
    """Owns its threads, which are made when they are needed and end with the process."""

    def __init__(self, num_threads: int | None = None) -> None:
        """None takes one thread less than there are cores, at least one and not many."""
        self.num_threads = num_threads if num_threads is not None else min(_MAX_THREADS, max(1, _num_cores() - 1))
        self._threads = ThreadPoolExecutor(self.num_threads, _NAME, initializer=_give_way)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in a thread. Cancelled before its turn, it is not begun."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def give_way() -> None:
    """In a thread of these: let the loop have the interpreter lock now, for which it would wait 5 ms whenever it wakes up.

    For work in Python, about each millisecond. Anywhere else it does nothing, so that one function may serve both.
    """
    if threading.current_thread().name.startswith(_NAME):
        time.sleep(_PAUSE_S)


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _give_way() -> None:
    """Linux has priorities per thread; elsewhere they are the process's, and stay as they are."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
