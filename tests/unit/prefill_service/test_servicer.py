"""Messages of the prefill door: what is missing is named, every event has its message."""

from __future__ import annotations

import pytest

from contracts.errors import InvalidRequest, NoRoom
from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.request import TokenDelta
from contracts.worker import WorkerRef
from observability.stages import HandoffStats, StageTimes
from prefill_service.events import FirstTokens, HandedOff, HandoffFailed, RunEvent, Target
from prefill_service.servicer import event_to_pb, target_from_pb

REF = types_pb2.WorkerRef(worker_id="d", epoch=3)


def test_a_target() -> None:
    message = prefill_pb2.HandoffTarget(handoff_id="h", decode=REF, address="h:1")
    assert target_from_pb(message) == Target("h", WorkerRef("d", 3), "h:1")


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
        (HandoffFailed("h", NoRoom("full"), 3.0), "handoff_failed"),
    ],
)
def test_each_event_has_its_message(event: RunEvent, name: str) -> None:
    assert event_to_pb(event).WhichOneof("event") == name


def test_a_failure_says_whether_to_retry() -> None:
    failed = event_to_pb(HandoffFailed("h", NoRoom("full"), 3.0)).handoff_failed
    assert (failed.error.code, failed.error.message, failed.error.retryable) == ("RESOURCE_EXHAUSTED", "full", True)
    assert (failed.handoff_id, failed.hold_s) == ("h", 3.0)
