"""CPU cores by number: how they are written, and that a process keeps to them.

    parse_cores("0,2-3") == (0, 2, 3)        parse_groups("0/1") == ((0,), (1,)): one group a worker
    keep_to(flag, cores)                     this process, with all its threads

Does not know workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from contracts.errors import ConfigError

Cores = tuple[int, ...]
CoreChoice = Cores | Literal["auto"]
MOST_CORES = 4096


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def usable_in_order() -> Cores:
    """Their numbers."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else tuple(range(usable_cores()))


def parse_cores(flag: str, text: str) -> Cores:
    """The cores of a list with commas and ranges, in order. Raises ConfigError naming `flag` and what is wrong."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{flag}: {text!r} must be cores by number, such as 0,2-3")
        low, high = int(first), int(last or first)
        if not low <= high < MOST_CORES:
            raise ConfigError(f"{flag}: {part.strip()!r} must rise, and be below {MOST_CORES}")
        found += range(low, high + 1)
    if len(set(found)) < len(found):
        raise ConfigError(f"{flag}: {text!r} names a core twice")
    return tuple(sorted(found))


def parse_groups(flag: str, text: str) -> tuple[Cores, ...]:
    """The cores of each worker, with slashes between workers; no core has two of them. Raises ConfigError."""
    groups = tuple(parse_cores(flag, part) for part in text.split("/"))
    if len({core for group in groups for core in group}) < sum(len(group) for group in groups):
        raise ConfigError(f"{flag}: {text!r} gives a core to two workers")
    return groups


def written(cores: Cores) -> str:
    """As `parse_cores` reads it."""
    return ",".join(str(core) for core in cores)


def check_usable(flag: str, cores: Sequence[int]) -> None:
    """Raises ConfigError for a core that this process may not use, or where none can be kept to."""
    if sys.platform != "linux":
        raise ConfigError(f"{flag}: processes keep to cores on Linux only")
    usable = os.sched_getaffinity(0)
    foreign = sorted(set(cores) - usable)
    if foreign:
        raise ConfigError(
            f"{flag}: core {foreign[0]} is not one that may be used here; those are {written(tuple(sorted(usable)))}"
        )


def keep_to(flag: str, cores: Cores) -> None:
    """Let this process run on `cores` only: this thread and what it starts from now on, and those that imports have started.

    Raises ConfigError.
    """
    check_usable(flag, cores)
    os.sched_setaffinity(0, cores)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
