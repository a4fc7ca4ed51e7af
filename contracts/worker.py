"""Who a worker is, what it offers and how busy it is: what it announces to the registry.

A worker's `epoch` is new at each start, so messages for an earlier life can be refused. Does not know transports.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from contracts.errors import HandoffError, StaleEpoch
from contracts.kv_layout import KVLayout


class WorkerKind(StrEnum):
    """Which pool a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """starting ──▶ ready ◀──▶ stalled (has work, makes no progress); ready ──▶ draining ──▶ gone"""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One life of one worker."""

    worker_id: str
    epoch: int


def check_life(expected: WorkerRef, got: WorkerRef) -> None:
    """HandoffError when it is another worker, StaleEpoch when it is another life of this one."""
    if got.worker_id != expected.worker_id:
        raise HandoffError(f"this is {expected.worker_id}, not {got.worker_id}")
    if got.epoch != expected.epoch:
        raise StaleEpoch(expected.worker_id, expected.epoch, got.epoch)


@dataclass(frozen=True, slots=True)
class ConnectorAddress:
    """Where a connector of a worker can be reached; `address` is the connector's own notation."""

    kind: str  # "local", "shm", "tcp", …
    address: str


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What does not change while a worker lives."""

    ref: WorkerRef
    kind: WorkerKind
    address: str  # host:port of its gRPC server
    model_name: str
    layout: KVLayout
    connectors: tuple[str, ...]  # kinds it can use, best first
    max_model_len: int  # tokens
    num_blocks: int  # size of its KV pool
    max_num_batched_tokens: int = 0  # tokens of one step at most; 0 where it is not said
    max_num_seqs: int = 0  # requests of one step at most; 0 where it is not said


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What changes all the time; counts of requests, tokens, and a share from 0 to 1."""

    state: WorkerState = WorkerState.READY
    num_waiting: int = 0
    num_running: int = 0
    num_queued_tokens: int = 0  # tokens not computed yet, of waiting and running requests
    kv_usage: float = 0.0
    decode_step_s: float = 0.0  # of a step that only decodes, smoothed; 0 until known
    prefill_tokens_per_s: float = 0.0  # of steps that read prompts, smoothed; 0 until known


def new_epoch() -> int:
    """An epoch greater than that of any earlier start on this machine: milliseconds of wall-clock time."""
    return time.time_ns() // 1_000_000
