"""What the decision bench makes of arrival times, and what its report says of auto."""

import pytest

from bench.decision import Cell, DecisionBenchConfig, Probe, Situation, Stream, lost_s, quiet_gap
from bench.decision_report import against_better, decision_report
from bench.load import Route

IDLE = Cell(256, 0.0, Situation("idle"))
BUSY = Cell(256, 0.75, Situation("4 streams", streams=4))


def stream(*times_s: float) -> Stream:
    return Stream(times_s=list(times_s))


def test_streams_lose_what_exceeds_their_usual_gap() -> None:
    undisturbed = stream(0.0, 1.0, 2.0, 3.0, 4.0)
    held_up = stream(0.0, 1.0, 4.5, 5.5)
    assert lost_s([undisturbed], 1.5, 2.5, 1.0) == pytest.approx(0.0)
    assert lost_s([held_up], 1.5, 2.5, 1.0) == pytest.approx(2.5)
    assert lost_s([held_up, held_up, undisturbed], 1.5, 2.5, 1.0) == pytest.approx(5.0)


def test_what_a_token_takes_in_quiet_follows_growing_contexts() -> None:
    times_s, at_s = [0.0], 0.0
    while at_s < 10:
        at_s += 0.1 + 0.01 * at_s
        times_s.append(at_s)
    gap = quiet_gap([stream(*times_s)] * 2, [(1.0, 2.0), (4.0, 5.0), (8.0, 9.0)])
    assert gap(6.5) == pytest.approx(0.165, rel=0.03)
    assert quiet_gap([], [(1.0, 2.0)])(1.5) == 0.0


def test_the_interval_of_a_ratio_is_as_wide_as_rounds_differ() -> None:
    steady = {Route.DISAGGREGATED: [1.0] * 9, Route.COLOCATED: [5.0] * 9, Route.ANY: [1.1] * 9}
    result = against_better(steady)
    assert (result.better, result.ratio) == (Route.DISAGGREGATED, pytest.approx(1.1))
    assert result.low == result.high == pytest.approx(1.1)
    # A machine that is slow for some rounds is so for all three ways.
    shared = {
        way: [cost * (3 if number % 2 else 1) for number, cost in enumerate(some)] for way, some in steady.items()
    }
    assert against_better(shared).low == against_better(shared).high == pytest.approx(1.1)
    alone = {**steady, Route.ANY: [1.1 * (3 if number % 2 else 1) for number in range(9)]}
    assert against_better(alone).high == pytest.approx(3.3)


def probes(**costs_s: tuple[float, ...]) -> list[Probe]:
    ways = {"remote": Route.DISAGGREGATED, "local": Route.COLOCATED, "auto": Route.ANY}
    went = {"remote": Route.DISAGGREGATED, "local": Route.COLOCATED, "auto": Route.COLOCATED}
    return [Probe(ways[way], went[way], cost, 0.0) for way, some in costs_s.items() for cost in some]


def test_auto_is_compared_with_the_better_way_of_each_cell_by_medians() -> None:
    found = {
        IDLE: probes(remote=(1.2, 1.3, 9.0), local=(1.0, 1.0, 5.0), auto=(1.1, 1.1, 7.0)),
        BUSY: probes(remote=(2.0, 2.0, 2.0), local=(4.0, 4.0, 4.0), auto=(2.5, 2.5, 0.1)),
    }
    report = decision_report(found, "m", DecisionBenchConfig())
    worst, sure, mean = report.verdicts
    assert (worst.value, worst.met) == (pytest.approx(1.25), False)
    assert (mean.value, mean.met) == (pytest.approx((1.1 + 1.25) / 2), False)
    assert BUSY.name in report.notes[0]
    assert sure.value == pytest.approx(1.1), "of the busy cell one probe in three was cheap, and might be the rule"
    assert BUSY.name in report.notes[1]
    idle, busy = report.tables[0].rows
    assert idle == (IDLE.name, "always local", "1.10 ×", "1.10 to 1.40", "0 of 3")
    assert busy[1:] == ("always remote", "1.25 ×", "0.05 to 1.25", "0 of 3")
    assert len(report.measures) == 6


def test_a_stream_s_loss_counts_by_the_weight() -> None:
    assert Probe(Route.ANY, Route.COLOCATED, 1.0, 4.0).cost_s(0.5) == 3.0


def test_the_grid_is_every_combination() -> None:
    config = DecisionBenchConfig()
    assert len(config.cells) == len(config.rounds) * len(config.cached_shares) * len(config.situations)
    assert len({cell.name for cell in config.cells}) == len(config.cells)
