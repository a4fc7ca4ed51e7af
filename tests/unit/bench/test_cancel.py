"""What looks at two workers' counters say about when their blocks were free."""

from __future__ import annotations

import time

import pytest
from prometheus_client import generate_latest

from bench.cancel import (
    BEYOND_STEP_BAR_MS,
    CancelBenchConfig,
    Freed,
    Moment,
    Watch,
    WorkerLook,
    cancel_report,
    freed,
    step_under_way,
    worker_look,
)
from bench.cluster import ServedCluster, ServedProcess
from bench.load import Protocol as Surface
from observability.worker_metrics import WorkerMetrics


def looks(*held: bool, step_s: float = 0.0, every_s: float = 0.01) -> list[WorkerLook]:
    return [WorkerLook(i * every_s, h, h, float(i), i * step_s) for i, h in enumerate(held)]


def test_a_workers_own_page_is_read() -> None:
    metrics = WorkerMetrics("m", "decode")
    metrics.watch(lambda: (0.0, 0.0, 0.0, 0.25, 0.0), lambda: (0, 0))
    metrics.step(0.5, 0.4, (1, 8, 1), 0)
    metrics.step(0.25, 0.2, (1, 8, 1), 0)
    assert worker_look(3.0, generate_latest(metrics.registry)) == WorkerLook(3.0, True, True, 2.0, 0.75)
    idle = WorkerMetrics("m", "decode")
    idle.watch(lambda: (0.0, 0.0, 0.0, 0.0, 0.0), lambda: (0, 0))
    assert worker_look(1.0, generate_latest(idle.registry)) == WorkerLook(1.0, False, False, 0.0, 0.0)


def test_free_is_the_first_look_after_the_last_that_saw_something() -> None:
    """A worker that looked free in between was not: the request was still on its way to it."""
    got = freed({"prefill": looks(False, True, False, True, False, False), "decode": looks(*[False] * 6)}, 0.005)
    assert got == pytest.approx(Freed(0.035, 0.035, 0.0))


def test_the_worse_worker_counts_less_its_own_step() -> None:
    slow = looks(True, True, True, True, True, False, step_s=0.04)
    quick = looks(True, True, True, False, False, False)
    got = freed({"prefill": quick, "decode": slow}, 0.0)
    assert (got.free_s, got.step_s, got.beyond_step_s) == pytest.approx((0.03, 0.0, 0.03)), (
        "0.05 s is one step and 0.01 s"
    )
    assert freed({"prefill": looks(False, False)}, 0.0) == Freed(0.0, 0.0, 0.0)


def test_the_step_under_way_is_the_one_that_ended_next() -> None:
    """Not the mean of the run: short steps before, when there were fewer requests, say nothing about it."""
    seen = [WorkerLook(0.0, True, True, 7.0, 1.0), WorkerLook(0.1, True, True, 7.0, 1.0)]
    seen += [WorkerLook(0.3, True, True, 8.0, 1.25), WorkerLook(0.4, False, False, 9.0, 1.26)]
    assert step_under_way(seen, 0.15) == pytest.approx(0.25)
    assert step_under_way(seen, 0.35) == pytest.approx(0.01)
    assert step_under_way(seen, 0.5) == 0.0  # none ended after it


def test_a_worker_is_quiet_when_several_looks_in_a_row_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(ServedCluster("http://h:1", "h:2", "tiny", (ServedProcess("decode", 1, "http://h:3"),)), 0.01)
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    for seen, quiet in (
        (looks(True, False, False), False),
        (looks(True, False, False, False), True),
        (looks(True), False),
    ):
        watch.looks["decode"] = seen
        assert watch.all_quiet(0.5) is quiet
    monkeypatch.setattr(time, "monotonic", lambda: 0.3)
    watch.looks["decode"] = looks(True, False, False, False)
    assert not watch.all_quiet(0.5)


def test_the_report_holds_the_worst_of_each_surface_against_the_bar() -> None:
    runs = {
        (Surface.GRPC, 1, Moment.SENT): [Freed(0.02, 0.01, 0.01), Freed(0.03, 0.02, 0.01)],
        (Surface.SSE, 200, Moment.DECODE): [Freed(0.2, 0.15, 0.05)],
    }
    report = cancel_report(runs, "tiny", CancelBenchConfig())
    assert {v.name.rpartition(", ")[2]: (round(v.value), v.met) for v in report.verdicts} == {
        "grpc": (20, True),
        "sse": (150, False),
    }
    assert BEYOND_STEP_BAR_MS == 100.0
    assert len(report.measures) == 4
