"""The last minutes of one router, a second at a time.

    a token ─gap─┐                                       ┌─▶ Frame      of this second
                 ├─▶ this second ──tick (once a second)──┤
    a request ───┘                                       └─▶ Snapshot   of all that is remembered

What comes between two ticks is only appended; everything is computed at the tick. Where the time of day is set back, all that is
remembered is dated anew, so that times rise. Does not know who watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dashboard.frames import Frame, Limits, Snapshot, Spread, Window, WorkerRow
from dashboard.percentiles import Sliding
from dashboard.requests import Boards, Finished, ms, to_ms
from dashboard.slo import SloConfig

SPAN_S = 300
LOOK_S = 10
GONE_FOR_S = 60.0
GONE = "gone"
_MOST_HEARD = 65_536  # deliveries, or requests, of one second that are looked at; all are counted
_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Instant:
    """When a tick is: on the router's clock, and in seconds of the Unix epoch."""

    now_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Title:
    """Whose history it is."""

    model: str
    version: str
    since_s: float  # of the Unix epoch


class History:
    """Of one router. Used on one event loop."""

    def __init__(self, title: Title, slo: SloConfig) -> None:
        self._title = title
        self._slo = slo
        self._limits = slo.limits
        self._gaps: deque[float] = deque(maxlen=_MOST_HEARD)
        self._finished: deque[Finished] = deque(maxlen=_MOST_HEARD)
        self._num_tokens = 0
        self._num_finished = 0
        self._ttft, self._itl = Sliding(LOOK_S), Sliding(LOOK_S)
        self._handoff = Sliding(LOOK_S)
        self._unexplained, self._second_unexplained = Sliding(LOOK_S), Sliding(LOOK_S)
        self._windows: deque[Window] = deque(maxlen=SPAN_S)
        self._boards = Boards(self._limits)
        self._last: Instant | None = None
        self.redated = False  # by the last tick: a frame is not enough then
        self._crew = Crew()

    def delivered(self, gap_s: float, num_tokens: int) -> None:
        """So many tokens of an answer came, `gap_s` after the ones before."""
        self._gaps.append(gap_s if num_tokens == 1 else gap_s / num_tokens)
        self._num_tokens += num_tokens

    def ended(self, finished: Finished) -> None:
        """One request is over."""
        self._finished.append(finished)
        self._num_finished += 1
        if finished.sample.ttft_s is not None:
            self._num_tokens += 1  # the first, before which there is no gap

    def tick(self, at: Instant, workers: Sequence[WorkerRow], running: int, waiting: int) -> Frame:
        """A second is over; once for each."""
        self._redate(at)
        finished, gaps = list(self._finished), list(self._gaps)
        self._finished.clear()
        self._gaps.clear()
        self._ttft.close([f.sample.ttft_s for f in finished if f.sample.ttft_s is not None])
        self._itl.close(gaps)
        self._handoff.close([s for f in finished if (s := f.handoff_s) is not None])
        succeeded = [f for f in finished if f.sample.succeeded]
        self._unexplained.close([abs(f.unexplained_s) for f in succeeded])
        self._second_unexplained.close([abs(f.gap_unexplained_s) for f in succeeded if f.sample.gap_s is not None])
        num_tokens, self._num_tokens = self._num_tokens, 0
        num_finished, self._num_finished = self._num_finished, 0
        window = Window(
            t=round(at.wall_s, 2),
            ttft=_spread(self._ttft),
            itl=_spread(self._itl),
            handoff=_spread(self._handoff),
            unexplained=_spread(self._unexplained),
            second_unexplained=_spread(self._second_unexplained),
            tokens=num_tokens,
            finished=num_finished,
            failed=sum(f.failed for f in finished),
            good=sum(not self._limits.missed(f.sample) for f in finished),
            excused=sum(f.sample.excused for f in finished),
            running=running,
            waiting=waiting,
        )
        self._windows.append(window)
        shown = self._boards.take(finished, at.wall_s - at.now_s)
        slow = self._boards.rank(shown, at.wall_s)
        return Frame(
            window=window,
            workers=self._crew.seen(workers, at.now_s),
            requests=shown,
            slowest=self._boards.slowest if slow else None,
            failed=self._boards.failed if any(f.failed for f in finished) else None,
        )

    def _redate(self, at: Instant) -> None:
        last, self._last = self._last, at
        self.redated = last is not None and at.wall_s <= last.wall_s
        if last is not None and self.redated:
            shift_s = at.wall_s - last.wall_s - (at.now_s - last.now_s)
            shifted = [msgspec.structs.replace(each, t=round(each.t + shift_s, 2)) for each in self._windows]
            self._windows = deque(shifted, maxlen=SPAN_S)
            self._boards.redate(shift_s)

    def snapshot(self) -> Snapshot:
        """All that is remembered, as of the last tick."""
        slo, title, boards = self._slo, self._title, self._boards
        return Snapshot(
            model=title.model,
            version=title.version,
            since=title.since_s,
            look_s=LOOK_S,
            limits=Limits(ms(slo.ttft_s), ms(slo.itl_s), ms(slo.e2e_s)),
            windows=tuple(self._windows),
            workers=self._crew.rows,
            requests=boards.recent,
            slowest=boards.slowest,
            failed=boards.failed,
        )


class Crew:
    """The workers, and for a while those that are no longer there."""

    def __init__(self) -> None:
        self.rows: tuple[WorkerRow, ...] = ()
        self._gone: dict[str, tuple[WorkerRow, float]] = {}

    def seen(self, workers: Sequence[WorkerRow], now_s: float) -> tuple[WorkerRow, ...]:
        """These are there; who was and is not has gone, and is shown for GONE_FOR_S more. In the order of pool and name."""
        there = {worker.id for worker in workers}
        for row in self.rows:
            if row.id not in there and row.state != GONE:
                self._gone[row.id] = msgspec.structs.replace(row, state=GONE, running=0, waiting=0, kv=0.0), now_s
        self._gone = {
            name: (row, since)
            for name, (row, since) in self._gone.items()
            if name not in there and now_s - since < GONE_FOR_S
        }
        rows = (*workers, *(row for row, _ in self._gone.values()))
        self.rows = tuple(sorted(rows, key=lambda row: (row.pool != "prefill", row.id)))
        return self.rows


def _spread(sliding: Sliding) -> Spread | None:
    found = sliding.at(_SHARES)
    return None if found is None else Spread(*(to_ms(value) for value in found))
