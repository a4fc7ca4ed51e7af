"""Log lines to a descriptor, without ever waiting for whoever reads it: a log that is not read must not stop a service.

    flowing ──the reader is stuck (a stopped terminal, a full pipe)──▶ holding, at most `max_held` lines ──▶ losing, counted
       ▲──────────────── it reads again: what was held, then how many lines were lost ─────────────────────┘

What is held goes out with the next line. Does not know what the lines say.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque

_CHUNK = select.PIPE_BUF  # bytes that a pipe takes whole and at once when it is writable at all


class LineHandler(logging.Handler):
    """Writes to `descriptor`, which stays the caller's. `logging` calls it from one thread at a time."""

    def __init__(self, descriptor: int, max_held: int = 1000, patience_s: float = 0.5) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_held = max_held
        self._patience_s = patience_s
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._held: deque[bytes] = deque()
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """logging's: one event."""
        line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        if len(self._held) >= self._max_held:
            self._push()
        if len(self._held) >= self._max_held:
            self._num_lost += 1
        else:
            self._held.extend(line[i : i + _CHUNK] for i in range(0, len(line), _CHUNK))
        self._push()

    def flush(self) -> None:
        """logging's: what goes out without waiting."""
        self.acquire()
        try:
            self._push()
        finally:
            self.release()

    def close(self) -> None:
        """logging's: the process ends. A reader that reads gets what is left, one that stands still is given `patience_s`."""
        self.acquire()
        try:
            self._push(self._patience_s)
        finally:
            self.release()
        super().close()

    def _push(self, patience_s: float = 0.0) -> None:
        try:
            while (self._held or self._num_lost) and self._poll.poll(patience_s * 1e3):
                if not self._held:
                    self._held.append(self._loss())
                    self._num_lost = 0
                os.write(self._descriptor, self._held[0])
                self._held.popleft()
        except OSError:  # the reader has gone for good: there is nobody to tell
            self._held.clear()
            self._num_lost = 0

    def _loss(self) -> bytes:
        said = f"{self._num_lost} lines of this log are lost: nobody read it"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, said, (), None)
        return self.format(record).encode() + b"\n"
