"""The messages of a hand-off in Python: what decode grants, and the ticket with which decode goes on alone.

    ConnectRequest ──▶ ConnectResponse                                   once per pair
    ReserveRequest ──▶ Grant (or NoRoom) ──▶ writes … ──▶ Ticket (commit)
                       RenewRequest ──▶ RenewResponse                    while it lasts
                       AbortRequest ──▶ AbortResponse                    when writing has stopped for good
                                          Ticket ──▶ CommitResponse

Every one of them names both workers in their lives (`prefill`, `decode`); `check_answer` refuses an answer from another life
than the one that was asked. `handoff_id` is also the request id of the continuation on the decode worker.

Does not know gRPC or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest, TokenLogprob
from contracts.worker import ConnectorAddress, WorkerRef, check_life
from observability.stages import StageTimes


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """A prefill worker introduces itself to the decode worker that it believes to reach."""

    prefill: WorkerRef
    decode: WorkerRef
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class ConnectResponse:
    """The decode worker agrees, and says where its KV memory can be reached, best connector first."""

    prefill: WorkerRef
    decode: WorkerRef
    connectors: tuple[ConnectorAddress, ...]


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Asks a decode worker for room for `num_tokens` tokens of KV.

    `num_tokens` counts the prompt tokens (and earlier output, on a continuation) whose KV will be pushed. `block_hashes`
    are the chained hashes of its full blocks, so that decode finds what it already has. Both refs must be current.
    """

    handoff_id: str
    prefill: WorkerRef
    decode: WorkerRef
    num_tokens: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Room on the decode side, until `lease_s` seconds from now unless renewed.

    `block_ids` are all blocks in order; the first `num_cached_tokens` tokens (whole blocks) are there already and must not be
    written. `windows` has, per connector kind, the key that lets writes into exactly the blocks that are not cached.
    """

    handoff_id: str
    prefill: WorkerRef
    decode: WorkerRef
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    lease_s: float
    windows: tuple[tuple[ConnectorAddress, int], ...]  # (where to write, key)


@dataclass(frozen=True, slots=True)
class Full:
    """No blocks are free now; `retry_after_s` is when to ask again. The other answer to a ReserveRequest, raised as NoRoom."""

    prefill: WorkerRef
    decode: WorkerRef
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Gives a hand-off up: its sender writes no more. `reason` is for the log."""

    handoff_id: str
    prefill: WorkerRef
    decode: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class AbortResponse:
    """The abort was heard; also for a hand-off that is not known."""

    handoff_id: str
    prefill: WorkerRef
    decode: WorkerRef


@dataclass(frozen=True, slots=True)
class CommitResponse:
    """The decode engine has the request, and owns `num_blocks` blocks for it now.

    It came `took_s` after the commit; `checked_s` of these were before the request was given to the engine. No part of what is
    said: the same answer again takes another time.
    """

    handoff_id: str
    prefill: WorkerRef
    decode: WorkerRef
    num_blocks: int
    took_s: float = field(default=0.0, compare=False)
    checked_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class RenewRequest:
    """Keeps these leases, all that one prefill worker holds on one decode worker, for another `lease_s`."""

    prefill: WorkerRef
    decode: WorkerRef
    handoff_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RenewResponse:
    """Ids that are not held any more (stop writing, they have failed), and the new lease of the others in seconds."""

    prefill: WorkerRef
    decode: WorkerRef
    lost_handoff_ids: tuple[str, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """Everything a decode worker needs to go on as if it had prefilled the request itself.

    `request.output_token_ids` ends with the token that prefill sampled; its KV is not written yet, so
    `num_computed_tokens == request.num_tokens - 1`. Penalties follow from the tokens; stop strings are the router's.
    `window_key` is the key under which the bytes were written: a ticket redeems the grant that gave it, and no other.
    """

    handoff_id: str
    prefill: WorkerRef
    decode: WorkerRef
    layout: KVLayout
    request: GenerationRequest
    num_computed_tokens: int
    num_cached_tokens: int
    window_key: int
    block_hashes: tuple[bytes, ...] = ()
    block_digests: tuple[bytes, ...] = ()
    first_token_logprob: TokenLogprob | None = None
    stages: StageTimes = field(default_factory=StageTimes)


class Answer(Protocol):
    """What every answer of a decode worker says."""

    @property
    def prefill(self) -> WorkerRef:
        """Whom it answers."""
        ...

    @property
    def decode(self) -> WorkerRef:
        """Who answers."""
        ...


def check_answer(answer: Answer, prefill: WorkerRef, decode: WorkerRef) -> None:
    """StaleEpoch or HandoffError unless it is `decode`, in this life, that answers `prefill`, in this life."""
    check_life(decode, answer.decode)
    check_life(prefill, answer.prefill)
