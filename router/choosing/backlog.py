"""What this router has given one worker and not got back: prompts, in their order, and streams; and what others gave it.

    prompt ──▶ computed ──▶ stream ──▶ end          a prompt's work counts until its first token; `end` takes it out anywhere

A worker's announcement is late, by seconds, and counts our own requests too. So what others have there is what it announced
above the most that we had in that time: seldom too much, and 0 with one router. Sums are kept, so that a step costs the same
with one prompt there and with a thousand. Does not know clocks or what work costs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from router.choosing.costs import PromptWork, Together

LATE_S = 2.5  # how old an announcement may be: longer than workers are apart with theirs


class Peak:
    """The greatest value of the last LATE_S seconds."""

    def __init__(self) -> None:
        self.value = 0
        self._before: deque[tuple[float, int]] = deque()  # (until when, value), values falling

    def change(self, value: int, now: float) -> None:
        """It is this from now on."""
        if value == self.value:
            return
        while self._before and self._before[-1][1] <= self.value:
            self._before.pop()
        self._before.append((now, self.value))
        self.value = value

    def at(self, now: float) -> int:
        """The peak as of `now`, which never goes back."""
        while self._before and self._before[0][0] < now - LATE_S:
            self._before.popleft()
        return max(self.value, self._before[0][1] if self._before else 0)


@dataclass(frozen=True, slots=True)
class Run:
    """Prompts that one worker computed one after the other without a pause since `since`: of one that has just made its
    first token the sum of those before it, empty when it was alone.
    """

    since: float
    before: Together


@dataclass(frozen=True, slots=True)
class _Prompt:
    work: PromptWork
    work_s: float


class Backlog:
    """One worker's. Keys are the caller's, one per attempt."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._work = Together()  # of all of them
        self._work_s = 0.0
        # The last that was sent, and its run. All others were followed by another of ours, which may have shared their steps.
        self._newest: tuple[int | None, Run | None] = (None, None)
        self._streams: set[int] = set()
        self.head_since = 0.0  # when the first of the prompts began, as far as ours were before it
        self._tokens = Peak()
        self._requests = Peak()

    @property
    def num_streams(self) -> int:
        """Requests whose tokens come from there."""
        return len(self._streams)

    @property
    def num_prompts(self) -> int:
        """Prompts whose first token has not come."""
        return len(self._prompts)

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        return not self._prompts and not self._streams

    def waiting_s(self, now: float) -> float:
        """Seconds until our prompts there should be computed, the part of the first that is done taken off."""
        if not self._prompts:
            return 0.0
        head_s = next(iter(self._prompts.values())).work_s
        return max(0.0, self._work_s - min(head_s, max(0.0, now - self.head_since)))

    def others(self, announced: tuple[int, int], now: float) -> tuple[int, int]:
        """Of the announced (tokens not computed, requests), how many are not ours."""
        tokens, requests = announced
        return max(0, tokens - self._tokens.at(now)), max(0, requests - self._requests.at(now))

    def prompt(self, key: int, work: PromptWork, work_s: float, now: float) -> None:
        """A prompt is on its way there, and should take `work_s`."""
        if not self._prompts:
            self.head_since = now
        self._newest = key, Run(self.head_since, self._work)
        self._prompts[key] = _Prompt(work, work_s)
        self._work = self._work.plus(work)
        self._work_s += work_s
        self._count(now)

    def computed(self, key: int, now: float) -> Run | None:
        """Its first token came. What that tells of durations; None where others of ours may have shared its steps."""
        run = self._take(key, now)
        self._count(now)
        return run

    def stream(self, key: int, now: float) -> None:
        """Its tokens come from there from now on."""
        self._streams.add(key)
        self._count(now)

    def end(self, key: int, now: float) -> None:
        """It is not there any more, wherever it was. Idempotent."""
        self._take(key, now)
        self._streams.discard(key)
        self._count(now)

    def _take(self, key: int, now: float) -> Run | None:
        if key not in self._prompts:
            return None
        if key == next(iter(self._prompts)):
            self.head_since = now
        prompt = self._prompts.pop(key)
        self._work = self._work.plus(prompt.work, -1)
        self._work_s = self._work_s - prompt.work_s if self._prompts else 0.0  # what rounding left goes with the last
        newest, run = self._newest
        return run if key == newest else None

    def _count(self, now: float) -> None:
        self._tokens.change(self._work.num_computed, now)
        self._requests.change(len(self._prompts) + len(self._streams), now)
