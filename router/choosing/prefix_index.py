"""Which blocks of prompts each worker has: how many leading tokens of a prompt it need not compute, or be sent.

    worker joins ──▶ shelf ──replace (a snapshot)──▶ shelf ──stored, removed──▶ shelf ──▶ worker gone: shelf cleared
                       └── expect (this router sends a prompt there): counts at once, for `expect_s`; news confirm it

One table: short name of a block (`contracts.block_hash`) to a bit set of the workers that have it, so one walk along a
prompt's blocks finds the prefix that every worker has. A shelf holds at most as many blocks as its worker's memory. Called on
the event loop only. Does not know where news comes from or what is made of it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.block_hash import short_names
from contracts.clock import Clock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerRef


@dataclass(slots=True)
class _Shelf:
    """What one life of one worker has. `expected` maps blocks to the last expectation that named them."""

    ref: WorkerRef
    bit: int
    block_size: int
    capacity: int
    known: set[int] = field(default_factory=set)
    expected: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Expectation:
    ref: WorkerRef
    number: int
    until: float
    names: Sequence[int]


class _Table:
    """Blocks' short names, and the bits of the workers that have them."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def put(self, bit: int, names: Iterable[int]) -> None:
        """This worker has these."""
        holders = self._holders
        for name in names:
            holders[name] = holders.get(name, 0) | bit

    def take_off(self, bit: int, names: Iterable[int]) -> None:
        """It has not any more; each must be here."""
        holders = self._holders
        for name in names:
            left = holders[name] & ~bit
            if left:
                holders[name] = left
            else:
                del holders[name]

    def prefixes(self, names: Sequence[int]) -> list[tuple[int, int]]:
        """Bits of workers, and how many of the first names they have: the shortest prefixes first, none of no name."""
        holders, ends = self._holders, []
        having, num_blocks = holders.get(names[0], 0), 1
        while having and num_blocks < len(names):
            still = having & holders.get(names[num_blocks], 0)
            if still != having:
                ends.append((having ^ still, num_blocks))
                having = still
            num_blocks += 1
        return [*ends, (having, num_blocks)]


_Answer = tuple[Sequence[bytes], Mapping[WorkerRef, int]]  # a prompt's block hashes, and who has how many tokens of it


class _LastNames:
    """The short names of the prompt that was asked about last: it is asked about several times in a row."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[bytes], array[int]] | None = None

    def of(self, block_hashes: Sequence[bytes]) -> array[int]:
        """The same object has the same names, as long as it has not grown."""
        if self._last is None or self._last[0] is not block_hashes or len(self._last[1]) != len(block_hashes):
            self._last = block_hashes, short_names(block_hashes)
        return self._last[1]


def _with_prefix(
    answer: _Answer | None, shelf: _Shelf, block_hashes: Sequence[bytes], num_blocks: int
) -> _Answer | None:
    """The answer, now that this worker has so many of the first blocks; None where it is another prompt's."""
    if answer is None or answer[0] is not block_hashes or num_blocks != len(block_hashes):
        return None
    return block_hashes, {**answer[1], shelf.ref: num_blocks * shelf.block_size}


