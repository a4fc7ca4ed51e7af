"""What a router says to a run after its first command: other targets, as long as they are meant for this life and readable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.prefill import Target
from contracts.worker import WorkerRef
from prefill_service.servicer import _listen

OURS = WorkerRef("p", 2)
D = types_pb2.WorkerRef(worker_id="d", epoch=1)


def retarget(handoff_id: str, worker_id: str = "p", epoch: int = 2) -> prefill_pb2.PrefillCommand:
    target = prefill_pb2.HandoffTarget(handoff_id=handoff_id, decode=D, address="d:1")
    meant = types_pb2.WorkerRef(worker_id=worker_id, epoch=epoch)
    return prefill_pb2.PrefillCommand(prefill=meant, retarget=target)


async def heard(*commands: prefill_pb2.PrefillCommand) -> list[Target | None]:
    async def said() -> AsyncIterator[prefill_pb2.PrefillCommand]:
        for command in commands:
            yield command

    targets: asyncio.Queue[Target | None] = asyncio.Queue()
    await _listen(said(), targets, OURS)
    return [targets.get_nowait() for _ in range(targets.qsize())]


async def test_targets_are_passed_on_until_the_router_has_no_more_to_say() -> None:
    expected = [Target(name, WorkerRef("d", 1), "d:1") for name in ("h2", "h3")]
    assert await heard(retarget("h2"), retarget("h3")) == [*expected, None]


@pytest.mark.parametrize(
    "other",
    [
        retarget("h3", epoch=1),
        retarget("h3", epoch=3),
        retarget("h3", worker_id="q"),
        retarget(""),
        prefill_pb2.PrefillCommand(run=prefill_pb2.PrefillRun()),
    ],
    ids=["older life", "newer life", "other worker", "unreadable", "not a target"],
)
async def test_what_is_no_target_for_this_life_ends_them(other: prefill_pb2.PrefillCommand) -> None:
    assert [target and target.handoff_id for target in await heard(retarget("h2"), other, retarget("h4"))] == [
        "h2",
        None,
    ]
