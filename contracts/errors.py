"""Every error that may cross a border, one tree; raised deep, translated once at each door.

    DiptychError                      code                  retry elsewhere?
    ├── InvalidRequest                INVALID_ARGUMENT      no      names field, value and limit
    ├── ModelNotFound                 NOT_FOUND             no
    ├── Unauthenticated               UNAUTHENTICATED       no      never says what was presented
    ├── PermissionDenied              PERMISSION_DENIED     no      known, but not for this: a key without the dashboard
    ├── Overloaded                    RESOURCE_EXHAUSTED    later
    │   └── RateLimited               RESOURCE_EXHAUSTED    later   its caller's own limit, not ours
    ├── Unavailable                   UNAVAILABLE           yes
    │   ├── WorkerLost                UNAVAILABLE           yes
    │   └── RetriesSpent              UNAVAILABLE           later   so much fails that no more is tried again
    ├── Draining                      UNAVAILABLE           yes     no failure: a worker that is about to stop says so
    ├── DeadlineExceeded              DEADLINE_EXCEEDED     no
    ├── RequestCancelled              CANCELLED             no
    ├── HandoffError                  FAILED_PRECONDITION
    │   ├── LayoutMismatch            FAILED_PRECONDITION   no      names the field that differs
    │   ├── StaleEpoch                FAILED_PRECONDITION   yes
    │   ├── NoRoom                    RESOURCE_EXHAUSTED    yes
    │   ├── UnknownHandoff            NOT_FOUND             yes
    │   ├── TransferFailed            UNAVAILABLE           yes
    │   ├── NotOfThisCluster          UNAVAILABLE           yes     the other process does not prove that it knows our secret
    │   └── DigestMismatch            FAILED_PRECONDITION   yes
    ├── ConfigError                   (CLI: one line, exit 2)
    │   └── ModelLoadError
    └── InternalError                 INTERNAL              yes     a fault of ours, said aloud

Does not know gRPC or HTTP: `rpc.errors` and `router` translate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar

from observability.private import LoggableError

_SHOWN_CHARS = 80


class ErrorCode(StrEnum):
    """The wire-neutral class of an error; values are gRPC's canonical names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    INTERNAL = "INTERNAL"


class DiptychError(LoggableError):
    """Root of the tree. `retryable` says whether another worker may succeed where this one did not."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def logged(self) -> str:
        """See LoggableError."""
        return self.message


class InvalidRequest(DiptychError):
    """The caller's fault: says which field, what it was and what is allowed."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = shown(value)
        super().__init__(f"{field}: got {self.value}, {limit}")
        self.limit = limit

    @property
    def logged(self) -> str:
        """Field and value may be the client's own words."""
        return type(self).__name__

    def at(self, field: str) -> InvalidRequest:
        """The same, of a field that is deeper in what the client sent."""
        moved = InvalidRequest(field, None, self.limit)
        moved.value = self.value
        moved.message = f"{field}: got {self.value}, {self.limit}"
        moved.args = (moved.message,)
        return moved


class ModelNotFound(DiptychError):
    """The request names a model that this deployment does not serve."""

    code = ErrorCode.NOT_FOUND

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"model: {shown(model)} is not served here; known: {', '.join(known) or 'none'}")
        self.model = model[:_SHOWN_CHARS]

    @property
    def logged(self) -> str:
        """Any text may stand where a model's name is asked for."""
        return type(self).__name__


class Unauthenticated(DiptychError):
    """The caller did not prove who it is. The message never has what it presented."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(DiptychError):
    """The caller is known and may not do this."""

    code = ErrorCode.PERMISSION_DENIED


class Overloaded(DiptychError):
    """The bounded queue is full; come back after `retry_after_s`."""

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller has used what it may use for now. `quota` says what is left, in the words of the answer's headers."""

    quota: Mapping[str, str] = MappingProxyType({})  # stays so where the error is rebuilt from a status

    def __init__(self, message: str, retry_after_s: float, quota: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


class Unavailable(DiptychError):
    """No worker can take the request now."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class WorkerLost(Unavailable):
    """A worker went away while it had the request."""


class RetriesSpent(Unavailable):
    """So many requests fail that this one is not tried again; come back after `retry_after_s`."""

    retryable = False
    retry_after_s: float = 1.0  # of the class, too: an error is rebuilt from a status without its constructor


class Draining(DiptychError):
    """This worker is about to stop and does not take the request, or gives it up in good order: it goes on elsewhere.

    No Unavailable: asking the same worker again cannot help.
    """

    code = ErrorCode.UNAVAILABLE
    retryable = True


class DeadlineExceeded(DiptychError):
    """The request's own deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelled(DiptychError):
    """The client left, or somebody aborted the request."""

    code = ErrorCode.CANCELLED


class HandoffError(DiptychError):
    """A hand-off could not go on."""

    code = ErrorCode.FAILED_PRECONDITION
    retryable = True


class LayoutMismatch(HandoffError):
    """Two workers whose KV memory differs; `field` is the first field that does."""

    retryable = False

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"kv layout differs in {field}: ours {ours!r}, theirs {theirs!r}")
        self.field = field


