"""What a router and a prefill worker say about one run, as values; `contracts.wire_prefill` puts them on the wire.

    FirstTokens ──▶ HandedOff
                └─▶ HandoffFailed ──▶ (a Target comes) ──▶ HandedOff | HandoffFailed …

A Target may also come while the hand-off before it is under way, then instead of it: that one is given up, and HandoffFailed
says that it is. Each hand-off has exactly one of the two outcomes, and both name it, so that one which crosses with a Target is
not taken for the new one's. HandedOff is always the last event.

Does not know calls or streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.request import ErrorInfo, TokenDelta
from contracts.worker import WorkerRef
from observability.stages import HandoffStats, StageTimes


@dataclass(frozen=True, slots=True)
class Target:
    """Where a prompt's KV shall go: a decode worker in the life that the router knows, at host:port."""

    handoff_id: str
    decode: WorkerRef
    address: str


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first token; with a finish_reason the request ended at prefill and nothing follows."""

    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The decode worker goes on by itself. The stages are all of the prefill side."""

    handoff_id: str
    stats: HandoffStats
    stages: StageTimes


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The prefill worker holds the KV for `hold_s` seconds and waits for another target."""

    handoff_id: str
    error: ErrorInfo
    hold_s: float


PrefillEvent = FirstTokens | HandedOff | HandoffFailed
