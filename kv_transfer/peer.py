"""What a sender asks of the decode side: the Handoff service as a Protocol, with and without a network between.

`Receiver` is one (in the same process); a prefill service has another that speaks gRPC. All calls are idempotent for the
same handoff_id from the life that reserved it, so that a lost answer is repaired by asking again, and refused from any other.
Errors are those of `contracts.errors`: an `Unavailable` or `DeadlineExceeded` means that no answer came, every other one is the
answer.
"""

from __future__ import annotations

from typing import Protocol

from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    CommitResponse,
    ConnectRequest,
    ConnectResponse,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
)


class HandoffPeer(Protocol):
    """The decode side of hand-offs."""

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        """Do we fit together? LayoutMismatch names the field that differs; StaleEpoch says that a life is over."""
        ...

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Room, or NoRoom (ask again)."""
        ...

    async def commit(self, ticket: Ticket) -> CommitResponse:
        """All bytes have landed: go on with this ticket."""
        ...

    async def abort(self, request: AbortRequest) -> AbortResponse:
        """No more writes will come. Also for a hand-off that is not known, or long adopted: harmless."""
        ...

    async def renew(self, request: RenewRequest) -> RenewResponse:
        """Keep these leases, all in one message."""
        ...