class StaleEpoch(HandoffError):
    """A message for, or from, an earlier life of a worker."""

    def __init__(self, worker_id: str, expected: int, got: int) -> None:
        super().__init__(f"epoch of {worker_id}: expected {expected}, got {got}")


class WorkerIdTaken(DiptychError):
    """Two living workers go by one id; the second to come is refused."""

    code = ErrorCode.FAILED_PRECONDITION

    def __init__(self, worker_id: str, holder: str, asking: str) -> None:
        """`holder` and `asking` are their addresses."""
        super().__init__(
            f"worker id {worker_id!r} is taken: the worker at {holder} has it and is alive, the one at {asking} wants it; "
            "give each worker a --worker-id of its own"
        )


class NoRoom(HandoffError):
    """The decode pool has no free blocks for this hand-off now; `retry_after_s` (0: not said) is when to ask again."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    retry_after_s: float = 0.0  # stays so where the error is rebuilt from a status, without the constructor

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownHandoff(HandoffError):
    """A hand-off id that is not, or no longer, held here."""

    code = ErrorCode.NOT_FOUND


class TransferFailed(HandoffError):
    """Bytes did not arrive: connection lost, window closed, timeout."""

    code = ErrorCode.UNAVAILABLE


class DigestMismatch(HandoffError):
    """Bytes arrived, but not those that were sent: the blocks are worth nothing, another push may go well."""


class NotOfThisCluster(HandoffError):
    """Another process does not prove that it knows the cluster's secret: a stranger, one that was started with another
    secret or none, or a call that was altered or is said again. Nothing was done for it.
    """

    code = ErrorCode.UNAVAILABLE


class ConfigError(DiptychError):
    """A flag, file or environment that cannot work; on the command line one line and exit 2."""

    code = ErrorCode.INVALID_ARGUMENT


class ModelLoadError(ConfigError):
    """A model directory or file that cannot be loaded; says which file and why."""


class InternalError(DiptychError):
    """A fault of ours that costs one request; logged with its traceback where it was raised."""

    retryable = True


def counted(number: int, what: str) -> str:
    """So many of them, for a message: "1 message", "2 messages"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def shown(value: object) -> str:
    """What somebody sent, for a message: readable, on one line, and no longer than a message may be, however large it is.

    In the words of JSON, which every client knows: true, null; what is not there at all is nothing.
    """
    text = "nothing" if value is None else _spelled(value, _SHOWN_CHARS)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _spelled(value: object, room: int) -> str:
    """At least the first `room` characters of it, and not much more."""
    if room < 0:  # so deep in others that nobody sees it
        return "..."
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str() | bytes() if type(value) in (str, bytes):  # others may have another way to be said
            return repr(value[: room + 1])
        case int() if value.bit_length() > 4 * _SHOWN_CHARS:  # Python refuses to spell thousands of digits
            return f"a number of {value.bit_length()} bits"
        case list() | tuple():
            return f"[{_listed((_spelled(one, room - 1) for one in value), room)}]"
        case dict():
            pairs = (f"{_spelled(name, room - 1)}: {_spelled(one, room - 1)}" for name, one in value.items())
            return f"{{{_listed(pairs, room)}}}"
        case _:
            return repr(value)


def _listed(parts: Iterable[str], room: int) -> str:
    taken: list[str] = []
    for part in parts:
        taken.append(part)
        room -= len(part) + 2
        if room < 0:
            break
    return ", ".join(taken)
