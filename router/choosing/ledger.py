"""All that this router has given its workers and not got back, by worker, and what their streams lose to others' prompts.

    prompt(worker) ──▶ computed ──▶ stream(decode worker) ──▶ end       each step is a change that segments of `drag` end at
    gone(worker) ──▶ forgotten, with all that was learnt of it, once nothing of ours is there any more

A step costs the same however many workers there are, unless a prefill worker gets its first prompt or gives back its last:
that concerns every decode worker. Does not know requests or what is decided.
"""

from __future__ import annotations

from contracts.worker import WorkerKind, WorkerRef
from router.choosing.backlog import Backlog, Run
from router.choosing.costs import PromptWork
from router.choosing.drag import Drag


class Ledger:
    """Owns a backlog per worker, and a drag per decode worker. Keys are the caller's, one per attempt."""

    def __init__(self) -> None:
        self._backlogs: dict[WorkerRef, Backlog] = {}
        self._drags: dict[WorkerRef, Drag] = {}
        self._busy: tuple[WorkerRef, ...] = ()  # prefill workers with prompts of ours
        self._going: set[WorkerRef] = set()

    def backlog(self, ref: WorkerRef) -> Backlog:
        """Of that worker, which takes requests now."""
        self._going.discard(ref)
        backlog = self._backlogs.get(ref)
        if backlog is None:
            backlog = self._backlogs[ref] = Backlog()
        return backlog

    @property
    def holding(self) -> tuple[WorkerRef, ...]:
        """Workers that have something of ours."""
        return tuple(ref for ref, backlog in self._backlogs.items() if not backlog.empty)

    @property
    def known(self) -> tuple[WorkerRef, ...]:
        """Workers of which it has anything, be it only what was learnt."""
        return tuple(self._backlogs)

    def drag(self, decode: WorkerRef) -> Drag:
        """Of that decode worker, which takes requests now."""
        self.backlog(decode)
        return self._drag(decode)

    def prompt(self, place: tuple[WorkerRef, WorkerKind], key: int, work: tuple[PromptWork, float], now: float) -> None:
        """A prompt is on its way there; `work` is what there is to do, and for how long."""
        ref, kind = place
        self.backlog(ref).prompt(key, *work, now)
        if kind is WorkerKind.PREFILL and ref not in self._busy:
            self._busy_now((*self._busy, ref), now)
        self._changed(ref, now)

    def begun_s(self, ref: WorkerRef) -> float:
        """The instant at which that worker began with the first of our prompts there; long ago where it has none of them."""
        backlog = self._backlogs.get(ref)
        return 0.0 if backlog is None else backlog.head_since

    def computed(self, ref: WorkerRef, key: int, now: float) -> Run | None:
        """Its first token came; see Backlog."""
        backlog = self._backlogs.get(ref)
        if backlog is None:
            return None
        run = backlog.computed(key, now)
        self._given_back(ref, backlog, now)
        return run

    def stream(self, ref: WorkerRef, key: int, now: float) -> Drag:
        """Its tokens come from there; what this returns is to hear of them."""
        if (
            ref not in self._backlogs
        ):  # nobody has chosen it since it was forgotten: it is not kept for longer than the stream
            self.backlog(ref)
            self._going.add(ref)
        self._backlogs[ref].stream(key, now)
        drag = self._drag(ref)
        self._changed(ref, now)
        return drag

    def end(self, ref: WorkerRef, key: int, now: float) -> None:
        """It is not there any more. Idempotent."""
        backlog = self._backlogs.get(ref)
        if backlog is None:
            return
        backlog.end(key, now)
        self._given_back(ref, backlog, now)
        if ref in self._going:
            self.gone(ref)

    def gone(self, ref: WorkerRef) -> None:
        """Nothing new is sent to this life of a worker. Idempotent."""
        backlog = self._backlogs.get(ref)
        if backlog is not None and not backlog.empty:
            self._going.add(ref)
            return
        self._going.discard(ref)
        self._backlogs.pop(ref, None)
        self._drags.pop(ref, None)

    def _drag(self, decode: WorkerRef) -> Drag:
        drag = self._drags.get(decode)
        if drag is None:
            drag = self._drags[decode] = Drag()
        return drag

    def _given_back(self, ref: WorkerRef, backlog: Backlog, now: float) -> None:
        if ref in self._busy and not backlog.num_prompts:
            self._busy_now(tuple(busy for busy in self._busy if busy != ref), now)
        self._changed(ref, now)

    def _busy_now(self, busy: tuple[WorkerRef, ...], now: float) -> None:
        self._busy = busy
        for ref in self._drags:
            self._changed(ref, now)

    def _changed(self, ref: WorkerRef, now: float) -> None:
        drag = self._drags.get(ref)
        if drag is not None:
            backlog = self._backlogs[ref]
            drag.change(now, backlog.num_streams, backlog.num_prompts > 0, self._busy)
