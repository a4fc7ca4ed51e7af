"""How much memory is free, and how much a call needs while it runs. Does not know models or KV.

Free is the smaller of what the machine has and what the control group still allows; a container's limit is real.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
from filelock import FileLock

T = TypeVar("T")
_CGROUP = Path("/sys/fs/cgroup")
_SAMPLE_S = 0.002


def available_bytes() -> int:
    """Bytes that this process may still take."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(_CGROUP / limit_file), _number(_CGROUP / used_file)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


@contextmanager
def memory_turn() -> Iterator[None]:
    """One worker of this user on this machine at a time: measures what is free and takes it before the next one looks.

    Workers that start together would else each count the same memory as theirs. Ends with the process at the latest.
    """
    with FileLock(Path(tempfile.gettempdir()) / f"diptych-memory-{os.getuid()}.lock"):
        yield


def peak_bytes(call: Callable[[], T]) -> tuple[T, int]:
    """Run `call`; its result, and by how much the process's resident memory rose at most meanwhile (sampled every 2 ms)."""
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, name="peak-memory", daemon=True)
    watcher.start()
    try:
        result = call()
    finally:
        done.set()
        watcher.join()
    return result, max(0, max(peak, process.memory_info().rss) - before)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
