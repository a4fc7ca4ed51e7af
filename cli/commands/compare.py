"""`diptych bench compare`: two pools against workers that do both, on the same cores. Does not know how either is measured."""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Unpack

import click
import msgspec

from bench.cluster import vocab_size_of
from bench.compare.numbers import Comparison
from bench.compare.page import page
from bench.compare.plots import draw
from bench.compare.report import page_text, report, write
from bench.compare.run import CompareConfig, compare
from bench.machine import cpu_seconds, foreign_percent, machine_facts
from bench.progress import say_on_stderr
from bench.report import Record
from bench.serving.results import check_folder
from cli.commands.compareflags import COMPARE_OPTIONS, CompareFlags, compare_config, systems
from cli.comparison import starter
from cli.config import WorkerOptions
from cli.modelsource import fetch
from cli.options import SectionedCommand, apply
from contracts.errors import ConfigError, DiptychError
from engine.models.store import model_name
from router.config import DisaggregationMode


@click.command("compare", cls=SectionedCommand, short_help="Two pools against workers that do both, on the same cores.")
@click.argument("more_goodput", nargs=-1, metavar="")
def compare_command(**given: Unpack[CompareFlags]) -> None:
    """Compare two pools with workers that do both, on the same CPU cores under the same load, and say where each wins.

    Starts each system in turns, as `diptych up` does, with every worker's process on its own cores.

    \b
    Examples:
      diptych bench compare --model smollm2-135m-instruct --result-dir results/
      diptych bench compare --model NAME --prefill-cores 0,1 --decode-cores 2,3 --colocated-cores 0,1/2,3
      diptych bench compare --model NAME --input-len 1024 --request-rate 0.2,0.4 --colocated-step-tokens 128
    """
    systems(given)  # what is wrong with the cores is said before a model is fetched
    model_dir = fetch(given["model"], given["cache_dir"])
    config = compare_config(given, vocab_size_of(model_dir))
    if given["result_dir"] is not None:
        check_folder(given["result_dir"])
    workers = WorkerOptions(
        dtype=given["dtype"], kv_memory_bytes=given["kv_memory"], max_model_len=given["max_model_len"]
    )
    say = say_on_stderr()
    start = starter(model_dir, workers, DisaggregationMode(given["disaggregate"]), say)
    facts, begin = machine_facts(), cpu_seconds()
    name = f"{model_name(model_dir)} ({'its own type' if given['dtype'] == 'auto' else given['dtype']})"
    rounds: list[tuple[CompareConfig, Comparison]] = []

    def tell() -> None:
        measured, comparison = rounds[-1]
        foreign = foreign_percent(begin, cpu_seconds(), facts.cores)
        record = Record(facts, report(comparison, measured, name, command_line(), NOTES), foreign)
        click.echo(page_text(record), err=True)
        _write(given, comparison, record)

    try:
        # not uvloop, whose children are made by fork, which gRPC in this process does not like
        asyncio.run(compare(config, start, say, lambda measured, comparison: rounds.append((measured, comparison))))
    except (KeyboardInterrupt, DiptychError):
        if rounds:
            say(f"ended early; this is what {len(rounds)} of {config.rounds} rounds come to")
            tell()
        raise
    tell()


NOTES = (
    "The router and the client are on the same machine and keep to no cores: what they take, they take from every system alike.",
)

apply(COMPARE_OPTIONS, compare_command)


def command_line() -> str:
    """What was typed, for the record; only the last part of where the program is."""
    return f"diptych {shlex.join(sys.argv[1:])}"


def _write(given: CompareFlags, comparison: Comparison, record: Record) -> None:
    folder = given["result_dir"]
    if folder is None:
        click.echo(msgspec.json.encode(record).decode())
        return

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        pictures = draw(comparison, folder, say) if given["plots"] else []
        for path in (*write(record, page(comparison, record, pictures), folder, pictures), *pictures):
            say(f"wrote {path}")
    except (ConfigError, OSError) as error:  # what was measured is not lost with the folder
        click.echo(msgspec.json.encode(record).decode())
        raise ConfigError(f"--result-dir: {folder}: {error}") from error
