"""What happened to one answer and when, on the router's clock, for who draws it as spans; kept only where somebody does.

    told(attempt) ──▶ its deltas, unchanged
       └─ an Attempt: begun ── first token ── committed ── ended, by which error

Does not know spans.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contracts.clock import Clock
from contracts.errors import DiptychError, Draining
from contracts.request import TokenDelta
from contracts.worker import WorkerKind, WorkerRef
from observability.stages import HandoffStats, StageTimes
from router.choosing.route import Route

if TYPE_CHECKING:
    from router.serving.progress import Progress

DRAINING = "DRAINING"


@dataclass(slots=True)
class Attempt:
    """One way through the pools; instants of the router's clock. `stages` are what it has added to the request's.

    `error` is the code of what ended it, `DRAINING` where a worker gave it up, empty for none.
    """

    begun: float
    first: float | None = None
    committed: float | None = None
    ended: float | None = None
    finished: bool = False
    error: str = ""
    num_tokens: int = 0
    num_handoff_failures: int = 0
    route: Route = Route.COLOCATED
    at: dict[WorkerKind, WorkerRef] = field(default_factory=dict)
    before: StageTimes = field(default_factory=StageTimes)
    after: StageTimes = field(default_factory=StageTimes)
    handoff: HandoffStats | None = None


class Story:
    """Of one answer."""

    def __init__(self, clock: Clock) -> None:
        self.attempts: list[Attempt] = []
        self._clock = clock

    async def told(
        self, deltas: AsyncGenerator[TokenDelta, None], progress: Progress
    ) -> AsyncGenerator[TokenDelta, None]:
        """These deltas, as they come; closes them."""
        attempt = Attempt(self._clock.now(), before=progress.stages)
        self.attempts.append(attempt)
        handoff, num_failures = progress.handoff, progress.num_handoff_failures
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    self._heard(attempt, delta)
                    yield delta
        except DiptychError as error:
            attempt.error = DRAINING if isinstance(error, Draining) else error.code.value
            raise
        finally:
            if attempt.ended is None:
                attempt.ended = self._clock.now()
            attempt.route, attempt.at, attempt.after = progress.route, dict(progress.at), progress.stages
            attempt.num_handoff_failures = progress.num_handoff_failures - num_failures
            if progress.handoff is not handoff:
                attempt.handoff = progress.handoff

    def committed(self) -> None:
        """The hand-off of the attempt that runs is, as the router hears."""
        attempt = self.attempts[-1]
        if attempt.committed is None:
            attempt.committed = self._clock.now()

    def _heard(self, attempt: Attempt, delta: TokenDelta) -> None:
        now = self._clock.now()
        if delta.error is not None:
            attempt.error = DRAINING if delta.error.draining else delta.error.code.value
        elif attempt.first is None:
            attempt.first = now
        attempt.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            attempt.ended, attempt.finished = now, delta.error is None
