"""Which edge a message is, and what it is about. Knows the protocol's messages and nothing of how they travel."""

from __future__ import annotations

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
    "attach": Edge.ATTACH,
    "generate": Edge.GENERATE,
    "cancel": Edge.CANCEL,
}


def ids_of(message) -> tuple[str, ...]:
    """The hand-offs or requests that a message is about."""
    kind = type(message).__name__
    match kind:
        case "PrefillCommand":
            part = message.run.target if message.HasField("run") else message.retarget
            return (part.handoff_id,)
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
