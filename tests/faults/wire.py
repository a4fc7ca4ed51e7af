"""What crosses between processes, and what may happen to it: every message meets the wire, which has a plan of faults.

    message ──▶ Wire.meet ──▶ Wire.cross ──▶ PASS            delivered
                                          ├▶ LOSE            never delivered, nobody says so
                                          ├▶ TWICE           delivered, and a copy of it later
                                          ├▶ BREAK_CALL      its call ends as if the peer had gone
                                          ├▶ PASS_THEN_BREAK delivered, then the same
                                          └▶ BREAK_LINK      every call between the two processes ends so

gRPC's promises hold: a stream keeps its order and is whole until it breaks, so what drops, doubles or overtakes a single message
elsewhere breaks or delays a stream. A unary request or answer may be lost, come twice, or come after its successors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Protocol

from contracts.clock import VirtualClock


class Edge(StrEnum):
    """Every kind of message of the protocol, and the connector's write."""

    ANNOUNCE = "announce"
    ANNOUNCED = "announced"  # its answer; likewise below
    RUN = "run"
    FIRST_TOKEN = "first token"
    HANDED_OFF = "handed off"
    HANDOFF_FAILED = "hand-off failed"
    RETARGET = "retarget"
    ENDED = "ended"
    CONNECT = "connect"
    CONNECTED = "connected"
    RESERVE = "reserve"
    GRANT = "grant"
    WRITE = "write"
    RENEW = "renew"
    RENEWED = "renewed"
    COMMIT = "commit"
    COMMITTED = "committed"
    ABORT = "abort"
    ABORTED = "aborted"
    ATTACH = "attach"
    GENERATE = "generate"
    DELTAS = "deltas"
    CANCEL = "cancel"


class Kind(StrEnum):
    """What happens there."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    ERROR = "error"
    RESTART = "peer restart"
    LEAVE = "cancel"
    DEADLINE = "deadline"
    FULL = "pool full"


class Verdict(Enum):
    """What the carrier of a message does with it."""

    PASS = auto()
    LOSE = auto()
    TWICE = auto()
    BREAK_CALL = auto()
    PASS_THEN_BREAK = auto()
    BREAK_LINK = auto()


@dataclass(frozen=True, slots=True)
class Crossing:
    """One message on its way. `ids` name the hand-offs or requests that it is about; `to` acts on it."""

    edge: Edge
    source: str
    target: str
    ids: tuple[str, ...]
    streamed: bool
    is_answer: bool = False

    @property
    def worker(self) -> str:
        """The worker that this edge belongs to: it restarts, or its pool is full."""
        if self.source == "router" or (self.target != "router" and not self.is_answer):
            return self.target
        return self.source


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the plan: at the `occurrence`-th crossing of `edge`. DEADLINE comes by the client's own timeout."""

    edge: Edge
    kind: Kind
    occurrence: int
    seed: int

    @property
    def delay_s(self) -> float:
        """Below every patience, beyond that of one call and of a lease, beyond everybody's."""
        return (0.05, 0.7, 3.0)[self.seed % 3]


class Surgeon(Protocol):
    """Who can do to the world what a fault asks for."""

    def restart(self, worker: str) -> None:
        """All its state vanishes now; it comes back later with a new epoch."""
        ...

    def leave(self, crossing: Crossing) -> None:
        """The client whose message this is goes away; one who is under way, when it is nobody's."""
        ...

    async def fill(self, worker: str) -> None:
        """Its KV pool has no room from now on, for a while."""
        ...


@dataclass(frozen=True, slots=True)
class Met:
    """One entry of the wire's record."""

    at_s: float
    crossing: Crossing


class Wire:
    """One per world. `record` is all that crossed since `begin`; `hits` are the crossings that met a fault of `plan`."""

    def __init__(self, clock: VirtualClock, rng: random.Random, plan: Sequence[Fault]) -> None:
        self._plan = {(fault.edge, fault.occurrence): fault for fault in plan}
        self.surgeon: Surgeon | None = None
        self.record: list[Met] = []
        self.hits: list[tuple[Met, Fault]] = []
        self._clock = clock
        self._rng = rng
        self._begun = False
        self._counts: dict[Edge, int] = {}
        self._passing: dict[str, asyncio.Event] = {}  # set when the next message reaches that process

    def begin(self) -> None:
        """Occurrences count from now on."""
        self._begun = True

    def latency_s(self) -> float:
        """How long a message takes that nothing happens to."""
        return self._rng.uniform(0.0001, 0.001)

    def meet(self, crossing: Crossing) -> Fault | None:
        """Note it as sent; the fault that it meets."""
        if not self._begun:
            return None
        count = self._counts.get(crossing.edge, 0)
        self._counts[crossing.edge] = count + 1
        met = Met(self._clock.now(), crossing)
        self.record.append(met)
        fault = self._plan.get((crossing.edge, count))
        if fault is not None:
            self.hits.append((met, fault))
        return fault

    async def cross(self, crossing: Crossing, fault: Fault | None) -> Verdict:
        """Take as long as it takes, do what the fault does to the world, and say what becomes of the message."""
        await self._clock.sleep(self.latency_s())
        verdict = Verdict.PASS if fault is None else await self.apply(fault, crossing)
        if verdict is not Verdict.LOSE:
            passing = self._passing.pop(crossing.target, None)
            if passing is not None:
                passing.set()
        return verdict

    async def apply(self, fault: Fault, crossing: Crossing) -> Verdict:
        """What the fault does at the moment at which the message would have arrived."""
        assert self.surgeon is not None
        streamed = crossing.streamed
        match fault.kind:
            case Kind.DROP:
                return Verdict.BREAK_LINK if streamed else Verdict.LOSE
            case Kind.DELAY:
                await self._clock.sleep(fault.delay_s)
            case Kind.DUPLICATE:
                return Verdict.PASS_THEN_BREAK if streamed else Verdict.TWICE
            case Kind.REORDER:
                await self._after_the_next(crossing.target)
            case Kind.ERROR:
                return Verdict.BREAK_CALL
            case Kind.RESTART:
                self.surgeon.restart(crossing.worker)
                return Verdict.LOSE
            case Kind.LEAVE:
                self.surgeon.leave(crossing)
            case Kind.FULL:
                await self.surgeon.fill(crossing.worker)
            case Kind.DEADLINE:
                pass
        return Verdict.PASS

    async def _after_the_next(self, target: str) -> None:
        """Until another message has reached the same process; half a second when none comes."""
        passing = self._passing.setdefault(target, asyncio.Event())
        try:
            async with asyncio.timeout(0.5):
                await passing.wait()
        except TimeoutError:
            return
        await self._clock.sleep(self.latency_s())
