"""Windows, boards and the crew: what a frame says of a second, and that all of it stays bounded."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.frames import Frame, HandoffRow, Snapshot, WorkerRow, event, heard
from dashboard.history import GONE, GONE_FOR_S, LOOK_S, SPAN_S, Crew, History, Instant, Title
from dashboard.requests import EACH_SECOND, FAILED, RECENT, SLOWEST
from dashboard.slo import SloConfig
from tests.unit.dashboard.finished import finished

WALL = 1_700_000_000.0


def history(**limits) -> History:
    return History(Title("m", "1", WALL), SloConfig(**limits))


def at(second: float) -> Instant:
    return Instant(second, WALL + second)


def test_a_window_counts_its_second_and_only_it():
    told = history()
    told.delivered(0.04, 2)
    told.delivered(0.03, 1)
    told.ended(finished())
    told.ended(finished(outcome="UNAVAILABLE", ttft_s=None, handoff=False))
    told.ended(finished(outcome="CANCELLED", ttft_s=None, handoff=False))
    told.ended(finished(outcome="INVALID_ARGUMENT", ttft_s=None, handoff=False))
    window = told.tick(at(1), (), 4, 5).window
    assert (window.t, window.tokens, window.finished, window.failed, window.good) == (WALL + 1, 4, 4, 2, 1)
    assert window.excused == 2  # the one that was left, and the one that asked for what there is not
    assert (window.running, window.waiting) == (4, 5)
    assert window.ttft.p50 == window.ttft.p99 == 50.0
    assert window.itl.p50 == pytest.approx(25.0)  # two tokens that came together took half of it each
    assert window.handoff.p99 == pytest.approx(21.0)  # transfer, commit and queue, not the first step
    assert window.unexplained.p50 == pytest.approx(5.0)
    assert window.second_unexplained.p50 == pytest.approx(4.0)
    after = told.tick(at(2), (), 0, 0).window
    assert (after.tokens, after.finished, after.good) == (0, 0, 0)
    assert after.ttft == window.ttft  # of the last LOOK_S


@pytest.mark.parametrize("step_s", [-3600.0, -1.0, 3600.0, 0.0])
def test_times_rise_however_the_time_of_day_is_set(step_s):
    told = history()
    for second in range(1, 6):
        told.ended(finished(f"r{second}", at_s=second - 0.5))
        told.ended(finished(outcome="UNAVAILABLE", ttft_s=None, at_s=second - 0.5))
        told.tick(at(second), (), 0, 0)
    frame = told.tick(Instant(6.0, WALL + 6.0 + step_s), (), 0, 0)
    said = told.snapshot()
    times = [window.t for window in said.windows]
    assert times == sorted(set(times)) and times[-1] == frame.window.t == WALL + 6.0 + step_s
    assert told.redated == (step_s < 0)
    if told.redated:  # all of it is dated anew: it is as long ago as it was
        assert times == [WALL + second + step_s for second in range(1, 7)]
        for rows in (said.requests, said.slowest, said.failed):
            assert sorted({frame.window.t - row.t for row in rows}) == [1.5, 2.5, 3.5, 4.5, 5.5]
    told.tick(Instant(7.0, WALL + 7.0 + step_s), (), 0, 0)
    assert not told.redated


def test_stages_that_say_too_much_are_as_unexplained_as_those_that_say_too_little():
    told = history()
    told.ended(finished())
    told.ended(finished(ttft_s=0.03, gap_s=0.02))  # 15 ms of the first token, 10 of the gap beyond what there was
    window = told.tick(at(1), (), 0, 0).window
    assert (window.unexplained.p99, window.second_unexplained.p99) == (pytest.approx(14.9), pytest.approx(9.94))


def test_percentiles_forget():
    told = history()
    told.ended(finished())
    for second in range(LOOK_S):
        assert told.tick(at(second), (), 0, 0).window.ttft is not None
    assert told.tick(at(LOOK_S), (), 0, 0).window.ttft is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({}, True),
        ({"ttft_s": 0.05}, True),
        ({"ttft_s": 0.049}, False),
        ({"itl_s": 0.099}, False),
        ({"itl_s": None, "e2e_s": 1.0}, False),
        ({"ttft_s": None, "itl_s": None}, True),
    ],
)
def test_goodput_is_within_every_limit(limits, good):
    told = history(**{"itl_s": 0.101, **limits})
    told.ended(finished())
    assert told.tick(at(1), (), 0, 0).window.good == good


def test_a_row_tells_the_story_and_who_failed_is_on_its_board():
    told = history()
    way = {"prefill": "p0", "decode": "d0", "reason": "cheaper", "remote_s": 0.1, "num_failures": 2, "num_moves": 3}
    first = finished("one", at_s=0.5, **way)
    told.ended(replace(first, sample=replace(first.sample, num_failed_handoffs=5)))
    told.ended(finished("two", outcome="UNAVAILABLE", ttft_s=None, at_s=0.6))
    frame = told.tick(at(1), (), 0, 0)
    two, one = frame.requests
    assert (one.n, one.id, one.prefill, one.decode, one.failures, one.t) == (1, "one", "p0", "d0", 2, WALL + 0.5)
    assert one.stages["prefill_compute"] == 30.0
    assert sum(
        one.stages[s] for s in ("admission", "tokenise", "route", "prefill_queue", "prefill_compute", "emit")
    ) + (one.unexplained) == pytest.approx(one.ttft)
    assert one.second == 34.0
    assert one.second_unexplained == pytest.approx(34 - 6 - 7 - 8 - 9)
    assert one.handoff == HandoffRow("shm", 2_000_000, 3, 1, 1.0, 0.5, 2.0)
    assert (one.moves, one.failed_handoffs) == (3, 5)
    assert (one.prompt_tokens, one.cached_tokens, one.output_tokens, one.gap, one.e2e) == (100, 16, 11, 100.0, 1050.0)
    assert (one.decision.reason, one.decision.remote, one.decision.local) == ("cheaper", 100.0, None)
    assert frame.failed == (two,)
    assert not two.ok
    assert frame.slowest == (one,)
    assert told.tick(at(2), (), 0, 0).slowest is None  # unchanged


def test_what_is_slow_is_forgotten_after_a_while():
    told = history()
    told.ended(finished())
    told.tick(at(1), (), 0, 0)
    assert told.tick(at(SPAN_S + 2), (), 0, 0).slowest == ()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.floats(0.001, 9)), max_size=80), max_size=12))
def test_whatever_comes_it_is_bounded_and_the_slowest_and_failed_are_shown(seconds):
    told, seen = history(), []
    for second, requests in enumerate(seconds):
        for ok, ttft_s in requests:
            told.ended(finished(ttft_s=ttft_s, e2e_s=10.0, outcome="stop" if ok else "INTERNAL", at_s=second))
        frame = told.tick(at(second), (), 0, 0)
        if len(requests) <= EACH_SECOND:
            assert len(frame.requests) == len(requests)
        assert len(frame.requests) <= EACH_SECOND
        assert frame.window.finished == len(requests)
        if requests:
            assert max(ttft for _, ttft in requests) * 1e3 == pytest.approx(
                max(r.ttft for r in frame.requests), abs=1e-3
            )
        if any(not ok for ok, _ in requests):
            assert any(not r.ok for r in frame.requests)
        seen += [r.n for r in frame.requests]
    snapshot = told.snapshot()
    assert len(seen) == len(set(seen))
    assert len(snapshot.requests) <= RECENT
    assert len(snapshot.slowest) <= SLOWEST
    assert len(snapshot.failed) <= FAILED
    ttfts = [r.ttft for r in snapshot.slowest]
    assert ttfts == sorted(ttfts, reverse=True)


def test_a_snapshot_is_what_the_frames_were():
    told = history()
    frames = []
    for second in range(SPAN_S + 5):
        if second % 7 == 0:
            told.ended(finished(str(second), at_s=second))
        frames.append(told.tick(at(second), (row("p0"),), 1, 0))
    snapshot = told.snapshot()
    assert snapshot.windows == tuple(f.window for f in frames[-SPAN_S:])
    newest = [r for f in reversed(frames) for r in f.requests][:RECENT]
    assert list(snapshot.requests) == newest
    assert snapshot.workers == frames[-1].workers


def test_what_is_said_is_heard():
    told = history()
    told.ended(finished("x"))
    frame = told.tick(at(1), (row("p0"),), 1, 0)
    for said, kind in ((frame, Frame), (told.snapshot(), Snapshot)):
        assert event(said).startswith(b"data: {") and event(said).endswith(b"}\n\n")
        assert heard(event(said)[6:]) == said
        assert isinstance(heard(event(said)[6:]), kind)


def row(name: str, pool: str = "decode", state: str = "ready") -> WorkerRow:
    return WorkerRow(name, pool, state, 1, running=3, kv=0.5)


def test_who_has_gone_is_shown_for_a_while_and_who_comes_back_is_there():
    crew = Crew()
    assert [r.id for r in crew.seen([row("d1"), row("d0"), row("p0", "prefill")], 0)] == ["p0", "d0", "d1"]
    gone = crew.seen([row("d1"), row("p0", "prefill")], 1)[1]
    assert (gone.id, gone.state, gone.running, gone.kv) == ("d0", GONE, 0, 0.0)
    assert [r.state for r in crew.seen([row("d1")], 2)] == [GONE, GONE, "ready"]
    assert [r.state for r in crew.seen([row("d1"), row("d0")], 3)] == [GONE, "ready", "ready"]
    assert [r.id for r in crew.seen([row("d1"), row("d0")], 2 + GONE_FOR_S)] == ["d0", "d1"]
