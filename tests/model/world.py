"""The hand-off as a model: what a state is, what may be changed about the rules, and what breaks a promise.

    Shared: lives of both workers, free blocks        Hand: one hand-off: prefill side, network, decode side
            what the router wants, where hand-offs are the targets of one request, one after another

The states of both sides and what they do about events are the product's own tables (`kv_transfer.handoff`). What `sender.py`,
`incoming.py` and `receiver.py` add to them, when an event happens at all, is in `Rules`, one line each, so that a test can
take one away. More may happen here than can in the product: time is left out (a lease may run out, a sender may give up at
any moment), every message may be lost, may overtake, and may come again for ever, and a worker that has a new life goes on
in its old one, too, or stops at any step. Which bytes are in a block is one question: are they those that were sent?
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kv_transfer.handoff import (
    SOURCE_TABLE,
    TARGET_TABLE,
    SourceAction,
    SourceEvent,
    SourceState,
    SourceTable,
    TargetAction,
    TargetEvent,
    TargetState,
    TargetTable,
)


class Promise(StrEnum):
    """What must hold in every state that can be reached."""

    FENCED = "a block is freed, or the engine's, while it can be written"
    FREED = "not every block is freed in the end"
    ONE_OWNER = "a block has not exactly one owner"
    ONE_ANSWER = "a side does not answer with exactly one of tokens and error"
    NO_LIE = "prefill says that it was taken over, decode says that it was lost"
    STALE = "a stale epoch is obeyed"
    WRITTEN = "the engine goes on with bytes that were never written"
    GIVEN_UP = "what was given up goes on all the same"
    INTACT = "the engine goes on with bytes that are not those that were sent"
    FORGOTTEN = "a cached block that is known to be spoiled is found again"
    OWNED = "a worker to which the hand-off does not belong is obeyed"
    ONCE = "one prompt is handed over twice"
    SOURCE_READ = "a write reads source blocks that have been given back"
    IMPOSSIBLE = "a pair of state and event that the table does not know"


class Message(StrEnum):
    """What has been sent for a hand-off: it may come from now on, any number of times, or never."""

    RESERVE = "Reserve"
    COMMIT = "Commit"
    COMMITTED = "the answer to Commit"
    ABORT = "Abort"


class Writing(StrEnum):
    """Where a write is."""

    NONE = "none"
    UNDER_WAY = "under way"  # issued, not inside the window yet
    INSIDE = "inside"  # bytes may land at any moment; a writer that was stopped stays here


class Window(StrEnum):
    """The leave to write into a hand-off's blocks."""

    NONE = "none"
    OPEN = "open"
    CLOSED = "closed"


class Before(StrEnum):
    """The decode side before there is a reservation."""

    UNKNOWN = "unknown"
    ASKING = "asking"  # the engine has been asked for room, its answer has not come


class Answer(StrEnum):
    """What a side has told whoever waits for it."""

    NONE = "nothing"
    TOKENS = "tokens"
    ERROR = "error"


class Shared(NamedTuple):
    """What hand-offs share. A block is a bit."""

    prefill: int  # the prefill worker's current life
    decode: int
    known: int  # the newest life of the prefill worker that decode has seen
    free: int
    spoiled: bool = False  # a block in decode's prefix cache has changed
    # Where the hand-offs are one request's, by their places
    target: int = 0  # the one that the router wants
    turn: int = 0  # the one that may begin: those before it have given the source blocks back, uncommitted
    num_taken: int = 0  # of those that prefill says were taken over
    heard: Answer = Answer.NONE  # what the router makes of it


