"""What prefill workers take from the streams of a decode worker: much where both share a machine's memory, nothing where not.

    change ──(streams and busy prefill workers stay as they are, tokens come)──▶ change: one segment is over
    quiet    no prompt of ours anywhere      ──▶ the gap between a stream's tokens, by how many streams there are
    dragged  prompts at one prefill worker   ──▶ that pair's drag: the share of time by which the gap is longer than a quiet one
    lost_s   of any time that is not long ago: how long the streams ran, less what their tokens take when it is quiet

A segment in which the decode worker itself reads a prompt, in which several prefill workers are busy, or which is too short
to count tokens in, tells nothing. Does not know clocks, requests or what is decided.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from contracts.worker import WorkerRef
from router.choosing.costs import LinearCost

_MIN_STEPS = 4  # tokens of each stream in a segment
_MIN_QUIET = 3  # samples before a quiet gap is believed
_EVERY_S = 0.25  # between two samples of one kind
_WINDOW = 16
_MOST = 0.9
_PRIOR = (0.02, 0.1)  # one stream's gap, and a hundred streams' more
_ANCHORS = ((1.0, 0.01), (1.0, 0.32))
_MAX_PAIRS = 1024
_MARKS = 1024  # as far as one can look back: 5 s where tokens come all the time, 20 s where one takes 20 ms
_APART_S = 5e-3  # tokens of one step come together


@dataclass(slots=True)
class _Segment:
    begun_at: float
    num_streams: int
    quiet: bool
    dragger: WorkerRef | None
    num_tokens: int


@dataclass(slots=True)
class _Mark:
    """An instant at which tokens came: how many had come by then, and how long streams had run, all together."""

    at: float
    num_tokens: int
    stream_s: float


class Drag:
    """One decode worker's."""

    def __init__(self) -> None:
        self._num_tokens = 0  # of streams from there, all together
        self._stream_s = 0.0  # how long they ran before the segment
        self._marks: deque[_Mark] = deque(maxlen=_MARKS)
        self._segment = _Segment(0.0, 0, quiet=False, dragger=None, num_tokens=0)
        self._gap = LinearCost(_PRIOR, _ANCHORS)
        self._shares: dict[WorkerRef, tuple[float, int]] = {}
        self._next_quiet_at = self._next_dragged_at = 0.0

    def share(self, prefill: WorkerRef) -> float:
        """Which share of streams' time is lost while that worker reads a prompt; 0 until known."""
        return max(0.0, self._shares.get(prefill, (0.0, 0))[0])

    def step_s(self, num_streams: float) -> float | None:
        """What a token takes each of so many streams when nobody disturbs them; None until known."""
        return self._gap.predict((1.0, num_streams / 100)) if self._gap.num_samples >= _MIN_QUIET else None

    def heard(self, num_tokens: int, now: float) -> None:
        """One of the streams got so many tokens."""
        self._num_tokens += num_tokens
        last = self._marks[-1] if self._marks else None
        if last is None or now - last.at > _APART_S:
            self._marks.append(_Mark(now, self._num_tokens, self._ran_s(now)))
        else:
            last.num_tokens = self._num_tokens

    def lost_s(self, since: float, until: float) -> float | None:
        """Seconds that our streams lost together between these instants, to whatever kept them waiting; from the last token
        before to the first after. None where that is too long ago, where no stream had a token before, or where it is not
        known what a token takes in quiet.
        """
        end = _Mark(until, self._num_tokens, self._ran_s(until))
        begin: _Mark | None = None
        for mark in reversed(self._marks):
            if mark.at >= until - _APART_S:
                end = mark
            else:
                begin = mark
            if mark.at <= since:
                break
        else:
            if len(self._marks) == _MARKS:
                return None
        if begin is None:
            return None
        if begin.at >= end.at or end.stream_s <= begin.stream_s:
            return 0.0  # nobody was there to lose anything
        ran_s = end.stream_s - begin.stream_s
        gap_s = self.step_s(ran_s / (end.at - begin.at))
        return None if gap_s is None else min(ran_s, max(0.0, ran_s - (end.num_tokens - begin.num_tokens) * gap_s))

    def _ran_s(self, now: float) -> float:
        return self._stream_s + self._segment.num_streams * max(0.0, now - self._segment.begun_at)

    def change(self, now: float, num_streams: int, reads: bool, busy: tuple[WorkerRef, ...]) -> None:
        """From now on it has so many streams, `reads` a prompt itself or not, and these prefill workers have prompts."""
        self._learn(now)
        quiet = not reads and not busy
        dragger = busy[0] if len(busy) == 1 and not reads else None
        self._stream_s = self._ran_s(now)
        self._segment = _Segment(now, num_streams, quiet, dragger, self._num_tokens)

    def _learn(self, now: float) -> None:
        over = self._segment
        num_tokens, took_s = self._num_tokens - over.num_tokens, now - over.begun_at
        if over.num_streams == 0 or num_tokens < _MIN_STEPS * over.num_streams or took_s <= 0:
            return
        gap_s = took_s * over.num_streams / num_tokens
        if over.quiet and now >= self._next_quiet_at:
            self._next_quiet_at = now + _EVERY_S
            self._gap.observe((1.0, over.num_streams / 100), gap_s)
            self._gap.refit()
        elif over.dragger is not None and now >= self._next_dragged_at:
            quiet_s = self.step_s(over.num_streams)
            if quiet_s is not None:
                self._next_dragged_at = now + _EVERY_S
                self._note(over.dragger, min(_MOST, max(-_MOST, 1 - quiet_s / gap_s)))

    def _note(self, dragger: WorkerRef, share: float) -> None:
        known, num_samples = self._shares.pop(dragger, (0.0, 0))  # the newest goes to the end
        known += (share - known) / min(num_samples + 2, _WINDOW)  # that there is no drag counts as one sample
        self._shares[dragger] = known, num_samples + 1
        while len(self._shares) > _MAX_PAIRS:
            del self._shares[next(iter(self._shares))]
