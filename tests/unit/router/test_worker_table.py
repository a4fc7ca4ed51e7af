"""The table of workers where a registry holds it: silence means nothing then, and what was known stays known."""

import contextlib
from dataclasses import replace

import pytest

from contracts.clock import VirtualClock
from contracts.errors import Overloaded, StaleEpoch
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.config import RegistryConfig
from router.workers.registry import ChangeKind
from router.workers.worker_table import MAX_WORKERS, WorkerTable

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16)
TTL_S, QUIET_S = 5.0, 3.0
REF = WorkerRef("a", 1)


def info(epoch=1, address="a:1"):
    return WorkerInfo(WorkerRef("a", epoch), WorkerKind.DECODE, address, "m", LAYOUT, ("local",), 100, 10)


@pytest.fixture
def kept():
    clock = VirtualClock()
    table = WorkerTable(RegistryConfig(TTL_S, QUIET_S / TTL_S), "m", clock)
    changes = []
    table.subscribe(lambda change: changes.append((change.kind, change.info.ref.epoch)))
    return table, clock, changes


def is_ready(table):
    return bool(table.ready(WorkerKind.DECODE))


async def test_while_held_nobody_grows_older_and_afterwards_all_have_time_to_speak(kept):
    table, clock, changes = kept
    table.announce(info(), WorkerLoad())
    await clock.advance(2)
    table.hold()
    await clock.advance(1000)
    table.hold()
    table.expire()
    assert is_ready(table)
    table.resume()
    table.resume()
    await clock.advance(QUIET_S)
    assert is_ready(table)
    await clock.advance(0.1)
    assert not is_ready(table)
    await clock.advance(TTL_S - QUIET_S)
    table.expire()
    assert [kind for kind, _ in changes] == [ChangeKind.JOINED, ChangeKind.LOST]


async def test_who_was_quiet_before_is_not_offered_while_held_nor_afterwards(kept):
    table, clock, _ = kept
    table.announce(info(), WorkerLoad())
    await clock.advance(QUIET_S + 1)
    table.hold()
    await clock.advance(1000)
    assert not is_ready(table)
    assert table.workers()
    table.resume()
    assert not is_ready(table)
    assert table.workers()
    table.announce(info(), WorkerLoad())
    assert is_ready(table)


async def test_a_suspect_is_acquitted_by_its_connection_while_held_only_and_after_a_while(kept):
    table, clock, _ = kept
    table.announce(info(), WorkerLoad())
    table.suspect(REF)
    await clock.advance(2)
    table.acquit(REF)
    assert not is_ready(table), "its word says more, and it can be heard"
    table.hold()
    table.suspect(REF)
    table.acquit(REF)
    assert not is_ready(table)
    await clock.advance(1)
    table.acquit(WorkerRef("a", 2))
    assert not is_ready(table), "another life was meant"
    table.acquit(REF)
    assert is_ready(table)
    table.suspect(REF)
    assert not is_ready(table)


async def test_what_is_looked_up_says_nothing_new_of_whom_more_is_known(kept):
    table, clock, changes = kept
    await clock.advance(10)
    table.announce(info(), WorkerLoad(num_running=1), 1.0)
    table.announce(info(), WorkerLoad(num_running=2), 2.0)
    assert table.workers()[0].load.num_running == 1, "an older word than the last"
    table.suspect(REF)
    table.announce(info(), WorkerLoad(), 0.5)
    assert not is_ready(table), "it may have died since"
    table.announce(info(), WorkerLoad())
    assert is_ready(table)
    assert changes == [(ChangeKind.JOINED, 1)]


async def test_a_registry_that_judged_whose_the_id_is_is_believed(kept):
    table, _, changes = kept
    table.announce(info(), WorkerLoad())
    table.announce(info(2, "b:1"), WorkerLoad(), judged=True)
    assert [(kind.value, epoch) for kind, epoch in changes] == [("joined", 1), ("lost", 1), ("joined", 2)]


async def test_more_workers_than_a_router_can_drive_are_refused_and_those_that_are_there_are_not(kept):
    table, clock, _ = kept
    for number in range(MAX_WORKERS):
        table.announce(replace(info(), ref=WorkerRef(f"w{number}", 1)), WorkerLoad())
    with pytest.raises(Overloaded, match="4096"):
        table.announce(info(), WorkerLoad())
    table.announce(replace(info(), ref=WorkerRef("w7", 2)), WorkerLoad())
    await clock.advance(TTL_S + 1)
    table.expire()
    table.announce(info(), WorkerLoad())
    assert len(table.workers()) == 1


async def test_a_forged_farewell_keeps_a_living_worker_out_for_a_while_only(kept):
    table, clock, _ = kept
    table.announce(info(), WorkerLoad())
    table.leave(REF)
    spoken = 0
    while not is_ready(table):
        await clock.advance(1)
        spoken += 1
        with contextlib.suppress(StaleEpoch):
            table.announce(info(), WorkerLoad())
    assert spoken <= 2 * TTL_S + 1
