"""What is written can be read again, says met or missed rightly, and names no machine."""

import getpass
import platform

import pytest

from bench.machine import CpuSeconds, cpu_seconds, foreign_percent, machine_facts
from bench.report import Measure, Record, Report, Verdict, joined, markdown, number, read_all, write
from contracts.errors import ConfigError

REPORT = Report(
    name="speed",
    title="Speed",
    command="python -m bench speed",
    method="Ran it.",
    measures=(Measure("decode", "ms", (3.0, 1.0, 2.0)),),
    verdicts=(
        Verdict("fast enough", 2.5, "x", bar=2.0, at_least=True),
        Verdict("small enough", 2.5, "ms", bar=2.0, at_least=False),
    ),
    notes=("a note",),
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = Record(machine_facts(), REPORT, 1.5)
    write(record, tmp_path)
    assert read_all(tmp_path) == [record]


def test_a_record_of_another_version_is_named(tmp_path):
    (tmp_path / "old.json").write_text('{"report": {}}')
    with pytest.raises(ConfigError, match=r"old\.json"):
        read_all(tmp_path)


def test_the_page_has_the_median_the_bars_and_the_note(tmp_path):
    page = markdown(Record(machine_facts(), REPORT, 1.5))
    assert "| decode | ms | 2.00 | 1.00 | 3.00 | 3 |" in page
    assert "| fast enough | 2.50 x | ≥ 2.00 x | met |" in page
    assert "| small enough | 2.50 ms | ≤ 2.00 ms | **missed** |" in page
    assert "* a note" in page
    assert "other work took 1.5 % of the cores" in page


def test_the_summary_covers_every_record(tmp_path):
    facts = machine_facts()
    write(Record(facts, REPORT, 1.5), tmp_path)
    write(Record(facts, Report("plain", "Plain", "x", "y", (Measure("a", "s", (1.0,)),)), 0.0), tmp_path)
    summary = (tmp_path / "README.md").read_text()
    assert "fast enough" in summary
    assert "small enough" in summary
    assert "plain.md" in summary


def test_joined_reports_keep_every_row_under_its_label():
    both = joined([("a", REPORT), ("b", REPORT)])
    assert [m.name for m in both.measures] == ["a: decode", "b: decode"]
    assert [v.name for v in both.verdicts[::2]] == ["a: fast enough", "b: fast enough"]
    assert both.measures[1].runs == REPORT.measures[0].runs
    assert both.name == REPORT.name


def test_a_noisy_machine_is_told_on_both_pages(tmp_path):
    quiet, noisy = (Record(machine_facts(), REPORT, percent) for percent in (4.9, 5.1))
    assert "Other work" not in markdown(quiet)
    assert "Other work" in markdown(noisy)
    write(noisy, tmp_path)
    assert "noisy machine" in (tmp_path / "README.md").read_text()


def test_a_bar_counts_as_met_when_it_is_just_reached():
    assert Verdict("x", 2.0, "", bar=2.0, at_least=True).met
    assert Verdict("x", 2.0, "", bar=2.0, at_least=False).met
    assert not Verdict("x", 1.999, "", bar=2.0, at_least=True).met


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.01234, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_are_readable(value, shown):
    assert number(value) == shown


def test_the_facts_do_not_name_the_machine():
    facts = repr(machine_facts())
    assert platform.node() not in facts
    assert "/" + getpass.getuser() not in facts
    assert machine_facts().cores >= 1


def test_foreign_work_is_what_is_busy_but_not_ours():
    begin, end = CpuSeconds(10.0, 100.0, 50.0), CpuSeconds(20.0, 112.0, 55.0)
    assert foreign_percent(begin, end, cores=2) == 35.0
    assert (
        foreign_percent(begin, CpuSeconds(20.0, 104.9, 55.0), cores=2) == 0.0
    )  # the counters' grain is no foreign work
    assert foreign_percent(begin, begin, cores=2) == 0.0


def test_cpu_seconds_grow():
    begin = now = cpu_seconds()
    # A kernel's count of idle time may be ahead of itself for a moment: what it calls busy grows all the same.
    while now.own_s <= begin.own_s or now.busy_s <= begin.busy_s:
        sum(range(10_000))
        now = cpu_seconds()
    assert now.at_s > begin.at_s
