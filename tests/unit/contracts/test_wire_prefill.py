"""Messages of a prefill run: what is missing is named, every event comes back the same."""

from __future__ import annotations

import pytest

from contracts.errors import InternalError, InvalidRequest, NoRoom
from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, PrefillEvent, Target
from contracts.request import TokenDelta
from contracts.wire import error_info
from contracts.wire_prefill import event_from_pb, event_to_pb, target_from_pb, target_to_pb
from contracts.worker import WorkerRef
from observability.stages import HandoffStats, StageTimes

REF = types_pb2.WorkerRef(worker_id="d", epoch=3)


def test_a_target() -> None:
    message = prefill_pb2.HandoffTarget(handoff_id="h", decode=REF, address="h:1")
    target = Target("h", WorkerRef("d", 3), "h:1")
    assert target_from_pb(message) == target
    assert target_to_pb(target) == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (prefill_pb2.HandoffTarget(decode=REF, address="h:1"), "target.handoff_id"),
        (prefill_pb2.HandoffTarget(handoff_id="h", decode=REF), "target.address"),
        (prefill_pb2.HandoffTarget(handoff_id="h", address="h:1"), "worker_id"),
    ],
)
def test_what_is_missing_is_named(message: prefill_pb2.HandoffTarget, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        target_from_pb(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (FirstTokens(TokenDelta("r", 0, (5,))), "tokens"),
        (HandedOff("h", HandoffStats("shm", 10), StageTimes(commit_s=0.5)), "handed_off"),
        (HandoffFailed("h", error_info(NoRoom("full")), 3.0), "handoff_failed"),
    ],
)
def test_each_event_comes_back_the_same(event: PrefillEvent, name: str) -> None:
    message = event_to_pb(event, "r")
    assert message.WhichOneof("event") == name
    assert message.request_id == "r"
    assert event_from_pb(message) == event


def test_an_event_that_is_not_known_is_an_error() -> None:
    with pytest.raises(InternalError, match="not known here"):
        event_from_pb(prefill_pb2.PrefillEvent())


def test_a_failure_says_whether_to_retry() -> None:
    failed = event_to_pb(HandoffFailed("h", error_info(NoRoom("full")), 3.0), "r").handoff_failed
    assert (failed.error.code, failed.error.message, failed.error.retryable) == ("RESOURCE_EXHAUSTED", "full", True)
    assert (failed.handoff_id, failed.hold_s) == ("h", 3.0)