class Hand(NamedTuple):
    """One hand-off, from both sides."""

    place: int = 0  # among the targets of one request
    source: SourceState | None = None  # None: not begun
    prefill: int = 0  # the lives that it is between
    decode: int = 0
    key: int = 0  # which of decode's grants it took: the key under which it writes
    held: bool = False  # the source blocks are the hand-off's
    cancelled: bool = False  # its client has left
    written: int = 0
    writing: Writing = Writing.NONE  # reads the source blocks
    source_said: Answer = Answer.NONE
    sent: frozenset[Message] = frozenset()
    late: Writing = Writing.NONE  # a write whose sender has stopped reading, or a copy of one, that may still land
    target: TargetState | Before = Before.UNKNOWN  # unknown with blocks: forgotten while the engine goes on with it
    grant: int = 0  # number of the reservation; later ones are for late copies of Reserve
    offered: frozenset[int] = frozenset()  # grants that have been sent
    ended: bool = False  # an abort or another end came before adoption
    window: Window = Window.NONE
    landed: int = 0
    damaged: bool = False  # some of what landed is not what was sent, or is not what is sent now
    stale: bool = False  # shares a spoiled block of the prefix cache
    judged: bool = False  # what an early comparison found, where a broken rule makes one
    blocks: int = 0  # leased or the engine's, as bits
    target_said: Answer = Answer.NONE

    @property
    def bad(self) -> bool:
        """Whether a comparison of all its blocks finds something."""
        return self.damaged or self.stale

    @property
    def inside(self) -> bool:
        """Whether bytes can land at this moment, however the window is."""
        return Writing.INSIDE in (self.writing, self.late)

    @property
    def quiesced(self) -> bool:
        """What `close_window` is True for."""
        return self.window is Window.CLOSED and not self.inside

    def outline(self) -> str:
        """One line for a trace."""
        inside = "+writer inside" if self.inside else ""
        return (
            f"prefill {self.source or 'not begun'}, said {self.source_said} | "
            f"decode {self.target}, window {self.window}{inside}, blocks {self.blocks:b}, said {self.target_said}"
        )


@dataclass(frozen=True)
class Observation:
    """A step of a table, as an observer of the product sees it."""

    before: SourceState | TargetState
    event: SourceEvent | TargetEvent
    after: SourceState | TargetState
    actions: tuple[SourceAction | TargetAction, ...]


class Step(NamedTuple):
    """Something that may happen. `promised`: it will, without any message and whatever else goes wrong."""

    text: str
    hand: Hand
    shared: Shared
    promised: bool = False
    seen: Observation | None = None
    broken: Promise | None = None


@dataclass(frozen=True)
class Rules:
    """The tables, and when their events happen. The defaults are the product's."""

    source: SourceTable = field(default_factory=lambda: SOURCE_TABLE)
    target: TargetTable = field(default_factory=lambda: TARGET_TABLE)
    # sender.py
    gives_up: bool = True  # no answer, no room, a lost lease: it fails by itself; a deadline: its owner aborts it
    commits_after_last_write: bool = True
    waits_for_acknowledgement: bool = True
    next_waits_for_its_turn: bool = True  # another target: first the hand-off before is quiesced, and not committed
    outcomes_name_their_handoff: bool = True  # the router's: one that crosses with a new target is not taken for its
    waits_for_own_write: bool = True  # before it counts as quiesced
    # connector.py
    windows_fence: bool = True  # no write begins but in an open window
    # incoming.py
    leases_end: bool = True
    waits_for_writers: bool = True  # before it adopts or releases
    ticket_names_its_grant: bool = True
    compares: bool = True  # the bytes with the ticket's digests, the cached ones with their seals; before it adopts
    compares_when_quiesced: bool = True  # not before
    forgets_spoiled: bool = True
    # receiver.py, memory.py
    refuses_stale_lives: bool = True
    ends_older_lives: bool = True
    looks_again_after_asking: bool = True
    knows_its_owner: bool = True
    # the pool
    gives_free_blocks: bool = True
    refuses_what_runs: bool = True  # an id that the engine goes on with gets no room again


@dataclass(frozen=True)
class Bounds:
    """How small the world is. `need`: blocks of each hand-off. With `grants` over 1, ended hand-offs may be forgotten.

    `damage`: bytes may change on their way and in the cache. `chained`: the hand-offs are the targets of one request.
    """

    hands: int = 1
    blocks: int = 2
    need: int = 2
    prefill_lives: int = 1
    decode_lives: int = 1
    grants: int = 1
    damage: bool = False
    chained: bool = False

    @property
    def all_free(self) -> int:
        """Every block, as bits."""
        return (1 << self.blocks) - 1


def source_rows(**rows: tuple[SourceState, tuple[SourceAction, ...]]) -> SourceTable:
    """The prefill side's table with rows replaced, each named `STATE__EVENT`."""
    table = dict(SOURCE_TABLE)
    for name, row in rows.items():
        state, event = name.split("__")
        table[SourceState[state], SourceEvent[event]] = row
    return table


def target_rows(**rows: tuple[TargetState, tuple[TargetAction, ...]]) -> TargetTable:
    """The decode side's table with rows replaced, each named `STATE__EVENT`."""
    table = dict(TARGET_TABLE)
    for name, row in rows.items():
        state, event = name.split("__")
        table[TargetState[state], TargetEvent[event]] = row
    return table
