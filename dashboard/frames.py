"""What watchers are sent, as JSON: a Snapshot when they come, a Frame each second after it.

Times are milliseconds, instants are seconds of the Unix epoch, shares are from 0 to 1. A request is told by numbers, ids and
names of workers: no word of a prompt or an answer, and no caller, is in here. Fields that have their default are left out.
"""

from __future__ import annotations

import msgspec


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """The median, the 90th and the 99th percentile, in milliseconds."""

    p50: float
    p90: float
    p99: float


class Window(msgspec.Struct, frozen=True, omit_defaults=True):
    """One second. Percentiles are of the `look_s` seconds that end with it; rates and counts are of this second alone."""

    t: float
    ttft: Spread | None = None
    itl: Spread | None = None
    handoff: Spread | None = None  # what a hand-off adds before the second token: exposed transfer, commit, queue
    unexplained: Spread | None = None  # of TTFT, beside all stages; how large, whichever its sign
    second_unexplained: Spread | None = None  # the same of the gap before the second token
    tokens: int = 0
    finished: int = 0
    failed: int = 0
    good: int = 0  # within every limit
    excused: int = 0  # of those that are not: left by their clients, or refused for what they asked or had used up
    running: int = 0
    waiting: int = 0


class WorkerRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker as the router last heard of it. `state` is as the worker says, or `suspect`, `silent`, `gone`."""

    id: str
    pool: str
    state: str
    epoch: int  # milliseconds of its start
    address: str = ""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    slots: int = 0  # requests of one step at most; 0 where it is not said
    kv: float = 0.0
    blocks: int = 0
    connectors: tuple[str, ...] = ()
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0


class HandoffRow(msgspec.Struct, frozen=True):
    """What one hand-off moved."""

    connector: str
    kv_bytes: int
    blocks: int
    cached_blocks: int
    transfer: float
    exposed: float
    gb_per_s: float


class DecisionRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why it went its way, and what each way was predicted to cost."""

    reason: str
    remote: float | None = None
    local: float | None = None
    measured: float | None = None


class RequestRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request. `n` numbers those of this router; `stages` are in the order of time, zeros left out."""

    n: int
    id: str
    t: float
    outcome: str
    route: str
    e2e: float
    ok: bool = False
    good: bool = False
    ttft: float | None = None
    gap: float | None = None  # mean, between its tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    stages: dict[str, float] = {}
    unexplained: float = 0.0  # of `ttft`, beside all stages; below 0 where these say too much
    second: float | None = None  # the gap between its first and its second token
    second_unexplained: float = 0.0  # the same of it
    handoff: HandoffRow | None = None
    prefill: str = ""
    decode: str = ""
    decision: DecisionRow | None = None
    failures: int = 0
    moves: int = 0
    failed_handoffs: int = 0


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is promised, in milliseconds."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None


class Frame(msgspec.Struct, frozen=True, omit_defaults=True, tag="frame"):
    """What one second brought. `slowest` and `failed` are there when they have changed."""

    window: Window
    workers: tuple[WorkerRow, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    slowest: tuple[RequestRow, ...] | None = None
    failed: tuple[RequestRow, ...] | None = None
    troubles: tuple[str, ...] = ()  # what is left out of serving though it is there, as the router says it


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True, tag="snapshot"):
    """All that is known; what was shown before is forgotten. Requests are newest first."""

    model: str
    version: str
    since: float
    look_s: int
    limits: Limits
    windows: tuple[Window, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    slowest: tuple[RequestRow, ...] = ()
    failed: tuple[RequestRow, ...] = ()
    troubles: tuple[str, ...] = ()


def event(said: Frame | Snapshot) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(said) + b"\n\n"


def heard(data: str | bytes) -> Frame | Snapshot:
    """What an event's data says. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=Frame | Snapshot)