class PrefixIndex:
    """Owns the table."""

    def __init__(self, clock: Clock, expect_s: float = 5.0) -> None:
        """What is expected counts for `expect_s` seconds unless news confirms it; 0 expects nothing."""
        self.layout: KVLayout | None = None  # of the workers' KV memory, as the last that joined has it
        self._clock = clock
        self._expect_s = expect_s
        self._table = _Table()
        self._shelves: dict[WorkerRef, _Shelf] = {}
        self._by_bit: dict[int, _Shelf] = {}
        self._expectations: deque[_Expectation] = deque()
        self._num_expectations = 0
        self._names = _LastNames()
        self._answer: _Answer | None = None  # the last, until anything changes that it does not know of

    def cached_tokens(self, ref: WorkerRef, block_hashes: Sequence[bytes]) -> int:
        """How many leading tokens of the prompt with these block hashes this worker has; 0 for one that is not known."""
        return self.match(block_hashes).get(ref, 0)

    def match(self, block_hashes: Sequence[bytes]) -> Mapping[WorkerRef, int]:
        """The same of every worker that has any of them. Asking again for the same prompt (the same object) costs nothing, also
        when it has been expected somewhere meanwhile: both policies, the cost model and both workers' books ask in one go.
        """
        self._expire()
        if self._answer is not None and self._answer[0] is block_hashes:
            return self._answer[1]
        found = self._match(block_hashes) if block_hashes else {}
        self._answer = block_hashes, found
        return found

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        """The lives that have a shelf."""
        return tuple(self._shelves)

    @property
    def num_names(self) -> int:
        """Blocks that are in the table, told of or expected; one that several workers have counts once."""
        return len(self._table)

    def names(self, ref: WorkerRef) -> frozenset[int]:
        """The short names of the blocks that this worker has told of."""
        shelf = self._shelves.get(ref)
        return frozenset() if shelf is None else frozenset(shelf.known)

    def size(self, ref: WorkerRef) -> int:
        """How many those are."""
        shelf = self._shelves.get(ref)
        return 0 if shelf is None else len(shelf.known)

    def join(self, info: WorkerInfo) -> None:
        """A life of a worker begins, with nothing. Idempotent."""
        if info.ref in self._shelves:
            return
        self.layout = info.layout
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        shelf = _Shelf(info.ref, bit, info.layout.block_size, info.num_blocks)
        self._shelves[info.ref] = self._by_bit[bit] = shelf

    def forget(self, ref: WorkerRef) -> None:
        """That life is over, and what it had is gone. Idempotent."""
        shelf = self._shelves.pop(ref, None)
        self._answer = None
        if shelf is not None:
            self._table.take_off(shelf.bit, shelf.known | shelf.expected.keys())
            del self._by_bit[shelf.bit]

    def replace(self, ref: WorkerRef, names: Iterable[int]) -> None:
        """A snapshot: this is all that the worker has."""
        shelf = self._shelves.get(ref)
        if shelf is None:
            return
        old, shelf.known = shelf.known, set()
        self._table.take_off(shelf.bit, old - shelf.expected.keys())
        self.stored(ref, names)

    def stored(self, ref: WorkerRef, names: Iterable[int]) -> None:
        """The worker has these blocks now. More than its memory holds are not taken: its removals must have been lost."""
        shelf = self._shelves.get(ref)
        if shelf is None:
            return
        self._answer = None
        room = shelf.capacity - len(shelf.known)
        new = [name for name in names if name not in shelf.known][:room]
        shelf.known.update(new)
        self._table.put(shelf.bit, new)

    def removed(self, ref: WorkerRef, names: Iterable[int]) -> None:
        """It has not any more; not even if it was expected to."""
        shelf = self._shelves.get(ref)
        if shelf is None:
            return
        gone = [name for name in names if name in shelf.known]
        shelf.known.difference_update(gone)
        for name in gone:
            shelf.expected.pop(name, None)
        self._answer = None
        self._table.take_off(shelf.bit, gone)

    def expect(self, ref: WorkerRef, block_hashes: Sequence[bytes]) -> None:
        """A prompt of these blocks is on its way there: whoever comes next with the same prefix finds it.

        Unless more is on its way there already than the worker has room for.
        """
        self._expire()
        shelf = self._shelves.get(ref)
        if shelf is None or not block_hashes or not self._expect_s or len(shelf.expected) > shelf.capacity:
            return
        names = self._names.of(block_hashes)[: shelf.capacity]
        self._answer = _with_prefix(self._answer, shelf, block_hashes, len(names))
        self._num_expectations += 1
        number = self._num_expectations
        shelf.expected.update(dict.fromkeys(names, number))
        self._table.put(shelf.bit, names)
        self._expectations.append(_Expectation(ref, number, self._clock.now() + self._expect_s, names))

    def _expire(self) -> None:
        now = self._clock.now()
        while self._expectations and self._expectations[0].until <= now:
            over = self._expectations.popleft()
            shelf = self._shelves.get(over.ref)
            if shelf is None:
                continue
            gone = [name for name in over.names if shelf.expected.get(name) == over.number]
            for name in gone:
                del shelf.expected[name]
            self._answer = None
            self._table.take_off(shelf.bit, [name for name in gone if name not in shelf.known])

    def _match(self, block_hashes: Sequence[bytes]) -> dict[WorkerRef, int]:
        found: dict[WorkerRef, int] = {}
        for bits, num_blocks in self._table.prefixes(self._names.of(block_hashes)):
            while bits:
                bit = bits & -bits
                bits ^= bit
                shelf = self._by_bit[bit]
                found[shelf.ref] = num_blocks * shelf.block_size
        return found
