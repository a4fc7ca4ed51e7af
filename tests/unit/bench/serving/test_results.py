"""What a sweep looks like: its table, its plots' axes and its page have each measure's own numbers."""

from __future__ import annotations

import math
import re

import pytest

from bench.serving.drive import LoadRun
from bench.serving.measures import METRICS, measure, parse_limits
from bench.serving.page import page
from bench.serving.plots import Across, across_of
from bench.serving.requests import Outcome
from bench.serving.results import Results, table
from bench.serving.serve import Point
from tests.unit.bench.serving.test_drive import outcome

SOON, LATE = Point(4.0, None), Point(8.0, None)


def fields_of(*outcomes: Outcome) -> dict[str, object]:
    run = LoadRun(outcomes, 0.0, 2.0)
    measured = measure(run, parse_limits(["e2el:1000"]), (50.0, 99.0))
    said = {"model_id": "m", "backend": "b", "dataset_name": "random", "num_prompts": len(outcomes), "errors": []}
    return {**said, **measured}


# TTFT, TPOT, ITL and E2EL are 100, 150, 300 and 400 ms: one event has two tokens.
KNOWN = fields_of(outcome(0.0, 0.0, 0.1, 0.4, tokens=3))
ONE_TOKEN = fields_of(outcome(0.0, 0.005, 0.1))
SHOWN = {"ttft": "100.00", "tpot": "150.00", "itl": "300.00", "e2el": "400.00"}


def test_each_line_of_the_table_is_of_its_own_measure() -> None:
    said = table(Results("x", ((SOON, KNOWN),)))  # type: ignore[arg-type]
    assert re.search(r"^ms +mean +median +std +p50 +p99$", said, re.M)
    for metric, value in SHOWN.items():
        assert re.search(rf"^{metric} +{value} +{value} +0.00 +{value} +{value}$", said, re.M), said
    assert "goodput 0.50 requests/s" in said and "the client was late" not in said


def test_what_was_not_measured_is_a_dash_and_a_late_client_is_told_of() -> None:
    said = table(Results("x", ((SOON, ONE_TOKEN),)))  # type: ignore[arg-type]
    assert re.search(r"^tpot( +-){5}$", said, re.M), said
    assert "the client was late: it sent requests 5.00 ms after they were due" in said
    closed = table(Results("x", ((Point(math.inf, 4), ONE_TOKEN),)))  # type: ignore[arg-type]
    assert "late" not in closed


def test_the_page_has_each_measure_under_its_own_heading() -> None:
    html = page("x", ((SOON, KNOWN), (LATE, ONE_TOKEN)), ())  # type: ignore[arg-type]
    for metric in METRICS:
        cells = re.findall(r"<td>([^<]*)</td>", html.split(f"<h2>{metric.upper()}, ms</h2>")[1].split("</table>")[0])
        assert cells[:6] == [
            "rate-4",
            *(SHOWN[metric] if name != "std" else "0.00" for name in ("", "", "std", "", "")),
        ]
        assert cells[6] == "rate-8" and (cells[7] == "–") == (metric in ("tpot", "itl"))


@pytest.mark.parametrize(
    ("points", "across"),
    [
        ((Point(1.0, None), Point(8.0, None)), Across("requests/s sent", [1.0, 8.0])),
        ((Point(math.inf, 2), Point(math.inf, 16)), Across("requests at once", [2.0, 16.0])),
        ((Point(1.0, None), Point(math.inf, None)), Across("", ["rate-1", "rate-inf"])),
        ((Point(1.0, 2), Point(2.0, 4)), Across("", ["rate-1-concurrency-2", "rate-2-concurrency-4"])),
        ((Point(None, None),), Across("", ["rate-trace"])),
    ],
)
def test_plots_go_along_the_number_that_alone_differs(points: tuple[Point, ...], across: Across) -> None:
    assert across_of(points) == across


def test_points_of_nearly_the_same_rate_have_names_of_their_own() -> None:
    assert Point(1.0000001, None).label != Point(1.0, None).label
