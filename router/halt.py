"""The word that ends every running request: the router goes down and waits no longer.

    running ──now()──▶ halted: who listens hears the reason at once, who asks later gets it raised

Does not know requests; they listen while they wait for something.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from contracts.errors import Unavailable


class Halted(Unavailable):
    """This router stops before the answer is whole. Another attempt here cannot help."""

    retryable = False


class Halt:
    """One per router. Used from one event loop."""

    def __init__(self) -> None:
        self._reason: Halted | None = None
        self._numbers = itertools.count()
        self._listeners: dict[int, Callable[[Halted], None]] = {}

    def now(self) -> None:
        """End what runs. Idempotent."""
        if self._reason is None:
            self._reason = Halted("this router stopped before the answer was whole")
            for hear in list(self._listeners.values()):
                hear(self._reason)

    def check(self) -> None:
        """Raise Halted once it was said."""
        if self._reason is not None:
            raise self._reason

    def listen(self, hear: Callable[[Halted], None]) -> Callable[[], None]:
        """Call `hear` when it is said, at once if it was; the result, called, ends that and is idempotent."""
        number = next(self._numbers)
        self._listeners[number] = hear
        if self._reason is not None:
            hear(self._reason)

        def end() -> None:
            self._listeners.pop(number, None)

        return end
