"""What the dashboard is fed with: one sample per finished request, one of the workers per second.

    Inference ──Finished──▶ History ──each second──▶ Frame ──▶ Feed ──▶ watchers
    every token ──gap──────────┘   ▲
    registry, admission ───────────┘ asked each second

Does not know HTTP.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable

from msgspec.structs import replace

from contracts.clock import Clock
from contracts.worker import WorkerKind, WorkerState
from dashboard.feed import Feed, Watcher
from dashboard.frames import WorkerRow, event
from dashboard.history import History, Instant, Title
from dashboard.slo import SloConfig
from router.workers.registry import Registry, Worker

_TICK_S = 1.0


class Board:
    """Owns the history and its watchers. Used on the event loop."""

    def __init__(
        self,
        model: str,
        slo: SloConfig,
        registry: Registry,
        requests: Callable[[], tuple[int, int]],
        clock: Clock,
    ) -> None:
        """`registry` and `requests` (running, waiting at the router) are asked each second."""
        self.history = History(Title(model, importlib.metadata.version("diptych"), time.time()), slo)
        self._registry = registry
        self._requests = requests
        self._clock = clock
        self._feed = Feed()
        self.troubles: Callable[[], tuple[str, ...]] = tuple  # asked each second: what is left out of serving, in words
        self._said: tuple[str, ...] = ()
        self._known: bytes | None = None  # the snapshot of this second, once somebody has come

    def watch(self) -> Watcher:
        """Everything from now on, after what is known. Raises Overloaded when too many watch."""
        return self._feed.watch(self._snapshot)

    def _snapshot(self) -> bytes:
        """Encoded once a second at most, however many come."""
        if self._known is None:
            self._known = event(replace(self.history.snapshot(), troubles=self._said))
        return self._known

    def leave(self, watcher: Watcher) -> None:
        """It reads no more. Idempotent."""
        self._feed.leave(watcher)

    def close(self) -> None:
        """All streams end. Idempotent."""
        self._feed.close()

    async def run(self) -> None:
        """One tick a second, until cancelled. Seconds that the process was stopped in are not made up for."""
        due = self._clock.now() + _TICK_S
        while True:
            await self._clock.sleep(due - self._clock.now())
            self.tick()
            due = max(due + _TICK_S, self._clock.now())

    def tick(self) -> None:
        """A second is over."""
        now = self._clock.now()
        running, waiting = self._requests()
        rows = worker_rows(self._registry)
        frame = self.history.tick(Instant(now, time.time()), rows, running, waiting)
        self._known, self._said = None, self.troubles()
        if self._feed.watched:
            self._feed.publish(self._snapshot() if self.history.redated else event(replace(frame, troubles=self._said)))


def worker_rows(registry: Registry) -> list[WorkerRow]:
    """Each worker as it was last heard."""
    offered = {worker.info.ref for kind in WorkerKind for worker in registry.ready(kind)}
    return [_row(worker, offered=worker.info.ref in offered) for worker in registry.workers()]


def _row(worker: Worker, *, offered: bool) -> WorkerRow:
    info, load = worker.info, worker.load
    state = load.state.value
    if worker.suspect:
        state = "suspect"
    elif load.state is WorkerState.READY and not offered:
        state = "silent"
    return WorkerRow(
        id=info.ref.worker_id,
        pool=info.kind.value,
        state=state,
        epoch=info.ref.epoch,
        address=info.address,
        running=load.num_running,
        waiting=load.num_waiting,
        queued_tokens=load.num_queued_tokens,
        slots=info.max_num_seqs,
        kv=round(load.kv_usage, 4),
        blocks=info.num_blocks,
        connectors=info.connectors,
        step_ms=round(load.decode_step_s * 1e3, 2),
        prefill_tokens_per_s=round(load.prefill_tokens_per_s, 1),
    )
