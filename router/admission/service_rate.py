"""How fast the router's places are served, as past requests tell: how long others that wait, and one's own answer, will take.

A request holds its places for a time; places * seconds over the tokens that came of it is what a token costs. By Little's law
a queue of T tokens before `places` places moves in T * cost / places, whether the workers are faster than the places or slower:
where they are slower, places are held longer. What a request says that it will take is not what it takes; the share that those
took which came to their end corrects it. One that was cut off counts with what it had made by then: to believe that it had
been served so quickly would let more in, of which still more would be cut off. Pure; knows no requests.
"""

from __future__ import annotations

_LEAST_KEPT = 8  # requests that count, or as many as there are places
_LEAST_SAMPLES = 4


class ServiceRate:
    """What a token costs in place seconds, and how many tokens come of one that was said."""

    def __init__(self, places: int) -> None:
        self.resize(places)
        self._place_s = 0.0
        self._tokens = 0.0
        self._said = 0.0
        self._taken = 0.0
        self._samples = 0

    def resize(self, places: int) -> None:
        """There are so many places from now on."""
        self._places = places
        self._kept = 1 - 1 / max(_LEAST_KEPT, places)

    def ended(self, tokens: float, place_s: float, said: float | None) -> None:
        """A request has held places for `place_s` (places * seconds), and `tokens` came of it. `said` is what it had said that
        it would take, None when it was cut off before its end.
        """
        self._tokens = self._tokens * self._kept + tokens
        self._place_s = self._place_s * self._kept + place_s
        if said is not None:
            self._said = self._said * self._kept + said
            self._taken = self._taken * self._kept + tokens
            self._samples += 1

    @property
    def known(self) -> bool:
        """Whether enough requests have ended to tell anything; until then all times are 0."""
        return self._samples >= _LEAST_SAMPLES and self._tokens > 0 and self._said > 0

    def wait_s(self, said: float) -> float:
        """How long a full router needs to begin so much work."""
        return self.service_s(said, self._places)

    def service_s(self, said: float, places: int) -> float:
        """How long one request that says so many tokens holds its places."""
        if not self.known:
            return 0.0
        return said * (self._taken / self._said) * (self._place_s / self._tokens) / places
