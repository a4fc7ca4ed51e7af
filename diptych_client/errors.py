"""What a failed call means: gRPC's status code as a class, and the google.rpc details that came with it as fields.

    RpcFailed
    ├── InvalidArgument      a field is wrong: `violations` say which and why
    ├── NotFound             no such model
    ├── Unauthenticated      no API key, or one that is not known
    ├── PermissionDenied     something before the router does not let us in
    ├── Overloaded           come back after `retry_after_s`
    ├── MessageTooLarge      a message is larger than one side takes: coming back does not help
    ├── Unavailable          no worker, or no router
    ├── DeadlineExceeded     the call's time is up
    └── Cancelled            by us, or by the server because it stops

Any other code is an RpcFailed. The gRPC error that it was made of is its `__cause__`. Does not retry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of the request that is wrong, by its path in the message, and why."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class Details:
    """What google.rpc.Status said besides code and message. `reason` is the server's own name for the error."""

    reason: str = ""
    facts: Mapping[str, str] | None = None
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None


class RpcFailed(Exception):
    """A call that failed. `metadata` are the trailers of the call."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        details: Details = Details(),
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = details.reason
        self.facts = dict(details.facts or {})
        self.violations = details.violations
        self.retry_after_s = details.retry_after_s
        self.metadata = metadata


class InvalidArgument(RpcFailed):
    """INVALID_ARGUMENT."""


class NotFound(RpcFailed):
    """NOT_FOUND."""


class Unauthenticated(RpcFailed):
    """UNAUTHENTICATED."""


class PermissionDenied(RpcFailed):
    """PERMISSION_DENIED: of something before the router; its keys differ, for answers, in limits alone."""


class Overloaded(RpcFailed):
    """RESOURCE_EXHAUSTED."""


class MessageTooLarge(RpcFailed):
    """RESOURCE_EXHAUSTED from gRPC itself, of either side."""


class Unavailable(RpcFailed):
    """UNAVAILABLE."""


class DeadlineExceeded(RpcFailed):
    """DEADLINE_EXCEEDED."""


class Cancelled(RpcFailed):
    """CANCELLED."""


_KINDS: Mapping[grpc.StatusCode, type[RpcFailed]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


_TOO_LARGE = "message larger than max"  # nothing but its words tells it from other uses of its code
_NOT_CONNECTED = "failed to connect"
# What gRPC says of a connection that did not come about → what may help. The server's own words need no more.
_HINTS = (
    (
        "Socket closed",
        "the port may speak TLS: give the client `tls=Tls(...)`, with a certificate if the server asks for one",
    ),
    ("WRONG_VERSION_NUMBER", "the port does not speak TLS: leave `tls=` out"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority in `tls=`, or has expired"),
    ("Hostname Verification", "its certificate is for another name: see `server_name` of Tls"),
)


class EndedCall(Protocol):
    """What gRPC's two errors and its calls have in common."""

    def code(self) -> grpc.StatusCode:
        """How it ended."""
        ...

    def details(self) -> str | None:
        """In words."""
        ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """What came with the end."""
        ...


def as_failure(error: EndedCall) -> RpcFailed:
    """The failure that an ended call stands for; the caller raises it `from` the original."""
    code = error.code()
    trailers = tuple((str(key), value) for key, value in error.trailing_metadata() or ())
    message = error.details() or ""
    too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message
    kind = MessageTooLarge if too_large else _KINDS.get(code, RpcFailed)
    details = _details(error)
    return kind(code, message if details.reason else _explained(code, message), details, trailers)


def _explained(code: grpc.StatusCode, message: str) -> str:
    """What no server of ours has said, but gRPC on this side of the way."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the time given for the call (`timeout_s`) is up"
    if code is grpc.StatusCode.UNAVAILABLE and _NOT_CONNECTED in message:
        return "; ".join([message, *(hint for sign, hint in _HINTS if sign in message)])
    return message


def _details(error: EndedCall) -> Details:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # somebody between us and the server wrote the trailers: the code still holds
        return Details()
    return Details() if status is None else read_details(status)


def read_details(status: status_pb2.Status) -> Details:
    """The google.rpc details that this client knows; others are left alone."""
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for packed in status.details:
        packed.Unpack(info)
        packed.Unpack(bad)
        if packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    violations = tuple(Violation(each.field, each.description) for each in bad.field_violations)
    return Details(info.reason, dict(info.metadata), violations, retry_after_s)
