"""What prefill workers take from the streams of a decode worker: much where both share a machine's memory, nothing where not.

    change ──(streams and busy prefill workers stay as they are, tokens come)──▶ change: one segment is over
    quiet    no prompt of ours anywhere      ──▶ the gap between a stream's tokens, by how many streams there are
    dragged  prompts at one prefill worker   ──▶ that pair's drag: the share of time by which the gap is longer than a quiet one

A segment in which the decode worker itself reads a prompt, in which several prefill workers are busy, or which is too short
to count tokens in, tells nothing. Does not know clocks, requests or what is decided.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class _Segment:
    begun_at: float
    num_streams: int
    quiet: bool
    dragger: WorkerRef | None
    num_tokens: int


class Drag:
    """One decode worker's."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of streams from there, all together; whoever hears one adds it
        self._segment = _Segment(0.0, 0, quiet=False, dragger=None, num_tokens=0)
        self._gap = LinearCost(_PRIOR, _ANCHORS)
        self._shares: dict[WorkerRef, tuple[float, int]] = {}
        self._next_quiet_at = self._next_dragged_at = 0.0

    def share(self, prefill: WorkerRef) -> float:
        """Which share of streams' time is lost while that worker reads a prompt; 0 until known."""
        return max(0.0, self._shares.get(prefill, (0.0, 0))[0])

    def step_s(self, num_streams: int) -> float | None:
        """What a token takes each of so many streams when nobody disturbs them; None until known."""
        return self._gap.predict((1.0, num_streams / 100)) if self._gap.num_samples >= _MIN_QUIET else None

    def change(self, now: float, num_streams: int, reads: bool, busy: tuple[WorkerRef, ...]) -> None:
        """From now on it has so many streams, `reads` a prompt itself or not, and these prefill workers have prompts."""
        self._learn(now)
        quiet = not reads and not busy
        dragger = busy[0] if len(busy) == 1 and not reads else None
        self._segment = _Segment(now, num_streams, quiet, dragger, self.num_tokens)

    def _learn(self, now: float) -> None:
        over = self._segment
        num_tokens, took_s = self.num_tokens - over.num_tokens, now - over.begun_at
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
