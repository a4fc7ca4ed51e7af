"""Errors at the gRPC border, both ways, with google.rpc details instead of words to be parsed.

    DiptychError ──to_status──▶ google.rpc.Status ──wire──▶ AioRpcError ──from_rpc_error──▶ the same DiptychError

Every status carries ErrorInfo(reason = class name, domain, metadata = the error's own facts); InvalidRequest also
BadRequest with the field; Overloaded, NoRoom and RetriesSpent also RetryInfo. A status without ErrorInfo was made by gRPC
itself (connection refused, lost, timed out) or by a stranger, and is judged by its code. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from contracts import errors
from contracts.errors import (
    DiptychError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ModelNotFound,
    NoRoom,
    Overloaded,
    RateLimited,
    RequestCancelled,
    RetriesSpent,
    Unavailable,
    WorkerLost,
)

DOMAIN = "diptych"
MAX_MESSAGE_CHARS = 1000  # it travels in trailers, of which peers take 8 KiB, and each character may need nine bytes
_NOT_CONNECTED = "failed to connect"
# grpc.aio's own words, and no peer's: a message was written just when the peer ended the call, whose reason is overwritten by
# them, now and then (grpc/grpc#36066). The peer has refused or gone; that it has a fault nobody says.
_REASON_LOST = "Internal error from Core"
_TLS_TROUBLE = (
    ("Hostname Verification", "its certificate is not for the name by which it was reached, see --tls-server-name"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of an authority in --tls-ca, or has expired"),
    ("WRONG_VERSION_NUMBER", "it does not talk TLS, as --tls-ca asks for"),
    ("Socket closed", "it closed the connection before a word; it may want TLS, or a certificate of ours"),
)
_KNOWN: Mapping[str, type[DiptychError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DiptychError) and kind is not DiptychError
}


def to_status(error: DiptychError) -> status_pb2.Status:
    """The status, with details, that says `error` on the wire."""
    message = error.message[:MAX_MESSAGE_CHARS]
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=_facts(error))
    details: list[Message] = [info]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, (Overloaded, NoRoom, RetriesSpent)):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    if isinstance(error, RateLimited):
        quota = error_details_pb2.QuotaFailure.Violation(subject="caller", description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code.value), message=message, details=[_pack(d) for d in details]
    )


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> DiptychError:
    """What a failed call to `peer` (words for the message) means here. The caller raises it `from` the original."""
    status = _details(error)
    if status is not None:
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN and info.reason in _KNOWN:
                return _rebuild(_KNOWN[info.reason], status.message, info.metadata)
    said = f"{peer}: {_explained(error.details() or error.code().name)}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return WorkerLost(said)
        case grpc.StatusCode.DEADLINE_EXCEEDED:  # of the call, not of the user's request: that one has details
            return WorkerLost(f"{peer}: no answer in time")
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(said)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(said)
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Unavailable(said)  # something before the peer does not let us in: no fault of whose request it is
        case grpc.StatusCode.INTERNAL if error.details() == _REASON_LOST:
            return Unavailable(f"{peer}: it ended the call while it was being written to")
        case _:
            return InternalError(f"{peer}: {error.code().name}: {error.details()}")


def _explained(details: str) -> str:
    """gRPC's words for a connection that does not come about, with what they mean before them where it is the TLS."""
    for words, meaning in _TLS_TROUBLE:
        if words in details and _NOT_CONNECTED in details:
            return f"{meaning} ({details})"
    return details


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(error)
    except (ValueError, DecodeError):  # a stranger's trailers: judged by the code alone
        return None


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _facts(error: DiptychError) -> dict[str, str]:
    match error:
        case InvalidRequest():
            return {"field": error.field, "value": error.value, "limit": error.limit}
        case ModelNotFound():
            return {"model": error.model}
        case Overloaded() | NoRoom() | RetriesSpent():
            return {"retry_after_s": repr(error.retry_after_s)}
        case LayoutMismatch():
            return {"field": error.field}
        case _:
            return {}


def _rebuild(kind: type[DiptychError], message: str, facts: Mapping[str, str]) -> DiptychError:
    """An instance as it was on the other side; its constructor would phrase the message again, so it is not called."""
    error = kind.__new__(kind)
    DiptychError.__init__(error, message)
    match error:
        case InvalidRequest():
            error.field = facts.get("field", "")
            error.value = facts.get("value", "")
            error.limit = facts.get("limit", "")
        case ModelNotFound():
            error.model = facts.get("model", "")
        case Overloaded() | NoRoom() | RetriesSpent():
            error.retry_after_s = _seconds(facts.get("retry_after_s", ""))
        case LayoutMismatch():
            error.field = facts.get("field", "")
    return error


def _seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 1.0  # said by a stranger: any pause is better than none
