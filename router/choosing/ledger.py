"""All that this router has given its workers and not got back, by worker, and what their streams lose to others' prompts.

    prompt(worker) ──▶ computed ──▶ stream(decode worker) ──▶ end       each step is a change that segments of `drag` end at

Does not know requests or what is decided.
"""

from __future__ import annotations

from contracts.worker import WorkerKind, WorkerRef
from router.choosing.backlog import Backlog, Run
from router.choosing.costs import PromptWork
from router.choosing.drag import Drag

_MAX_WORKERS = 256


class Ledger:
    """Owns a backlog per worker, and a drag per decode worker. Keys are the caller's, one per attempt."""

    def __init__(self) -> None:
        self._backlogs: dict[WorkerRef, Backlog] = {}
        self._drags: dict[WorkerRef, Drag] = {}
        self._busy: tuple[WorkerRef, ...] = ()  # prefill workers with prompts of ours

    def backlog(self, ref: WorkerRef) -> Backlog:
        """Of that worker."""
        if ref not in self._backlogs:
            if len(self._backlogs) >= _MAX_WORKERS:  # workers come and go
                self._backlogs = {known: backlog for known, backlog in self._backlogs.items() if not backlog.empty}
                self._drags = {known: drag for known, drag in self._drags.items() if known in self._backlogs}
            self._backlogs[ref] = Backlog()
        return self._backlogs[ref]

    @property
    def holding(self) -> tuple[WorkerRef, ...]:
        """Workers that have something of ours."""
        return tuple(ref for ref, backlog in self._backlogs.items() if not backlog.empty)

    def drag(self, decode: WorkerRef) -> Drag:
        """Of that decode worker."""
        self.backlog(decode)
        return self._drags.setdefault(decode, Drag())

    def prompt(self, place: tuple[WorkerRef, WorkerKind], key: int, work: tuple[PromptWork, float], now: float) -> None:
        """A prompt is on its way there; `work` is what there is to do, and for how long."""
        ref, kind = place
        self.backlog(ref).prompt(key, *work, now)
        if kind is WorkerKind.PREFILL and ref not in self._busy:
            self._busy = (*self._busy, ref)
        self._changed(now)

    def computed(self, ref: WorkerRef, key: int, now: float) -> Run | None:
        """Its first token came; see Backlog."""
        run = self.backlog(ref).computed(key, now)
        self._changed(now)
        return run

    def stream(self, ref: WorkerRef, key: int, now: float) -> Drag:
        """Its tokens come from there; add them to `num_tokens` of what this returns."""
        self.backlog(ref).stream(key, now)
        self._changed(now)
        return self.drag(ref)

    def end(self, refs: set[WorkerRef], key: int, now: float) -> None:
        """It is at none of these any more. Idempotent."""
        for ref in refs:
            self.backlog(ref).end(key, now)
        self._changed(now)

    def _changed(self, now: float) -> None:
        self._busy = tuple(ref for ref in self._busy if self._backlogs[ref].num_prompts)
        for ref, drag in self._drags.items():
            backlog = self._backlogs[ref]
            drag.change(now, backlog.num_streams, backlog.num_prompts > 0, self._busy)
