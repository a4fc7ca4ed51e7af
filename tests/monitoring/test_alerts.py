"""Alert rules: promtool checks them and runs their tests; each has one that fires, one that does not, and a paragraph."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.monitoring.prometheus_process import DEPLOYED, binary
from tests.monitoring.queries import DASHBOARDS, panels, uncompared

ALERTS = re.findall(r"^ +- alert: (\w+)$", (DEPLOYED / "rules" / "alerts.yml").read_text(), re.M)
MANUAL = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
TESTS = sorted((DEPLOYED / "tests").glob("*.yml"))


# An alert's expression, on one line or on several, up to what comes after it.
EXPRESSION = re.compile(r"(?<=        expr: )(.+\n|\|\n(?: {10}.+\n)+)(?= {8}(?:for|labels):)")


def run(*words):
    """What promtool says. Its databases, one for each test of a rule, are in memory: on a disk it takes three times as long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        env = {**os.environ, "TMPDIR": memory, "GOGC": "400"}  # noqa: TID251
        command = [binary("promtool"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=DEPLOYED, env=env)


def promtool(*words):
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


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


def test_each_quiet_test_is_quiet_because_of_what_the_alert_compares(tmp_path):
    """Comparisons that let all through at once disturb every test that expects no alert: it asks of series that are there."""
    for folder in ("rules", "tests"):
        shutil.copytree(DEPLOYED / folder, tmp_path / folder)
    rules = tmp_path / "rules" / "alerts.yml"
    text, changed = EXPRESSION.subn(lambda found: uncompared(found[0]), rules.read_text())
    assert changed == len(ALERTS)
    rules.write_text(re.sub(r"for: \w+", "for: 0s", text))
    done = run("test", "rules", *map(str, sorted((tmp_path / "tests").glob("*.yml"))))
    disturbed = re.findall(r"alertname: (\w+), time: \w+, *\n +exp:\[\], *\n +got:\[\n", done.stdout + done.stderr)
    quiet = re.findall(r"alertname: (\w+)\n +exp_alerts: \[\]", "".join(path.read_text() for path in TESTS))
    assert sorted(disturbed) == sorted(quiet)


def test_each_alert_waits_as_long_as_it_is_tested_to_wait(tmp_path):
    """Without its `for` an alert comes too soon for a test, with a longer one too late: else nobody sees one that is changed."""
    for folder in ("rules", "tests"):
        shutil.copytree(DEPLOYED / folder, tmp_path / folder)
    rules = tmp_path / "rules" / "alerts.yml"
    text = rules.read_text()
    waiting = {part.split()[0] for part in text.split("- alert: ")[1:] if re.search(r"^ +for: ", part, re.M)}
    found = {}
    for wait in ("0s", "12h"):
        rules.write_text(re.sub(r"for: \w+", f"for: {wait}", text))
        done = run("test", "rules", *map(str, sorted((tmp_path / "tests").glob("*.yml"))))
        found[wait] = set(re.findall(r"alertname: (\w+), time:", done.stdout + done.stderr))
    assert found == {"0s": waiting, "12h": waiting}


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_paragraph_to_go_by(alert):
    rules = (DEPLOYED / "rules" / "alerts.yml").read_text()
    assert f"runbook: docs/monitoring.md#{alert.lower()}\n" in rules  # the anchor that a heading gets
    found = re.search(rf"^### {alert}\n\n(.+?)(?=^#|\Z)", MANUAL.read_text(), re.M | re.S)
    assert found, f"docs/monitoring.md has no heading {alert}"
    assert len(found[1].split()) >= 30, "what it means, what to look at, what to do"


def test_a_panel_that_a_paragraph_sends_one_to_is_there():
    named = re.findall(r"\*([\w-]+) / ([^*\n]+)\*", MANUAL.read_text())
    boards = {json.loads(path.read_text())["title"].split(" / ")[-1]: panels(path) for path in DASHBOARDS}
    shown = {(board, panel["title"]) for board, found in boards.items() for panel in found}
    assert len(named) >= 10
    assert sorted(set(named) - shown) == []


def test_no_paragraph_is_of_an_alert_that_is_gone():
    headings = re.findall(r"^### (Diptych\w+)$", MANUAL.read_text(), re.M)
    assert sorted(headings) == sorted(ALERTS)
