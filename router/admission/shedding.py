"""Who is sent away from the queue, why, and when to come back.

    full          as many wait as may, in number or in tokens        wait      it would wait for longer than max_wait_s
    pushed_out    one with a better right to wait has come           deadline  … than half the time that its own answer leaves

To wait for what cannot be in time only keeps others waiting: refusing at once is what keeps goodput up under overload. Times
follow from how fast places were given back (`router.admission.service_rate`). Of one caller's requests that are sent away each gets
a later time than the one before, as if they stood in a line outside: else all would come back at once. Every caller has a line
of its own: one that does not heed it makes itself wait, and nobody else. Does not know the queue's order.
"""

from __future__ import annotations

from collections.abc import Callable

from contracts.clock import Clock
from contracts.errors import Overloaded
from router.admission.fair_queue import Waiting
from router.admission.service_rate import ServiceRate
from router.config import AdmissionConfig

_LEAST_RETRY_AFTER_S = 1.0
_KEPT = 1000  # lines outside, before those whose end has come are forgotten
_SPARE_FOR_WAITING = 0.5  # of the time that an answer leaves; a queue that uses up all of it makes everybody late


class Shedding:
    """The rules. `on_shed` hears of every refusal by its name above."""

    def __init__(
        self, config: AdmissionConfig, clock: Clock, rate: ServiceRate, on_shed: Callable[[str], None] | None
    ) -> None:
        self._config = config
        self._clock = clock
        self._rate = rate
        self._on_shed = on_shed
        self._promised: dict[str, float] = {}  # the instant that the last of a caller's who was sent away was told

    def check(self, turn: Waiting, places: int, tokens_ahead: float, deadline: float) -> None:
        """Raise Overloaded when it is hopeless for `turn` to wait behind so many tokens."""
        wait_s = self._rate.wait_s(tokens_ahead)
        service_s, left_s = self._rate.service_s(turn.cost, places), deadline - turn.since
        spare_s = max(0.0, left_s - service_s) * _SPARE_FOR_WAITING
        if wait_s > spare_s:
            words = f"about {wait_s:.1f} s of waiting before about {service_s:.1f} s for the answer"
            words += f" are too much for the {left_s:.1f} s that it has"
            raise self.overloaded("deadline", words, turn, wait_s - spare_s)
        limit_s = self._config.max_wait_s
        if limit_s is not None and wait_s > limit_s:
            words = f"it would wait for about {wait_s:.1f} s, and {limit_s:g} s is the limit"
            raise self.overloaded("wait", words, turn, wait_s - limit_s)

    def full(self, num_running: int, num_waiting: int, tokens_waiting: float, turn: Waiting) -> tuple[str, str] | None:
        """Why the queue has no room for `turn`: a reason's name and words; None when it has. One alone may always wait."""
        if num_waiting >= self._config.max_waiting:
            return "full", f"{num_running} answers are being made and {num_waiting} requests wait, which is the limit"
        limit = self._config.max_waiting_tokens
        if limit is not None and num_waiting and tokens_waiting + turn.cost > limit:
            return "full_tokens", f"requests for about {tokens_waiting:.0f} tokens wait, and {limit} is the limit"
        return None

    def overloaded(self, reason: str, words: str, turn: Waiting, after_s: float) -> Overloaded:
        """The refusal, with a time to come back that is not before `after_s`, nor when others of its caller were told to."""
        if self._on_shed is not None:
            self._on_shed(reason)
        return Overloaded(words, self.come_back_s(turn, after_s))

    def come_back_s(self, turn: Waiting, after_s: float) -> float:
        """When a request like `turn` may come again: not before `after_s`, and behind others of its caller."""
        now, longest_s = self._clock.now(), self._config.max_retry_after_s
        begin = max(now + after_s, self._promised.get(turn.caller, 0.0))
        self._promised[turn.caller] = min(begin + self._rate.wait_s(turn.cost), now + longest_s)
        if len(self._promised) > _KEPT:
            self._promised = {caller: instant for caller, instant in self._promised.items() if instant > now}
        return min(max(_LEAST_RETRY_AFTER_S, begin - now), longest_s)
