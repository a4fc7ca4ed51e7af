"""The comparison as one report: a table that shows where each wins, everything measured as JSON, and what to know beside it.

Does not know how anything was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.compare.load import LoadConfig
from bench.compare.numbers import EVEN, ITL_MAX, ITL_P99, QUANTITIES, Comparison, Quantity
from bench.compare.run import CompareConfig
from bench.report import Measure, Record, Report, Table, Verdict, number
from contracts.errors import ConfigError

NAME = "compare"
TITLE = "Two pools against workers that do both, on the same cores"


def report(comparison: Comparison, config: CompareConfig, model: str, command: str, others: tuple[str, ...]) -> Report:
    """`others` are notes of what the load was measured beside."""
    measures = tuple(
        Measure(f"{cell.label}: {system}: {quantity.title}", quantity.unit, runs)
        for cell in comparison.cells
        for quantity in QUANTITIES
        for system in comparison.systems
        if (runs := comparison.runs(cell, system, quantity))
    )
    verdicts = [Verdict("token ids that differ between systems", comparison.tokens.differing, "", 0, at_least=False)]
    return Report(
        name=NAME,
        title=TITLE,
        command=command,
        method=_method(config, model),
        measures=measures,
        verdicts=(*verdicts, *_longest(comparison)),
        notes=(*_notes(comparison), *others),
        tables=(table(comparison),),
    )


def table(comparison: Comparison) -> Table:
    """A row a cell; in each column every system's median, the best of them bold where it is best by more than EVEN."""
    order = " · ".join(comparison.systems)
    columns = tuple(f"{quantity.title}, {quantity.unit}" for quantity in QUANTITIES)
    rows = []
    for cell in comparison.cells:
        values = tuple(_cell(comparison.medians(cell, q), comparison.winner(cell, q)) for q in QUANTITIES)
        rows.append((cell.label, f"{cell.input_rate:.0f}", *values))
    return Table(f"{order}; bold is best by more than {EVEN - 1:.0%}", ("prompts", "tokens/s", *columns), tuple(rows))


def _cell(values: dict[str, float], winner: str | None) -> str:
    return " · ".join(f"**{shown(value)}**" if system == winner else shown(value) for system, value in values.items())


def shown(value: float) -> str:
    """As it stands in a table; a dash for nothing measured."""
    return "–" if math.isnan(value) else number(value)


def _method(config: CompareConfig, model: str) -> str:
    load = config.load
    who = "; ".join(f"{system.name}: {system.where}" for system in config.systems)
    limits = ", ".join(f"{name.upper()} {most_ms:g} ms" for name, most_ms in config.limits.most_ms)
    return (
        f"{model}. Systems, by the CPU cores that each worker's process keeps to, one compute thread a core: {who}. "
        f"Each round starts every system in turn, as `diptych up` does, and gives it every cell's load: {load.streams} streams "
        f"({load.stream_input_len} tokens in) decode all the time; {arrivals(load)} for {load.window_s:g} s, each with "
        f"{load.output_len} tokens of answer. Prompts and times are the same for every system; {_rounds(config.rounds)}. "
        "ITL of streams is of the gaps that begin within those seconds, TTFT and TPOT of the prompts that arrive, from when they "
        f"were due. Goodput is of prompts that kept {limits}; a stream's token is in time when its gap kept the limit of TPOT."
    )


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds, medians"


def arrivals(load: LoadConfig) -> str:
    """How prompts come, in words."""
    return (
        "prompts arrive at constant gaps"
        if math.isinf(load.burstiness)
        else f"prompts arrive at random (gamma, burstiness {load.burstiness:g})"
    )


def _longest(comparison: Comparison) -> list[Verdict]:
    """The claim: streams' ITL beside the longest prompts, two pools over each other system, in the worst of the cells."""
    longest = max(cell.input_len for cell in comparison.cells)
    first, *rest = comparison.systems
    verdicts = []
    for quantity, other in itertools.product((ITL_P99, ITL_MAX), rest):
        medians = [comparison.medians(cell, quantity) for cell in comparison.cells if cell.input_len == longest]
        ratios = [values[first] / values[other] for values in medians if not math.isnan(values[first] / values[other])]
        if ratios:
            name = f"{quantity.title} beside {longest}-token prompts, {first} over {other}, worst cell"
            verdicts.append(Verdict(name, max(ratios), "x", 1.0, at_least=False))
    return verdicts


def _notes(comparison: Comparison) -> tuple[str, ...]:
    tokens = comparison.tokens
    said = [
        f"Tokens: {tokens.compared:,} compared with {comparison.systems[0]}'s, {tokens.differing:,} differ"
        + (f", in {tokens.answers} answers." if tokens.differing else ".")
    ]
    failed = [f"{system} {count}" for system, count in comparison.failed.items() if count]
    said.append(f"Failed prompts: {', '.join(failed) or 'none'}.")
    ways = ", ".join(f"{system} {count}" for system, count in comparison.over_two.items())
    said.append(f"Prompts that went over two pools: {ways}.")
    said += [f"{system} is best at: {_wins(comparison, system)}." for system in comparison.systems]
    return tuple(said)


def _wins(comparison: Comparison, system: str) -> str:
    said = [wins_at(comparison, system, quantity) for quantity in QUANTITIES]
    return "; ".join(each for each in said if each) or "nothing"


def wins_at(comparison: Comparison, system: str, quantity: Quantity) -> str:
    """In how many cells, and which; empty for none."""
    won = [cell for cell in comparison.cells if comparison.winner(cell, quantity) == system]
    if not won:
        return ""
    if len(won) == len(comparison.cells):
        return f"{quantity.title} everywhere"
    return f"{quantity.title} ({', '.join(f'{cell.input_len} at {cell.input_rate:.0f}' for cell in won)})"


def page_text(record: Record, pictures: Sequence[Path] = ()) -> str:
    """Markdown: as of any record, but tables first, and every run's number in the JSON alone; pictures are named."""
    report = record.report
    lines = [f"# {report.title}", "", report.method, "", f"`{report.command}`", ""]
    for each in report.tables:
        lines += [f"**{each.title}**", "", f"| {' | '.join(each.columns)} |", "|---" * len(each.columns) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in each.rows]
    lines += ["", "| bar | measured | wanted | |", "|---|---|---|---|"]
    for v in report.verdicts:
        met = "met" if v.met else "**missed**"
        lines.append(f"| {v.name} | {number(v.value)} {v.unit} | ≤ {number(v.bar)} {v.unit} | {met} |")
    lines += ["", *(f"* {note}" for note in report.notes)]
    machine = record.machine
    lines += [
        "",
        f"{machine.date} · {machine.cpu} ({', '.join(machine.cpu_flags)}), {machine.cores} cores, {machine.memory_gib} GiB · "
        f"Python {machine.python} · torch {machine.libraries['torch']} · other work took {record.foreign_cpu_percent:g} % "
        "of the cores",
    ]
    lines += ["", *(f"![{path.stem}]({path.name})" for path in pictures)] if pictures else []
    return "\n".join([*lines, ""])


def write(record: Record, html: str, folder: Path, pictures: Sequence[Path] = ()) -> list[Path]:
    """compare.json, compare.md and compare.html in `folder`, which is made. Raises ConfigError."""
    contents = {
        "json": msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n",
        "md": page_text(record, pictures).encode(),
        "html": html.encode(),
    }
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ending, content in contents.items():
            path = folder / f"{NAME}.{ending}"
            path.write_bytes(content)
            paths.append(path)
    except OSError as error:
        raise ConfigError(f"--result-dir: {folder}: {error.strerror}") from error
    return paths
