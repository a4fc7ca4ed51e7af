"""Every error of the tree crosses gRPC and comes out as itself, with its facts."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

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
    StaleEpoch,
    Unavailable,
    WorkerIdTaken,
    WorkerLost,
)
from rpc.errors import from_rpc_error, to_status


def as_received(error: DiptychError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(
        grpc.StatusCode[error.code.value], grpc.aio.Metadata(), trailers, details=status.message
    )


SAMPLES: dict[str, DiptychError] = {
    "InvalidRequest": InvalidRequest("top_p", 1.5, "must be at most 1"),
    "ModelNotFound": ModelNotFound("gpt", ("tiny",)),
    "Overloaded": Overloaded("queue is full", retry_after_s=2.5),
    "RateLimited": RateLimited("tokens_per_minute", 2.5, {}),  # what is left of a quota is for this door's answer alone
    "LayoutMismatch": LayoutMismatch("dtype", "float32", "bfloat16"),
    "NoRoom": NoRoom("pool is full", 0.25),
    "StaleEpoch": StaleEpoch("decode-0", 2, 1),
    "WorkerIdTaken": WorkerIdTaken("w", "a:1", "b:1"),
}
ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DiptychError) and kind is not DiptychError
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_class_comes_out_as_itself(kind: type[DiptychError]) -> None:
    error = SAMPLES.get(kind.__name__) or kind("words")
    back = from_rpc_error(as_received(error), "peer")
    assert type(back) is kind
    assert back.message == error.message
    assert back.args == error.args
    assert (back.code, back.retryable) == (error.code, error.retryable)
    facts = vars(back).keys() | vars(error).keys()  # of the instance or, where nothing else was said, of its class
    assert {name: getattr(back, name) for name in facts} == {name: getattr(error, name) for name in facts}


def test_invalid_request_carries_the_field_as_bad_request() -> None:
    details = to_status(SAMPLES["InvalidRequest"]).details
    bad = error_details_pb2.BadRequest()
    assert [detail.Unpack(bad) for detail in details] == [False, True]
    assert bad.field_violations[0].field == "top_p"
    assert "1.5" in bad.field_violations[0].description


def test_overloaded_says_when_to_come_back() -> None:
    retry = error_details_pb2.RetryInfo()
    assert to_status(SAMPLES["Overloaded"]).details[1].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, WorkerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, WorkerLost),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unavailable),
        (grpc.StatusCode.PERMISSION_DENIED, errors.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
    ],
)
def test_a_status_without_details_is_judged_by_its_code(code: grpc.StatusCode, kind: type[DiptychError]) -> None:
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")
    back = from_rpc_error(bare, "10.0.0.1:5")
    assert type(back) is kind
    assert "10.0.0.1:5" in back.message


def test_garbage_in_the_trailers_is_not_believed() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    bare = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="gone")
    assert type(from_rpc_error(bare, "peer")) is WorkerLost


@pytest.mark.parametrize(("said", "kind"), [("Internal error from Core", Unavailable), ("a fault", InternalError)])
def test_a_reason_that_grpc_has_lost_is_no_fault_of_the_peer(said: str, kind: type[DiptychError]) -> None:
    nothing = grpc.aio.Metadata()
    error = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details=said), "peer")
    assert type(error) is kind
    assert "peer" in error.message
