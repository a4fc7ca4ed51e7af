"""Which edge a message is, and what it is about. Knows the protocol's messages and nothing of how they travel."""

from __future__ import annotations

from contracts.pb.diptych.v1 import prefill_pb2
from tests.faults.wire import Edge

EDGES = {
    "Announce": (Edge.ANNOUNCE, Edge.ANNOUNCED),
    "Connect": (Edge.CONNECT, Edge.CONNECTED),
    "Reserve": (Edge.RESERVE, Edge.GRANT),
    "Commit": (Edge.COMMIT, Edge.COMMITTED),
    "Renew": (Edge.RENEW, Edge.RENEWED),
    "Abort": (Edge.ABORT, Edge.ABORTED),
    "run": Edge.RUN,
    "retarget": Edge.RETARGET,
    "tokens": Edge.FIRST_TOKEN,
    "handed_off": Edge.HANDED_OFF,
    "handoff_failed": Edge.HANDOFF_FAILED,
    "ended": Edge.ENDED,
    "attach": Edge.ATTACH,
    "generate": Edge.GENERATE,
    "cancel": Edge.CANCEL,
}


def apart(message) -> list:
    """What a stream carries, each news of a prefill worker as a batch of its own: faults meet them one by one."""
    if not isinstance(message, prefill_pb2.PrefillBatch):
        return [message]
    return [prefill_pb2.PrefillBatch(prefill=message.prefill, events=[event]) for event in message.events]


def edge_of(message) -> Edge:
    """Of what a stream carries."""
    kind = type(message).__name__
    match kind:
        case "PrefillBatch":
            return EDGES[message.events[0].WhichOneof("event")]
        case "DecodeBatch":
            return Edge.DELTAS
        case _:
            return EDGES[message.WhichOneof("command")]


def ids_of(message) -> tuple[str, ...]:
    """The hand-offs or requests that a message is about."""
    kind = type(message).__name__
    match kind:
        case "PrefillCommand":
            if message.HasField("cancel"):
                return tuple(message.cancel.request_ids)
            part = message.run if message.HasField("run") else message.retarget
            return (part.target.handoff_id,)
        case "PrefillBatch":
            return tuple(event.request_id for event in message.events)
        case "DecodeCommand":
            which = message.WhichOneof("command")
            if which == "attach":
                return (message.attach.handoff_id,)
            return (message.generate.request.request_id,) if which == "generate" else tuple(message.cancel.request_ids)
        case "DecodeBatch":
            return tuple(delta.request_id for delta in message.deltas)
        case "ReserveRequest" | "AbortRequest":
            return (message.handoff_id,)
        case "CommitRequest":
            return (message.ticket.handoff_id,)
        case "RenewRequest":
            return tuple(message.handoff_ids)
        case _:
            return ()
