"""How fast the router's places are served, as past requests tell: how long others that wait, and one's own answer, will take.

A request holds its places for a time; places * seconds over tokens, of requests that have ended, is what a token costs. By
Little's law a queue of T tokens before `places` places moves in T * cost / places, whether the workers are faster than the
places or slower: where they are slower, places are held longer. Tokens are those that were estimated when a request came, so
that estimates that are wrong in the same way for all cancel out. Pure; knows no requests.
"""

from __future__ import annotations

_KEPT = 0.95  # of what was known, at each request that ends: about the last twenty count
_LEAST_SAMPLES = 4


class ServiceRate:
    """What a token costs in place seconds."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._place_s = 0.0
        self._tokens = 0.0
        self._samples = 0

    def note(self, tokens: float, place_s: float) -> None:
        """A request of so many estimated tokens has held places for `place_s` (places * seconds) altogether."""
        self._tokens = self._tokens * _KEPT + tokens
        self._place_s = self._place_s * _KEPT + place_s
        self._samples += 1

    @property
    def known(self) -> bool:
        """Whether enough requests have ended to tell anything; until then all times are 0."""
        return self._samples >= _LEAST_SAMPLES and self._tokens > 0

    def wait_s(self, tokens: float) -> float:
        """How long a full router needs to begin so much work."""
        return self.service_s(tokens, self._places)

    def service_s(self, tokens: float, places: int) -> float:
        """How long one request of so many tokens holds its places."""
        return tokens * self._place_s / self._tokens / places if self.known else 0.0
