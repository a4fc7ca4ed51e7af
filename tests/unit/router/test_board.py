"""What the dashboard is fed with: however many come, a snapshot is made once a second."""

import pytest

from contracts.clock import VirtualClock
from contracts.errors import Overloaded
from dashboard.feed import MOST_WATCHERS
from dashboard.frames import Frame, Snapshot, heard
from dashboard.slo import SloConfig
from router.board import Board
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
