"""What the decode side remembers beyond one hand-off: the newest life of each prefill worker, and how hand-offs ended.

A hand-off belongs to the life of the prefill worker that reserved it: to any other its end is not told, and an Abort that
another sends for it means nothing.

Both are bounded, oldest first out: forgetting costs at most a less precise answer to a very late message, or room that is held
for one lease, never safety: windows are closed by then, and a ticket redeems no grant but its own. Does not know what is done
about a stale life.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from contracts.errors import DiptychError, HandoffError, StaleEpoch
from contracts.worker import WorkerRef, check_life

T = TypeVar("T")
NameT = TypeVar("NameT", bound=Hashable)
OutcomeT = TypeVar("OutcomeT")


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
        self._newest: Bounded[str, int] = Bounded(max_peers)

    def check(self, prefill: WorkerRef, decode: WorkerRef) -> bool:
        """Whether `prefill` shows a newer life than known; StaleEpoch or HandoffError when either ref is not current."""
        check_life(self._ours, decode)
        known = self._newest.get(prefill.worker_id)
        if known is not None and prefill.epoch < known:
            raise StaleEpoch(prefill.worker_id, known, prefill.epoch)
        self._newest.put(prefill.worker_id, prefill.epoch)
        return known is not None and prefill.epoch > known


def check_owner(handoff_id: str, owner: WorkerRef, asker: WorkerRef) -> None:
    """HandoffError unless `asker` is the worker, in the life, that reserved this hand-off."""
    if asker != owner:
        raise HandoffError(
            f"hand-off {handoff_id} belongs to {owner.worker_id}, epoch {owner.epoch}; "
            f"{asker.worker_id}, epoch {asker.epoch}, has no say in it"
        )


class Endings(Generic[OutcomeT]):
    """How hand-offs ended, and which were given up before they were reserved: at most `max_entries` together."""

    def __init__(self, max_entries: int) -> None:
        # Under (id, None) one that was reserved, with its owner; under (id, asker) one that was not, whoever may own it.
        self._known: Bounded[tuple[str, WorkerRef | None], tuple[WorkerRef, OutcomeT]] = Bounded(max_entries)

    def put(self, handoff_id: str, owner: WorkerRef, outcome: OutcomeT) -> None:
        """A hand-off that was reserved has ended."""
        self._known.put((handoff_id, None), (owner, outcome))

    def give_up(self, handoff_id: str, asker: WorkerRef, outcome: OutcomeT) -> None:
        """`asker` gives it up; whatever has ended already, stays ended as it did."""
        if self.of(handoff_id, asker) is None:
            self._known.put((handoff_id, asker), (asker, outcome))

    def of(self, handoff_id: str, asker: WorkerRef) -> OutcomeT | None:
        """How it ended, if that is remembered. HandoffError when it was another's."""
        known = self._known.get((handoff_id, None)) or self._known.get((handoff_id, asker))
        if known is None:
            return None
        owner, outcome = known
        check_owner(handoff_id, owner, asker)
        return outcome


class Bounded(Generic[NameT, T]):
    """The last `max_entries` things put, by name."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[NameT, T] = OrderedDict()

    def get(self, name: NameT) -> T | None:
        """What was put last under this name and is not forgotten, else None."""
        return self._entries.get(name)

    def put(self, name: NameT, value: T) -> None:
        """Remember; the entry that was put longest ago goes when there are too many."""
        self._entries[name] = value
        self._entries.move_to_end(name)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
