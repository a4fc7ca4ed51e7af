"""What strangers cause is said once a second at most, and how often it happened: else whoever reaches a port fills the log.

    happened ──▶ due: said, with how many were not      within a second of that: counted

Does not know what happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Seldom:
    """For one kind of event. May be asked from any thread."""

    def __init__(self, every_s: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now = now
        self._lock = threading.Lock()
        self._quiet_until = float("-inf")
        self._num_quiet = 0

    def due(self) -> int | None:
        """It happened. None: say nothing. Else say it, and that it happened so many times more since it was said last."""
        with self._lock:
            now = self._now()
            if now < self._quiet_until:
                self._num_quiet += 1
                return None
            more, self._num_quiet = self._num_quiet, 0
            self._quiet_until = now + self._every_s
            return more
