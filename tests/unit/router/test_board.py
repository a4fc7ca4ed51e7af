"""What the dashboard is fed with: however many come, a snapshot is made once a second."""

import dataclasses

import pytest
from msgspec.structs import replace

from contracts.clock import VirtualClock
from contracts.errors import Overloaded
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from dashboard.feed import MOST_WATCHERS
from dashboard.frames import Frame, Snapshot, WorkerRow, heard
from dashboard.slo import SloConfig
from router.board import Board, worker_rows
from router.config import RegistryConfig
from router.workers.embedded_registry import EmbeddedRegistry


def read(event: bytes) -> Snapshot:
    said = heard(event.removeprefix(b"data: "))
    assert isinstance(said, Snapshot)
    return said


async def test_a_thousand_who_come_in_one_second_cost_one_snapshot():
    clock = VirtualClock()
    board = Board("m", SloConfig(), EmbeddedRegistry(RegistryConfig(), "m", clock), lambda: (1, 2), clock)
    board.tick()
    firsts, turned_away = [], 0
    for _ in range(1000):
        try:
            firsts.append(await anext(aiter(board.watch())))
        except Overloaded:
            turned_away += 1
    assert (len(firsts), turned_away) == (MOST_WATCHERS, 1000 - MOST_WATCHERS)
    assert all(first is firsts[0] for first in firsts)
    assert len(read(firsts[0]).windows) == 1
    board.close()
    with pytest.raises(Overloaded):
        board.watch()


async def test_who_comes_later_is_told_what_has_happened_since():
    clock = VirtualClock()
    board = Board("m", SloConfig(), EmbeddedRegistry(RegistryConfig(), "m", clock), lambda: (1, 2), clock)
    for seconds in range(3):
        watcher = board.watch()
        assert len(read(await anext(aiter(watcher))).windows) == seconds
        board.leave(watcher)
        board.tick()


async def test_watchers_are_told_all_anew_when_the_time_of_day_is_set_back(monkeypatch):
    clock, wall_s = VirtualClock(), [1_700_000_000.0]
    monkeypatch.setattr("router.board.time.time", lambda: wall_s[0])
    board = Board("m", SloConfig(), EmbeddedRegistry(RegistryConfig(), "m", clock), lambda: (1, 2), clock)
    events = aiter(board.watch())
    await anext(events)
    for step_s, kind in ((1.0, Frame), (-3600.0, Snapshot), (1.0, Frame)):
        wall_s[0] += step_s
        board.tick()
        assert isinstance(heard((await anext(events)).removeprefix(b"data: ")), kind)


async def test_a_worker_is_told_of_as_it_was_last_heard_and_its_silence_as_well():
    clock = VirtualClock()
    registry = EmbeddedRegistry(RegistryConfig(5.0, 0.5), "m", clock)
    board = Board("m", SloConfig(), registry, lambda: (1, 2), clock)
    layout = KVLayout("m", "float32", 1, 1, 8, 16)
    info = WorkerInfo(WorkerRef("d0", 77), WorkerKind.DECODE, "a:1", "m", layout, ("shm", "tcp"), 100, 10, 64, 8)
    load = WorkerLoad(WorkerState.READY, 1, 2, 30, 0.25, 0.004, 500.0)
    row = WorkerRow("d0", "decode", "ready", 77, "a:1", 2, 1, 30, 8, 0.25, 10, ("shm", "tcp"), 4.0, 500.0)
    await registry.announce(info, load)
    assert worker_rows(registry) == [row]
    await clock.advance(2.6)
    assert worker_rows(registry) == [replace(row, state="silent")]
    await registry.announce(info, load)
    registry.suspect(info.ref)
    assert worker_rows(registry) == [replace(row, state="suspect")]
    await registry.announce(info, dataclasses.replace(load, state=WorkerState.DRAINING))
    assert [told.state for told in worker_rows(registry)] == ["draining"]
    board.tick()
    watcher = board.watch()
    (window,) = read(await anext(aiter(watcher))).windows
    assert (window.running, window.waiting) == (1, 2)
    board.close()
