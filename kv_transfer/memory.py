"""What the decode side remembers beyond one hand-off: the newest life of each prefill worker, and how hand-offs ended.

Both are bounded, oldest first out: forgetting costs at most a less precise answer to a very late message, or room that is held
for one lease, never safety: windows are closed by then, and a ticket redeems no grant but its own. Does not know what is done
about a stale life.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from contracts.errors import DiptychError, HandoffError, StaleEpoch
from contracts.worker import WorkerRef

T = TypeVar("T")


def said_again(error: DiptychError) -> DiptychError:
    """The same error once more, to be raised: a remembered one must not gather the frames of everyone who hears it."""
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return copy


class Lives:
    """Which lives (epochs) are current: ours, and the newest seen of every prefill worker."""

    def __init__(self, ours: WorkerRef, max_peers: int) -> None:
        self._ours = ours
        self._newest: Bounded[int] = Bounded(max_peers)

    def check(self, prefill: WorkerRef, decode: WorkerRef) -> bool:
        """Whether `prefill` shows a newer life than known; StaleEpoch or HandoffError when either ref is not current."""
        ours = self._ours
        if decode.worker_id != ours.worker_id:
            raise HandoffError(f"this is {ours.worker_id}, not {decode.worker_id}")
        if decode.epoch != ours.epoch:
            raise StaleEpoch(ours.worker_id, ours.epoch, decode.epoch)
        known = self._newest.get(prefill.worker_id)
        if known is not None and prefill.epoch < known:
            raise StaleEpoch(prefill.worker_id, known, prefill.epoch)
        self._newest.put(prefill.worker_id, prefill.epoch)
        return known is not None and prefill.epoch > known


class Bounded(Generic[T]):
    """The last `max_entries` things put, by name."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str) -> T | None:
        """What was put last under this name and is not forgotten, else None."""
        return self._entries.get(name)

    def put(self, name: str, value: T) -> None:
        """Remember; the entry that was put longest ago goes when there are too many."""
        self._entries[name] = value
        self._entries.move_to_end(name)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
