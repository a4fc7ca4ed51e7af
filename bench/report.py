"""What a measurement says, and how it is written: the same facts as JSON for machines and as Markdown for people.

    Report(measures, verdicts, notes) ──write──▶ results/NAME.json, results/NAME.md ──▶ results/README.md (all bars)

A verdict compares one number with the bar that was set for it before; a missed bar is written as such, with a note that
says what limits it. Does not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.machine import MachineFacts
from bench.stats import Spread
from contracts.errors import ConfigError

QUIET_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Measure:
    """One number that was taken several times."""

    name: str
    unit: str
    runs: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """The runs as statistics."""
        return Spread(self.runs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One number against its bar; `at_least` says on which side of it is good."""

    name: str
    value: float
    unit: str
    bar: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the bar is reached."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


@dataclass(frozen=True, slots=True)
class Table:
    """Things beside each other, in words as they are to be read; the first column says which."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One measurement: what was done, what came out, and what it is worth."""

    name: str
    title: str
    command: str
    method: str
    measures: tuple[Measure, ...]
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    exact: bool = False  # the same on any machine, however busy


@dataclass(frozen=True, slots=True)
class Record:
    """A report, the machine it is from and what else that was busy with, as stored."""

    machine: MachineFacts
    report: Report
    foreign_cpu_percent: float  # of all cores, over the measurement

    @property
    def noisy(self) -> bool:
        """Whether other work took so much of the cores that the numbers say little."""
        return not self.report.exact and self.foreign_cpu_percent > QUIET_PERCENT


def measure(name: str, unit: str, runs: Spread) -> Measure:
    """A Measure of a spread's runs."""
    return Measure(name, unit, runs.runs)


def joined(parts: Sequence[tuple[str, Report]]) -> Report:
    """One report of several of the same kind, each row and bar with its part's label before it; the rest is the first's."""
    measures = tuple(replace(m, name=f"{label}: {m.name}") for label, report in parts for m in report.measures)
    verdicts = tuple(replace(v, name=f"{label}: {v.name}") for label, report in parts for v in report.verdicts)
    methods = " ".join(f"{label}: {report.method}" for label, report in parts)
    return replace(parts[0][1], method=methods, measures=measures, verdicts=verdicts)


def write(record: Record, folder: Path) -> None:
    """Write NAME.json and NAME.md into `folder`, and the summary of every record there into README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    name = record.report.name
    (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    (folder / f"{name}.md").write_text(markdown(record), encoding="utf-8")
    (folder / "README.md").write_text(summary(read_all(folder)), encoding="utf-8")


def read_all(folder: Path) -> list[Record]:
    """Every record in `folder`, by name. Raises ConfigError naming a file that is not a record of this version."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=Record))
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path.name}: not a record of this version ({error}); measure again or remove it"
            ) from error
    return records


def markdown(record: Record) -> str:
    """One record as a page."""
    report = record.report
    lines = [f"# {report.title}", "", report.method, "", f"`{report.command}`", ""]
    if report.verdicts:
        lines += [*_verdict_table(report.verdicts), ""]
    lines += ["| measure | unit | median | lowest | highest | runs |", "|---|---|---|---|---|---|"]
    for m in report.measures:
        s = m.spread
        cells = (m.name, m.unit, number(s.median), number(s.low), number(s.high), str(len(m.runs)))
        lines.append(f"| {' | '.join(cells)} |")
    for table in report.tables:
        lines += ["", f"**{table.title}**", "", _row(table.columns), "|---" * len(table.columns) + "|"]
        lines += [_row(row) for row in table.rows]
    if report.notes:
        lines += ["", *(f"* {note}" for note in report.notes)]
    if record.noisy:
        lines += ["", "**Other work took a part of the cores: read ratios with care and differences not at all.**"]
    return "\n".join([*lines, "", _origin(record), ""])


def summary(records: Sequence[Record]) -> str:
    """All bars of all records as one page, which says where to read more."""
    lines = ["# results — the last run of each measurement", ""]
    lines += ["| measurement | bar | measured | wanted | |", "|---|---|---|---|---|"]
    for record in records:
        report = record.report
        link = f"[{report.name}]({report.name}.md)" + (" (noisy machine)" if record.noisy else "")
        for v in report.verdicts:
            lines.append(f"| {link} | {v.name} | {number(v.value)} {v.unit} | {_wanted(v)} | {_met(v)} |")
        if not report.verdicts:
            lines.append(f"| {link} | {report.title} | no bar | | |")
    return "\n".join([*lines, ""])


def number(value: float) -> str:
    """Three significant digits, no exponent, no false precision."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [f"| {v.name} | {number(v.value)} {v.unit} | {_wanted(v)} | {_met(v)} |" for v in verdicts]
    return ["| bar | measured | wanted | |", "|---|---|---|---|", *rows]


def _wanted(verdict: Verdict) -> str:
    return f"{'≥' if verdict.at_least else '≤'} {number(verdict.bar)} {verdict.unit}"


def _met(verdict: Verdict) -> str:
    return "met" if verdict.met else "**missed**"


def _origin(record: Record) -> str:
    machine = record.machine
    libraries = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    return (
        f"{machine.date} · {machine.cpu} ({', '.join(machine.cpu_flags)}), {machine.cores} cores, {machine.memory_gib} GiB · "
        f"{machine.system}, Python {machine.python} · {libraries} · other work took {record.foreign_cpu_percent:g} % of the "
        "cores during the measurement"
    )
