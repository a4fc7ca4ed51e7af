"""Alert rules: promtool checks them and runs their tests; each has one that fires, one that does not, and a paragraph."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.monitoring.prometheus_process import DEPLOYED, binary

ALERTS = re.findall(r"^ +- alert: (\w+)$", (DEPLOYED / "rules" / "alerts.yml").read_text(), re.M)
MANUAL = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
TESTS = sorted((DEPLOYED / "tests").glob("*.yml"))


def promtool(*words):
    run = subprocess.run([binary("promtool"), *words], capture_output=True, text=True, timeout=100, cwd=DEPLOYED)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_prometheus_takes_rules_and_configurations():
    assert len(ALERTS) >= 20
    assert "FAILED" not in promtool("check", "rules", "--lint-fatal", *map(str, sorted((DEPLOYED / "rules").glob("*"))))
    assert "FAILED" not in promtool("check", "config", "--lint-fatal", "prometheus.yml", "prometheus-dns.yml")


def test_alerts_fire_and_do_not_as_their_tests_say():
    shown = promtool("test", "rules", *map(str, TESTS))
    assert shown.count("SUCCESS") == len(TESTS), shown


def test_each_alert_is_tested_both_ways():
    cases = re.findall(r"alertname: (\w+)\n +exp_alerts:( \[\])?", "".join(path.read_text() for path in TESTS))
    quiet = {name for name, none in cases if none}
    fires = {name for name, none in cases if not none}
    assert quiet == fires == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_paragraph_to_go_by(alert):
    rules = (DEPLOYED / "rules" / "alerts.yml").read_text()
    assert f"runbook: docs/monitoring.md#{alert.lower()}\n" in rules  # the anchor that a heading gets
    found = re.search(rf"^### {alert}\n\n(.+?)(?=^#|\Z)", MANUAL.read_text(), re.M | re.S)
    assert found, f"docs/monitoring.md has no heading {alert}"
    assert len(found[1].split()) >= 30, "what it means, what to look at, what to do"


def test_no_paragraph_is_of_an_alert_that_is_gone():
    headings = re.findall(r"^### (Diptych\w+)$", MANUAL.read_text(), re.M)
    assert sorted(headings) == sorted(ALERTS)
