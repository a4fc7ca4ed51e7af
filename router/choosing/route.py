"""The way of a request through the pools: which, why, what it was predicted to cost and what it did. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    """The way of a request through the pools."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


class Reason(StrEnum):
    """Why a request goes the way it does; drawn in `router.choosing.decision`."""

    REQUEST = "request"
    NO_PAIR = "no_pair"
    HANDOFFS_FAILED = "handoffs_failed"
    ALWAYS = "always"
    NEVER = "never"
    ABOVE = "above"
    BELOW = "below"
    CHEAPER = "cheaper"
    EXPLORE = "explore"


@dataclass(frozen=True, slots=True)
class Decision:
    """The way of one attempt, what each way was predicted to cost where both were there, and what it did cost once known.

    Costs are seconds of delay that the request causes, as `router.choosing.decision` has it. `regret_s` is by how much the way not
    taken was predicted to be cheaper than the taken one turned out, at least 0.
    """

    path: Route
    reason: Reason
    predicted_remote_s: float | None = None
    predicted_local_s: float | None = None
    measured_s: float | None = None

    @property
    def predicted_s(self) -> float | None:
        """Of the way that was taken."""
        return self.predicted_remote_s if self.path is Route.DISAGGREGATED else self.predicted_local_s

    @property
    def other_s(self) -> float | None:
        """What the way not taken was predicted to cost."""
        return self.predicted_local_s if self.path is Route.DISAGGREGATED else self.predicted_remote_s

    @property
    def regret_s(self) -> float | None:
        """None until it is measured, and where there was no other way."""
        if self.measured_s is None or self.other_s is None:
            return None
        return max(0.0, self.measured_s - self.other_s)
