"""The hand-off as two pure tables: states × events → next state and actions.

The rule that everything serves: blocks go back to the pool only from a state in which no transfer can still touch them.

    prefill side (source)                                decode side (target)

    COMPUTING ──granted──▶ SENDING                       RESERVED ──commit──▶ RECEIVING ──verified──▶ ADOPTED
        │                  │   │                             │                    │
        │ abort, failed    │   │ committed                   │ abort, expired,    │ refused, abort, expired,
        │                  │   │ (last write done and        │ peer restarted,    │ peer restarted
        │                  │   │  commit acknowledged)       │ refused            │
        │     abort,failed │   │                             └──▶ DRAINING ◀──────┘
        │                  ▼   │                                     │
        │           DRAINING   │                                     │ quiesced (no window can be written)
        │   quiesced │         │                                     ▼
        ▼            ▼         ▼                                  RELEASED
             RELEASED

* Source: "abort" is the client's, the router's (it leaves, or aims at another target) or a deadline's; "failed" is a refusal,
  a lost transfer, a lost lease or a new epoch of the peer. RELEASED means that the source blocks are the door's alone again;
  after a failure, or for another target, it begins another hand-off over them (its COMPUTING), and only then, or gives them
  back. That is the design's "COMPUTING/re-target": a hand-off that is given up passes DRAINING first, because a write of it
  may still be reading the blocks.
* Target: windows are closed on leaving RESERVED, whatever the reason. A one-sided connector does not show its first write,
  so RECEIVING begins at the commit and lasts until the windows are quiesced and the bytes verified.
* ADOPTED: the engine owns the blocks. RELEASED: the pool does. Any late message in either: stay, harmless.
* A pair that is not in a table cannot happen; meeting it is a fault of ours and raises InternalError.

`sender.py` and `receiver.py` (through `incoming.py`) drive these tables and tell an `Observer` of each step; tests walk the
same tables, and hold what observers heard against them. Does not know clocks, connectors, messages or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from contracts.errors import InternalError


class SourceState(StrEnum):
    """The prefill side's states."""

    COMPUTING = "computing"
    SENDING = "sending"
    DRAINING = "draining"
    RELEASED = "released"


class SourceEvent(StrEnum):
    """What happens to the prefill side."""

    GRANTED = "granted"
    COMMITTED = "committed"  # last write done and commit acknowledged
    FAILED = "failed"  # refused, no room, write failed, lease lost, peer's epoch changed
    ABORTED = "aborted"  # by the client, the router, a deadline
    QUIESCED = "quiesced"  # no own write is under way


class SourceAction(StrEnum):
    """What the prefill side does about it."""

    SEND = "send"  # start the writer and the heartbeat
    STOP = "stop"  # let no further write begin, wait for the one under way
    TELL_PEER = "tell_peer"  # Abort: no more writes will come
    GIVE_BACK = "give_back"  # the source blocks are the door's alone again


