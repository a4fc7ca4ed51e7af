"""Which numbered calls of which sessions have been seen: each number counts once, in whatever order they come.

    session n: numbers 1, 2, 3 … ──▶ fresh within the newest WINDOW numbers, each once       older or seen: refused

The window is IPsec's (RFC 4303, 3.4.3): calls of one session overtake each other, but not by much. Sessions are numbered in
the order in which they begin; where too many live, the oldest are forgotten and, because the numbers grow, never believed
again. Does not know what proves a call.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WINDOW = 1024
MAX_SESSIONS = 16_384


@dataclass(slots=True)
class _Seen:
    """Of one session: the highest number, and which of those below it as bits, the highest one's first."""

    highest: int = 0
    bits: int = 0

    def take(self, number: int) -> bool:
        behind = self.highest - number
        if behind < 0:
            self.bits = ((self.bits << -behind) | 1) & ((1 << WINDOW) - 1) if -behind < WINDOW else 1
            self.highest = number
            return True
        if behind >= WINDOW or self.bits >> behind & 1:
            return False
        self.bits |= 1 << behind
        return True


class Replays:
    """The sessions of one process. Asked only about calls whose proof is right."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[int, _Seen] = OrderedDict()  # in the order of their last call
        self._forgotten = 0  # no session up to this one is believed

    def knows(self, session: int) -> bool:
        """Whether it may still be used; one that has not been used yet may."""
        return session > self._forgotten or session in self._sessions

    def take(self, session: int, number: int) -> bool:
        """Count this number of a session that is known; False when it was seen or is too old."""
        seen = self._sessions.setdefault(session, _Seen())
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._max_sessions:
            oldest, _ = self._sessions.popitem(last=False)
            self._forgotten = max(self._forgotten, oldest)
        return seen.take(number)
