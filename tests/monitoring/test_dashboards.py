"""Dashboards are what Grafana 10 and later load: their structure, without a Grafana."""

import json
import re
from itertools import combinations

import pytest

from observability import names
from observability.stages import GAP_STAGES, TTFT_STAGES
from tests.monitoring.queries import DASHBOARDS, panels, queries, selectors, summed_over_lifetimes, variables

RULES = sorted((DASHBOARDS[0].parents[2] / "prometheus" / "rules").glob("*.yml"))
TYPES = {"timeseries", "stat", "heatmap", "row"}
of_each = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


@of_each
def test_it_can_be_loaded_and_found(path):
    board = json.loads(path.read_text())
    assert board["uid"] == f"diptych-{path.stem}"
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert board["schemaVersion"] >= 36  # Grafana 9 and later; later ones migrate it
    assert board["title"]
    assert "diptych" in board["tags"]  # what its links to the others go by
    assert board["links"][0]["includeVars"]
    assert "id" not in board  # of one Grafana's database; with it the file cannot be provisioned in another
    assert "__inputs" not in board  # asked of a person who imports by hand; nobody is there when it is provisioned


def test_no_two_are_the_same():
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len(boards) >= 5
    for key in ("uid", "title"):
        assert len({board[key] for board in boards}) == len(boards)


@of_each
def test_every_panel_is_of_the_chosen_data_source_and_says_what_it_shows(path):
    shown = [panel for panel in panels(path) if panel["type"] != "row"]
    assert len(shown) >= 6
    ids = [panel["id"] for panel in panels(path)]
    assert len(set(ids)) == len(ids)
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in shown:
        assert panel["type"] in TYPES, panel["title"]
        assert panel["title"]
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["datasource"] == chosen
        assert "unit" in panel["fieldConfig"]["defaults"], panel["title"]
        assert panel["targets"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for target in panel["targets"]:
            assert target["datasource"] == chosen
            assert target["legendFormat"], panel["title"]


@of_each
def test_no_panel_lies_over_another_or_outside(path):
    def cells(panel):
        p = panel["gridPos"]
        return {(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}

    shown = panels(path)
    for panel in shown:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
    for one, other in combinations(shown, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


@of_each
def test_every_variable_is_there_and_used(path):
    board = json.loads(path.read_text())
    there = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps([board["panels"], board["annotations"], board["templating"]])
    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == there
    assert {"datasource", "model", "router"} <= there


@of_each
def test_rates_not_lifetime_means(path):
    """By the endings of names; test_scraped knows the kinds. Ranges follow the zoom and the scrape interval, by Grafana."""
    endings = ("_total", "_sum", "_count", "_bucket")
    for query in queries(path):
        counted = {s.name for s in selectors(query.expr) if s.name.endswith(endings)}
        assert summed_over_lifetimes(query.expr, counted) == [], query
        for selector in selectors(query.expr):
            assert selector.span in ("", "[$__rate_interval]"), query


def test_the_stacks_of_stages_have_all_stages_and_only_those():
    (path,) = (path for path in DASHBOARDS if path.stem == "stages")
    shown = {panel["title"]: panel["targets"][0]["expr"] for panel in panels(path) if panel["type"] == "timeseries"}
    for title, stages in (
        ("TTFT by stage, mean", (*TTFT_STAGES, "ttft_unexplained")),
        ("TTFT by stage, p99", (*TTFT_STAGES, "ttft_unexplained")),
        ("Second token's gap by stage, mean", (*GAP_STAGES, "gap_unexplained")),
        ("Second token's gap by stage, p99", (*GAP_STAGES, "gap_unexplained")),
    ):
        (named,) = re.findall(r'stage=~"([\w|]+)"', shown[title])
        assert tuple(named.split("|")) == stages, title


def test_every_name_is_one_that_a_process_is_said_to_have():
    """What a process really exports is seen where Prometheus is installed, in test_scraped."""
    parts = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {metric.name + part for metric in names.ALL for part in parts[metric.kind.value]}
    recorded = set(re.findall(r"record: (\S+)", "".join(path.read_text() for path in RULES)))
    texts = [(path, query.expr) for path in DASHBOARDS for query in queries(path) + variables(path)]
    # Without comments and words: names in them are looked for by people.
    texts += [(path, re.sub(r"#.*|summary:.*|runbook:.*", "", path.read_text())) for path in RULES]
    asked = {(path.name, selector.name) for path, text in texts for selector in selectors(text)}
    assert len(asked) > 80
    assert [(place, name) for place, name in sorted(asked) if name not in known | recorded | {"up"}] == []


def test_a_lifetime_mean_would_be_seen():
    mean = "sum(diptych_ttft_seconds_sum{a='b'}) / sum(rate(diptych_ttft_seconds_count[5m]))"
    assert summed_over_lifetimes(mean, {"diptych_ttft_seconds_sum", "diptych_ttft_seconds_count"}) == [
        "diptych_ttft_seconds_sum"
    ]
