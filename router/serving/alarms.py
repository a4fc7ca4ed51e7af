"""What ends one attempt from outside: timers and the router's halt, heard in the attempt's own inbox. Does not know attempts."""

from __future__ import annotations

from collections.abc import Callable

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError
from router.halt import Halt
from router.serving.inbox import Inbox, TimeUp


class Alarms:
    """What ends one attempt from outside and rings in its inbox: timers, and the router's halt. `cancel` silences all.

    Two are set for every request, so they are timers of the loop and no tasks.
    """

    def __init__(self, clock: Clock, inbox: Inbox, halt: Halt) -> None:
        self._clock = clock
        self._inbox = inbox
        self._silence: list[Callable[[], object]] = [halt.listen(lambda reason: inbox.put_nowait(TimeUp(reason)))]

    def set(self, delay_s: float, error: DiptychError | None) -> Callable[[], object]:
        """Put TimeUp(error) into the inbox after `delay_s`; what silences this one timer comes back."""
        return self._later(delay_s, lambda: self._inbox.put_nowait(TimeUp(error)))

    def deadline(self, delay_s: float) -> None:
        """After `delay_s` the request's time is over."""
        self._later(delay_s, lambda: self._inbox.put_nowait(TimeUp(out_of_time())))

    def cancel(self) -> None:
        """None of them rings any more."""
        for silence in self._silence:
            silence()
        self._silence.clear()

    def _later(self, delay_s: float, ring: Callable[[], object]) -> Callable[[], object]:
        silence = self._clock.call_later(delay_s, ring)
        self._silence.append(silence)
        return silence


def out_of_time() -> DeadlineExceeded:
    """The error of a request whose deadline has come."""
    return DeadlineExceeded("the request's time ran out")
