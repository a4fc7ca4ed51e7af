"""Wire ↔ domain for a run on a prefill worker: its targets and its events.

Reading raises InvalidRequest that names a missing field, or InternalError for an event that is not known. Does no I/O.
"""

from __future__ import annotations

from contracts.errors import InternalError, InvalidRequest
from contracts.pb.diptych.v1 import prefill_pb2
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, PrefillEvent, Target
from contracts.wire import (
    delta_from_pb,
    delta_to_pb,
    error_info_from_pb,
    error_info_to_pb,
    handoff_stats_from_pb,
    handoff_stats_to_pb,
    stages_from_pb,
    stages_to_pb,
)
from contracts.wire_handoff import worker_ref_from_pb, worker_ref_to_pb


def target_to_pb(target: Target) -> prefill_pb2.HandoffTarget:
    """Field by field."""
    decode = worker_ref_to_pb(target.decode)
    return prefill_pb2.HandoffTarget(handoff_id=target.handoff_id, decode=decode, address=target.address)


def target_from_pb(message: prefill_pb2.HandoffTarget) -> Target:
    """Raises InvalidRequest naming a part that is missing."""
    if not message.handoff_id:
        raise InvalidRequest("target.handoff_id", "", "must not be empty")
    if not message.address:
        raise InvalidRequest("target.address", "", "must be host:port")
    return Target(message.handoff_id, worker_ref_from_pb(message.decode), message.address)


def event_to_pb(event: PrefillEvent, request_id: str) -> prefill_pb2.PrefillEvent:
    """One event of a request."""
    match event:
        case FirstTokens(delta):
            return prefill_pb2.PrefillEvent(request_id=request_id, tokens=delta_to_pb(delta))
        case HandedOff(handoff_id, stats, stages):
            done = prefill_pb2.HandedOff(
                handoff_id=handoff_id, stats=handoff_stats_to_pb(stats), stages=stages_to_pb(stages)
            )
            return prefill_pb2.PrefillEvent(request_id=request_id, handed_off=done)
        case HandoffFailed(handoff_id, error, hold_s):
            failed = prefill_pb2.HandoffFailed(handoff_id=handoff_id, error=error_info_to_pb(error), hold_s=hold_s)
            return prefill_pb2.PrefillEvent(request_id=request_id, handoff_failed=failed)


def event_from_pb(message: prefill_pb2.PrefillEvent) -> PrefillEvent:
    """Raises InternalError when a message has no event that is known here."""
    match message.WhichOneof("event"):
        case "tokens":
            return FirstTokens(delta_from_pb(message.tokens))
        case "handed_off":
            done = message.handed_off
            return HandedOff(done.handoff_id, handoff_stats_from_pb(done.stats), stages_from_pb(done.stages))
        case "handoff_failed":
            failed = message.handoff_failed
            return HandoffFailed(failed.handoff_id, error_info_from_pb(failed.error), failed.hold_s)
        case _:
            raise InternalError("prefill worker sent an event that is not known here")
