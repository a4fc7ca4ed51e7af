"""Wire ↔ domain for the commit: the ticket, which has all that decode needs, and what the decode worker says to it.

Reading raises InvalidRequest that names a missing or impossible field. Does no I/O.
"""

from __future__ import annotations

from contracts import wire
from contracts.errors import InvalidRequest
from contracts.pb.diptych.v1 import handoff_pb2
from contracts.ticket import CommitResponse, Ticket
from contracts.wire_handoff import layout_from_pb, layout_to_pb, worker_ref_from_pb, worker_ref_to_pb


def ticket_to_pb(ticket: Ticket) -> handoff_pb2.Ticket:
    """Everything decode needs, field by field."""
    first = ticket.first_token_logprob
    return handoff_pb2.Ticket(
        handoff_id=ticket.handoff_id,
        prefill=worker_ref_to_pb(ticket.prefill),
        decode=worker_ref_to_pb(ticket.decode),
        layout=layout_to_pb(ticket.layout),
        request=wire.request_to_pb(ticket.request),
        num_computed_tokens=ticket.num_computed_tokens,
        num_cached_tokens=ticket.num_cached_tokens,
        window_key=ticket.window_key,
        block_hashes=ticket.block_hashes,
        block_digests=ticket.block_digests,
        first_token_logprob=None if first is None else wire.logprob_to_pb(first),
        stages=wire.stages_to_pb(ticket.stages),
    )


def ticket_from_pb(message: handoff_pb2.Ticket) -> Ticket:
    """Raises InvalidRequest when a part is missing."""
    if not message.handoff_id:
        raise InvalidRequest("ticket.handoff_id", "", "must not be empty")
    return Ticket(
        handoff_id=message.handoff_id,
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        layout=layout_from_pb(message.layout),
        request=wire.request_from_pb(message.request),
        num_computed_tokens=message.num_computed_tokens,
        num_cached_tokens=message.num_cached_tokens,
        window_key=message.window_key,
        block_hashes=tuple(message.block_hashes),
        block_digests=tuple(message.block_digests),
        first_token_logprob=(
            wire.logprob_from_pb(message.first_token_logprob) if message.HasField("first_token_logprob") else None
        ),
        stages=wire.stages_from_pb(message.stages),
    )


def committed_to_pb(response: CommitResponse) -> handoff_pb2.CommitResponse:
    """Field by field."""
    return handoff_pb2.CommitResponse(
        handoff_id=response.handoff_id,
        prefill=worker_ref_to_pb(response.prefill),
        decode=worker_ref_to_pb(response.decode),
        num_blocks=response.num_blocks,
        took_s=response.took_s,
        checked_s=response.checked_s,
    )


def committed_from_pb(message: handoff_pb2.CommitResponse) -> CommitResponse:
    """Field by field."""
    return CommitResponse(
        handoff_id=message.handoff_id,
        prefill=worker_ref_from_pb(message.prefill),
        decode=worker_ref_from_pb(message.decode),
        num_blocks=message.num_blocks,
        took_s=message.took_s,
        checked_s=message.checked_s,
    )