class TargetState(StrEnum):
    """The decode side's states."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    DRAINING = "draining"
    ADOPTED = "adopted"
    RELEASED = "released"


class TargetEvent(StrEnum):
    """What happens to the decode side."""

    COMMIT = "commit"  # a ticket came that fits the reservation
    VERIFIED = "verified"  # windows quiesced, bytes good
    REFUSED = "refused"  # a ticket came that does not fit, or the bytes are not good
    ABORTED = "aborted"  # by the peer or by this worker
    EXPIRED = "expired"  # the lease ran out
    PEER_RESTARTED = "peer_restarted"  # a newer epoch of the prefill worker was seen
    QUIESCED = "quiesced"  # no window can be written any more


class TargetAction(StrEnum):
    """What the decode side does about it."""

    CLOSE_WINDOWS = "close_windows"  # and ask until they are quiesced
    ADOPT = "adopt"  # give lease and request to the engine
    RELEASE = "release"  # give the lease back to the pool


SourceTable = Mapping[tuple[SourceState, SourceEvent], tuple[SourceState, tuple[SourceAction, ...]]]
TargetTable = Mapping[tuple[TargetState, TargetEvent], tuple[TargetState, tuple[TargetAction, ...]]]


@dataclass(frozen=True, slots=True)
class SourceStep:
    """One step of one hand-off on the prefill side: the row that was taken."""

    handoff_id: str
    before: SourceState
    event: SourceEvent
    after: SourceState
    actions: tuple[SourceAction, ...]


@dataclass(frozen=True, slots=True)
class TargetStep:
    """One step of one hand-off on the decode side: the row that was taken."""

    handoff_id: str
    before: TargetState
    event: TargetEvent
    after: TargetState
    actions: tuple[TargetAction, ...]


Observer = Callable[[SourceStep | TargetStep], None]  # called before the step's actions; must be quick and not raise


def unobserved(taken: SourceStep | TargetStep) -> None:
    """The observer of a worker whose steps nobody wants to hear."""
    del taken


_S, _SE, _SA = SourceState, SourceEvent, SourceAction
_T, _TE, _TA = TargetState, TargetEvent, TargetAction

SOURCE_TABLE: SourceTable = {
    (_S.COMPUTING, _SE.GRANTED): (_S.SENDING, (_SA.SEND,)),
    # The answer to a Reserve may be lost or under way, so the peer is told even where no grant was seen.
    (_S.COMPUTING, _SE.FAILED): (_S.RELEASED, (_SA.TELL_PEER, _SA.GIVE_BACK)),
    (_S.COMPUTING, _SE.ABORTED): (_S.RELEASED, (_SA.TELL_PEER, _SA.GIVE_BACK)),
    (_S.SENDING, _SE.COMMITTED): (_S.RELEASED, (_SA.GIVE_BACK,)),
    (_S.SENDING, _SE.FAILED): (_S.DRAINING, (_SA.STOP,)),
    (_S.SENDING, _SE.ABORTED): (_S.DRAINING, (_SA.STOP,)),
    (_S.DRAINING, _SE.QUIESCED): (_S.RELEASED, (_SA.TELL_PEER, _SA.GIVE_BACK)),
    (_S.DRAINING, _SE.FAILED): (_S.DRAINING, ()),
    (_S.DRAINING, _SE.ABORTED): (_S.DRAINING, ()),
    (_S.DRAINING, _SE.COMMITTED): (_S.DRAINING, ()),
    (_S.DRAINING, _SE.GRANTED): (_S.DRAINING, ()),
    **{(_S.RELEASED, event): (_S.RELEASED, ()) for event in _SE},
}

TARGET_TABLE: TargetTable = {
    (_T.RESERVED, _TE.COMMIT): (_T.RECEIVING, (_TA.CLOSE_WINDOWS,)),
    (_T.RESERVED, _TE.REFUSED): (_T.DRAINING, (_TA.CLOSE_WINDOWS,)),
    (_T.RESERVED, _TE.ABORTED): (_T.DRAINING, (_TA.CLOSE_WINDOWS,)),
    (_T.RESERVED, _TE.EXPIRED): (_T.DRAINING, (_TA.CLOSE_WINDOWS,)),
    (_T.RESERVED, _TE.PEER_RESTARTED): (_T.DRAINING, (_TA.CLOSE_WINDOWS,)),
    (_T.RECEIVING, _TE.VERIFIED): (_T.ADOPTED, (_TA.ADOPT,)),
    (_T.RECEIVING, _TE.COMMIT): (_T.RECEIVING, ()),
    (_T.RECEIVING, _TE.REFUSED): (_T.DRAINING, ()),
    (_T.RECEIVING, _TE.ABORTED): (_T.DRAINING, ()),
    (_T.RECEIVING, _TE.EXPIRED): (_T.DRAINING, ()),
    (_T.RECEIVING, _TE.PEER_RESTARTED): (_T.DRAINING, ()),
    (_T.DRAINING, _TE.QUIESCED): (_T.RELEASED, (_TA.RELEASE,)),
    **{(_T.DRAINING, event): (_T.DRAINING, ()) for event in _TE if event is not _TE.QUIESCED},
    **{(state, event): (state, ()) for state in (_T.ADOPTED, _T.RELEASED) for event in _TE},
}

StateT = TypeVar("StateT")
EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")


def step(
    table: Mapping[tuple[StateT, EventT], tuple[StateT, tuple[ActionT, ...]]], state: StateT, event: EventT
) -> tuple[StateT, tuple[ActionT, ...]]:
    """The next state and what to do; InternalError for a pair that cannot happen."""
    found = table.get((state, event))
    if found is None:
        raise InternalError(f"hand-off: {event} cannot happen in state {state}")
    return found
